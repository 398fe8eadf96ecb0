"""Engines: what serves the model. Importing this package imports neither vLLM nor torch."""
