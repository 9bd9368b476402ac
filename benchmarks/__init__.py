"""Measurements that a reader can repeat: `python -m haarkv.benchmarks.NAME`."""
