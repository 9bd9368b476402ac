"""The real server under many users; of users who must make room for each other, see `test_soak.py`."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from vllm_judge import Judge, prompts
from vllm_server import Answer, Server

pytestmark = pytest.mark.vllm_server

USERS, NEW_TOKENS = 25, 400
PROMPTS = prompts(USERS, (20, 60, 110, 150, 200))
# Of the workers' resident memory, from the third quarter of a run to the last. Measured: 0.1 MiB of 809.
GROWTH = 8 * 2**20


def all_at_once(server: Server) -> list[Answer]:
    """Every user's answer, each asked for in a connection of its own."""
    with ThreadPoolExecutor(USERS) as users:
        answers = list(users.map(lambda prompt: server.complete([prompt], NEW_TOKENS)[0], PROMPTS))
    assert [(len(answer.token_ids), answer.finish) for answer in answers] == [(NEW_TOKENS, "length")] * USERS
    return answers


def assert_right(judge: Judge, prompt_ids: Sequence[Sequence[int]], answers: Sequence[Answer]) -> None:
    verdict = judge.judge(prompt_ids, answers)
    print(verdict)
    assert verdict.passes, verdict


@contextmanager
def memory_samples(server: Server) -> Iterator[list[int]]:
    """Resident bytes of a server's workers, taken again and again meanwhile."""
    samples: list[int] = []
    workers, done = server.workers(), threading.Event()

    def watch() -> None:
        while not done.wait(0.25):
            samples.append(sum(worker.memory_info().rss for worker in workers))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def test_many_users_at_once_get_what_each_gets_alone_in_memory_that_does_not_grow(roomy, judge):
    with memory_samples(roomy) as samples:
        together = all_at_once(roomy)
    assert_right(judge, PROMPTS, together)
    alone = [roomy.complete([prompt], NEW_TOKENS)[0] for prompt in PROMPTS]
    assert_right(judge, PROMPTS, alone)
    print(f"{sum(a.token_ids == b.token_ids for a, b in zip(together, alone, strict=True))} of {USERS} alone as together")
    assert all(map(judge.parted_at_a_near_tie, PROMPTS, together, alone))
    quarter = len(samples) // 4
    assert quarter >= 4
    third, last = (statistics.median(part) for part in (samples[2 * quarter : 3 * quarter], samples[3 * quarter :]))
    print(f"resident {last / 2**20:.0f} MiB, {(last - third) / 2**20:+.1f} MiB from the third quarter to the last")
    assert last - third <= GROWTH
