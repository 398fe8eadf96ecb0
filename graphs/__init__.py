"""Graphs to try streaming edges on, and the texts their agents read."""
