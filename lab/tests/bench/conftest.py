"""Benchmarks as `python -m lab.bench` runs them."""

from glances import bench_fixture, glance

from lab.bench.__main__ import main

__all__ = ["glance", "run"]
run = bench_fixture(main)
