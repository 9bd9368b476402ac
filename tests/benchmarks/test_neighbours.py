"""The benchmark beside neighbours: they are there while it measures, and gone afterwards."""

import argparse
import multiprocessing
import os

from haarkv.benchmarks import neighbours


def test_a_step_is_timed_beside_busy_processes_that_end_with_it():
    step = neighbours.decoder("tiny", None, "tq4", 16, 1)
    cores = len(os.sched_getaffinity(0))
    with neighbours.beside("busy", argparse.Namespace()):
        running = multiprocessing.active_children()
        assert len(running) == cores
        assert all(process.is_alive() for process in running)
        assert neighbours.mean_ms(step, 0.0) > 0
    assert not multiprocessing.active_children()


def test_at_least_three_steps_are_timed_and_the_first_is_not():
    calls = []
    neighbours.mean_ms(lambda: calls.append(1), 0.0)
    assert len(calls) == 4
