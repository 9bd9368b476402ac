"""Measurements that a reader can repeat: `tq bench NAME`, and `python -m haarkv.benchmarks.gpu OUT`."""
