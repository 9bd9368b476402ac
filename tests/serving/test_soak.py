"""A soak: drafts, prefix cache, chunked prefill, preemption and formats, of `tiny` every two of them together; each text is
the reference's.

The fault that it looks for, drafts verified by lengths that are not theirs, is planted and found.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest
from vllm_judge import Judge, Verdict, prompts
from vllm_soak import FAULTS, SINKS, Request, ServedTexts, Servers, Way

from haarkv.tq_ops.kv.plan import KVSpec

CHUNK = 64
REQUESTS = {"tiny": 50, "tiny-hybrid": 25}
LENGTHS = (7, 40, 110, 150, 230, 290)
NEW_TOKENS = (32, 56, 80, 40)
"""Most requests take one block more as they go on, and some one less than others."""
REPEAT_GAP = 5
"""Requests from a prompt to the same prompt again."""
KV = {"tiny": ("tq4", "tq3", "k=tq6,v=tq4", "tq8", "tq2"), "tiny-hybrid": ("tq4", "k=tq6,v=tq4", "tq3")}
DRAFTS = {"tiny": ("", "ngram", "draft_model", "eagle3"), "tiny-hybrid": ("", "mtp")}
# Whether prefixes are cached, prompts come in chunks and room is little, way by way.
SWITCHES = {
    "tiny": (5, 3, 2, 0, 1, 6, 7, 4, 7, 0, 7, 5, 2, 5, 0, 3, 0, 3, 4, 6),
    # With drafts vLLM keeps no prefixes of it, and none of its blocks is ever full here.
    "tiny-hybrid": (1, 0, 2, 2, 3, 0),
}


def ways(model: str) -> list[Way]:
    """Every format with every draft."""
    pairs = [(kv, drafts) for kv in KV[model] for drafts in DRAFTS[model]]
    return [
        Way(model, kv, drafts, prefix=bool(bits & 1), chunk=CHUNK * bool(bits & 2), small=bool(bits & 4))
        for (kv, drafts), bits in zip(pairs, SWITCHES[model], strict=True)
    ]


WAYS = [
    *(way for model in KV for way in ways(model)),
    Way(tail=124, drafts="ngram"),
    Way(tail=40, kv="k=tq6,v=tq4", drafts="ngram", prefix=False, chunk=CHUNK, small=True),
    Way(tail=40, kv="k=tq6,v=tq4", drafts="eagle3", chunk=CHUNK),
    Way("tiny-hybrid", tail=124),
    Way("tiny-hybrid", tail=40, kv="k=tq6,v=tq4", drafts="mtp", prefix=False),
]


@cache
def judge(model: str, kv: str, tail: int) -> Judge:
    return Judge(KVSpec(kv, tail=tail, sink=SINKS) if tail else KVSpec(kv), model)


def compare(way: Way, batch: list[Request], run: ServedTexts) -> Verdict:
    assert [len(text) for text in run.texts] == [request.new_tokens for request in batch]
    return judge(way.model, way.kv, way.tail).judge([request.prompt for request in batch], run.answers)


def requests(count: int) -> list[Request]:
    """Each prompt twice: the second time its first blocks may be known, and too few stand between to push them out."""
    pool = [
        Request(tuple(prompt), NEW_TOKENS[i % len(NEW_TOKENS)]) for i, prompt in enumerate(prompts(-(-count // 2), LENGTHS))
    ]
    groups = (pool[i : i + REPEAT_GAP] for i in range(0, len(pool), REPEAT_GAP))
    return [request for some in groups for request in some + some][:count]


def assert_shown(way: Way, run: ServedTexts) -> None:
    """It was really served so."""
    figures = run.figures
    assert (figures["vllm:num_preemptions"] > 0) == way.small, figures
    assert (figures.get("vllm:prefix_cache_hits", 0) > 0) == (way.prefix and way.model == "tiny"), figures
    num_drafted, num_accepted = (figures.get(f"vllm:spec_decode_num_{name}_tokens", 0) for name in ("draft", "accepted"))
    assert (num_drafted > 0) == bool(way.drafts), figures
    if way.drafts in ("ngram", "draft_model", "mtp"):
        assert num_accepted > 0, figures


@pytest.mark.vllm_short
def test_every_two_settings_meet():
    rows = [(way.kv, way.drafts, way.prefix, way.chunk, way.small) for way in ways("tiny")]
    for a, b in combinations(range(5), 2):
        values = ({row[i] for row in rows} for i in (a, b))
        assert {(row[a], row[b]) for row in rows} == set(product(*values))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    running = Servers(tmp_path_factory.mktemp("soak") / "log")
    yield running
    running.stop()


@pytest.mark.vllm_server
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_text_is_the_references(servers, way, record_property):
    batch = requests(REQUESTS[way.model])
    run = servers.serve(way, batch)
    comparison = compare(way, batch, run)
    record_property("compared", str(comparison))
    print(f"{way}: {comparison}; started in {run.seconds[0]:.0f} s, served in {run.seconds[1]:.0f} s; {run.figures}")
    assert not comparison.wrong, comparison
    assert_shown(way, run)


@pytest.mark.vllm_server
@pytest.mark.parametrize(("kv", "tail"), [("tq4", 0), ("k=tq6,v=tq4", 124)])
def test_a_hybrid_goes_on_from_states_that_were_kept(servers, kv, tail, record_property):
    """Prompts that fill vLLM's blocks, of some 640 tokens beside these states: one again, longer, and parting behind it."""
    other, text = prompts(2, (60, 2000))
    prompt_ids = [text[:1330], text[:700], text[:1330], text[:1400], [*text[:1300], *other], [*text[:645], *other], text[:700]]
    batch = [Request(tuple(prompt), 40) for prompt in prompt_ids]
    way = Way("tiny-hybrid", kv, tail, context=2048, at_once=1)
    run, anew = servers.serve(way, batch), servers.serve(replace(way, prefix=False), batch)
    hits = run.figures["vllm:prefix_cache_hits"]
    comparison, same = compare(way, batch, run), sum(map(list.__eq__, run.texts, anew.texts))
    without = compare(way, batch, anew)
    record_property("compared", f"{comparison}; {same} as without prefixes")
    print(f"{way}: {hits:.0f} tokens known; {comparison}; {same} as without prefixes: {without}")
    assert hits >= 4096, "five begin as one before them"
    assert same == len(batch)
    assert anew.figures["vllm:prefix_cache_hits"] == 0
    assert not comparison.wrong, comparison
    assert comparison.equal > 0


@pytest.mark.vllm_server
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("drafts", ["ngram", "draft_model"])
def test_drafts_verified_by_other_lengths_are_found(servers, drafts, fault, record_property):
    batch, way = requests(20), Way(drafts=drafts)
    comparison = compare(way, batch, servers.serve(way, batch, fault))
    record_property("compared", str(comparison))
    print(f"{drafts}, {fault}: {comparison}")
    assert comparison.wrong > 5, comparison
