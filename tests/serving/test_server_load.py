"""The real server under many users, too little memory, and clients that misbehave."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import requests
from vllm_judge import MEDIAN_ERROR, NEAR_TIE, Judge, prompts
from vllm_server import MAX_MODEL_LEN, MODEL, Answer, Server, request, serving

pytestmark = pytest.mark.vllm_server

USERS, NEW_TOKENS = 25, 400
PROMPTS = prompts(USERS, (20, 60, 110, 150, 200))
BLOCK = 128
SMALL_CACHE = 8 * 2**20  # 41 blocks; all users together come to 113
# Of the workers' resident memory, from the third quarter of a run to the last. Measured: 0.1 MiB of 809.
GROWTH = 8 * 2**20


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server whose cache holds about ten users at a time."""
    with serving(tmp_path_factory.mktemp("small") / "log", cache_bytes=SMALL_CACHE) as server:
        yield server


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


def test_users_who_must_make_room_for_each_other_get_the_same(small, judge):
    answers = all_at_once(small)
    preemptions = small.metrics()["vllm:num_preemptions_total"]
    print(f"{preemptions:.0f} preemptions")
    assert preemptions > 0
    assert_right(judge, PROMPTS, answers)
    assert small.metrics()["vllm:kv_cache_usage_perc"] == 0


def test_parallel_samples_differ_and_a_seed_repeats_them(roomy, judge):
    options = {"n": 4, "temperature": 1.0}
    first, again, other = (roomy.complete([PROMPTS[3]], 48, seed=seed, **options) for seed in (11, 11, 77))
    assert len({answer.token_ids for answer in first}) == 4
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in again]
    assert {answer.token_ids for answer in first}.isdisjoint({answer.token_ids for answer in other})
    verdict = judge.judge([PROMPTS[3]] * 8, [*first, *other])
    print(f"median error of sampled positions {verdict.median_error:.4f}")
    assert verdict.median_error <= MEDIAN_ERROR
    assert verdict.largest_gap > NEAR_TIE  # they were sampled


# -- Clients that misbehave ----------------------------------------------------------------------------------------------
def test_clients_that_leave_half_way_leave_nothing_behind(roomy):
    assert server_usage(roomy) == (0, 0)
    with ExitStack() as open_streams:
        streams = []  # one that is dropped is closed
        for prompt in PROMPTS[:8]:
            body = request([prompt], 800, stream=True)
            response = requests.post(roomy.url + "/v1/completions", json=body, stream=True, timeout=60)
            streams.append(open_streams.enter_context(response).iter_lines())
            assert next(streams[-1]).startswith(b"data: ")
        until(lambda: server_usage(roomy)[0] == 8)
        assert server_usage(roomy)[1] > 0
    until(lambda: server_usage(roomy) == (0, 0))
    num_finished = roomy.metrics()["vllm:request_success_total"]
    roomy.complete(PROMPTS[:1], 1)
    assert roomy.metrics()["vllm:request_success_total"] == num_finished + 1
    assert server_usage(roomy) == (0, 0)


def server_usage(server: Server) -> tuple[float, float]:
    """Requests that run, and the part of the blocks that they hold; a prefix that is kept for others counts as free."""
    now = server.metrics()
    return now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"], now["vllm:kv_cache_usage_perc"]


def until(holds, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


BAD_REQUESTS = {
    "malformed": ({"data": "{", "headers": {"Content-Type": "application/json"}}, 400, "JSON"),
    "prompt_too_long": ({"json": request([[5] * (MAX_MODEL_LEN + 1)], 1)}, 400, str(MAX_MODEL_LEN)),
    "unknown_model": ({"json": request([[5]], 1, model="nobody/nothing")}, 404, "nobody/nothing"),
    "negative_max_tokens": ({"json": request([[5]], -1)}, 400, "max_tokens"),
    "token_of_no_vocabulary": ({"json": request([[10**6]], 1)}, 400, "vocab"),
    "no_prompt": ({"json": {"model": MODEL}}, 400, "prompt"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_gets_the_apis_own_refusal_and_the_next_is_answered_as_before(roomy, judge, name):
    body, status, word = BAD_REQUESTS[name]
    before, _ = (roomy.complete(PROMPTS[:1], 16) for _ in range(2))
    response = roomy.post(**body)
    assert response.status_code == status, response.text
    assert word in json.dumps(response.json()["error"])
    after = roomy.complete(PROMPTS[:1], 16)
    assert judge.parted_at_a_near_tie(PROMPTS[0], before[0], after[0])
    assert server_usage(roomy) == (0, 0)
