"""The real server's text is the reference's, token by token, however the server cuts, shares or spreads its work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from vllm_judge import Judge, Verdict, prompts, tokenizer
from vllm_server import CACHE_BYTES, Answer, Server, serving

from haarkv.models.catalog import TINY

pytestmark = pytest.mark.vllm_server

NEW_TOKENS = 64
# Shorter and longer than a block of 128 tokens and than a chunk of 64.
ASKED = prompts(20, (7, 40, 130, 200, 300))
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

ITSELF = {"method": "draft_model", "model": str(TINY), "num_speculative_tokens": 3}


@dataclass(frozen=True)
class Variant:
    """One way to serve.

    Attributes:
        shows: whether the server, or by how much its figures have grown, says that it was really served so.
        flags, environment: beside those that all servers have; none of either for the server that other tests share.
    """

    shows: Callable[[Server, dict[str, float]], bool]
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


VARIANTS = {
    # In the second round the whole blocks of 12 prompts are known: 8 with one, 4 with two.
    "plain": Variant(lambda server, new: new["vllm:prefix_cache_hits_total"] >= 16 * 128),
    "no-prefix-caching": Variant(
        lambda server, new: new.get("vllm:prefix_cache_hits_total", 0) == 0,
        ("--no-enable-prefix-caching",),
    ),
    "chunks-of-64": Variant(
        # No forward takes more, so a prompt of 300 tokens comes in five pieces or more.
        lambda server, new: "max_num_batched_tokens=64" in server.log.read_text(),
        ("--max-num-batched-tokens", "64", "--no-enable-prefix-caching"),
    ),
    "two-ranks": Variant(
        # Each keeps one of the two KV heads in as much memory.
        lambda server, new: server.kv_tokens() > 1.9 * CACHE_BYTES / (6 * 2 * 2 * 66),
        ("--tensor-parallel-size", "2"),
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    ),
    "ngram-drafts": Variant(
        lambda server, new: new["vllm:spec_decode_num_accepted_tokens_total"] > NEW_TOKENS,
        ("--speculative-config", json.dumps(NGRAM)),
    ),
    "draft-model": Variant(
        # The model is its own draft: nearly all that it proposes is kept.
        lambda server, new: (
            new["vllm:spec_decode_num_accepted_tokens_total"] > 0.8 * new["vllm:spec_decode_num_draft_tokens_total"]
        ),
        ("--speculative-config", json.dumps(ITSELF)),
    ),
}


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=pytest.mark.vllm_short if n == "plain" else ()) for n in VARIANTS]
)
def served(request, tmp_path_factory):
    """A variant and its server."""
    variant = VARIANTS[request.param]
    if not variant.flags:
        yield variant, request.getfixturevalue("roomy")
        return
    with serving(tmp_path_factory.mktemp(request.param) / "log", *variant.flags, **variant.environment) as server:
        yield variant, server


def asked_twice(server: Server) -> list[list[Answer]]:
    """All prompts at once; then again, when the server may know them."""
    rounds = [server.complete(ASKED, NEW_TOKENS) for _ in range(2)]
    assert all(len(answer.token_ids) == NEW_TOKENS for answers in rounds for answer in answers)
    return rounds


def report(record_property, name: str, verdict: Verdict) -> None:
    record_property(name, str(verdict))
    print(f"{name}: {verdict}")


def test_each_served_token_is_the_references_or_nearly_as_good_to_it(served, judge, record_property):
    variant, server = served
    before = server.metrics()
    for number, answers in enumerate(asked_twice(server), 1):
        verdict = judge.judge(ASKED, answers)
        report(record_property, f"round {number}", verdict)
        assert verdict.passes, verdict
    grown = {name: value - before.get(name, 0.0) for name, value in server.metrics().items()}
    assert variant.shows(server, grown), grown


@pytest.mark.vllm_short
def test_the_text_is_the_tokens_and_ends_where_the_model_ends_it(roomy):
    prompt = ASKED[1]
    ended = roomy.post(json={"model": str(TINY), "prompt": prompt, "max_tokens": 8, "temperature": 0, "echo": True}).json()
    [answer] = roomy.complete([prompt], 8)
    assert ended["choices"][0]["text"] == tokenizer().decode([*prompt, *answer.token_ids])


@pytest.mark.vllm_short
def test_in_the_same_memory_there_is_room_for_3_7_times_as_many_tokens(roomy):
    bf16 = CACHE_BYTES // (6 * 2 * 2 * 128 * 2)  # layers, K and V, KV heads, coordinates, bytes
    print(f"{roomy.kv_tokens()} tokens in tq4, {bf16} in BF16 without any loss to blocks")
    assert roomy.kv_tokens() >= 3.7 * bf16


def test_a_server_in_bf16_has_room_for_fewer_and_is_told_apart(roomy, judge, tmp_path, record_property):
    """What the judge lets pass in tq4 it does not let pass from another cache."""
    with serving(tmp_path / "log", kv="bf16") as server:
        print(f"{roomy.kv_tokens()} tokens in tq4, {server.kv_tokens()} in BF16")
        assert roomy.kv_tokens() >= 3.7 * server.kv_tokens()
        answers = server.complete(ASKED, NEW_TOKENS)
    other = judge.judge(ASKED, answers)
    report(record_property, "bf16 by the reference in tq4", other)
    assert not other.passes
    own = Judge("bf16").judge(ASKED, answers)
    report(record_property, "bf16 by the reference in bf16", own)
    assert own.passes
