"""Holding executors against the reference: tolerances and comparisons."""
