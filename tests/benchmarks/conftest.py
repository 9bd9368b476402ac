"""Benchmarks as `tq bench` runs them."""

from glances import bench_fixture, glance

from tq.cli import main

__all__ = ["glance", "run"]
run = bench_fixture(lambda words: main(["bench", *words]))
