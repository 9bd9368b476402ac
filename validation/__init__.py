"""Holding executors against the reference, and formats against full precision; `layers.runner.validate` is the way in."""
