"""Measurements, each a module to run with `python -m`; results are written to docs/results."""
