"""The validator and what stays in BF16: newest tokens and sinks are stored, read and merged right, or it says where not."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from at_length import MORE_JUDGE, pairwise_cases
from npu_layers import CONFIGS
from small_models import SMALL, random_tokens, resize_config, small_model

import haarkv.validation.layers.honest_runs as honest_runs
import haarkv.validation.layers.parts as windows
import haarkv.validation.layers.reference as reference_side
from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.faults.base import DRIVES, Layer, table_with
from haarkv.validation.faults.layer import common_bugs
from haarkv.validation.faults.windows import (
    SLIDING_TOKENS,
    WINDOW_SPEC,
    Parts,
    merging,
    sliding_faults,
    window_faults,
    with_sliding_window,
)
from haarkv.validation.layers.exercise import HUGE_SCALES, TINY_SCALES, covering_prompts_for
from haarkv.validation.layers.parts import load, new_cache, snapshot, without_unread
from haarkv.validation.layers.runner import validate

CONFIG = resize_config(SMALL, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=32, intermediate_size=48)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AT = 1
PROMPTS = [random_tokens(CONFIG, 90), random_tokens(CONFIG, 40, seed=1)]  # the first one's ring of 80 starts over


@cache
def make_model(dtype="float32"):
    return small_model(CONFIG, dtype=DTYPES[dtype])


def validate_candidate(model, candidate, spec=WINDOW_SPEC, prompts=PROMPTS, steps=1, modes=("teacher-forced",), **more):
    plan = spec.plan(model.config.num_layers)
    return validate(ReferenceExecutor(model), candidate, model, prompts, steps, plan, modes=modes, **more)


# -- What is right passes ----------------------------------------------------------------------------------------------------
SPECS = {
    "a tail and sinks": WINDOW_SPEC,
    "a tail": KVSpec("tq3", tail=1),
    "sinks": KVSpec("tq4", sink=6),
    "of V alone": KVSpec("k=bf16,v=tq4", tail=3, sink=2),
    "not in every layer": KVSpec("tq4_seed", tail=70, sink=1, skip_layers=(0,)),
}


@pytest.mark.parametrize(("name", "drive"), [*((name, "ops") for name in SPECS), ("a tail and sinks", "layers")])
def test_the_reference_equals_itself(name, drive):
    """Op by op each layer runs whole as well."""
    model, spec = make_model(), SPECS[name]
    report = validate_candidate(model, DRIVES[drive](ReferenceExecutor(model)), spec, modes=("teacher-forced", "free-running"))
    assert report.passed
    assert report.first_divergence is None
    stages = {stage.stage for stage in report.tensors}
    assert ("window.v" in stages, "sink.v" in stages) == (spec.tail is not None, spec.sink > 0)
    assert "window.k" not in stages or spec.kv != "k=bf16,v=tq4"


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_parts_merged_into_one_softmax_are_right(dtype):
    """The control of the faults of a merge: the same code, merged as it should be."""
    model = make_model(dtype)
    assert validate_candidate(
        model, ReferenceExecutor(model, table_with(Layer(model, AT).instead("paged_attention", merging(Parts.merge))))
    ).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_kernels_pass(dtype):
    model = make_model(dtype)
    candidate = catalog.create("cpu", model, WINDOW_SPEC.plan(CONFIG.num_layers))
    report = validate_candidate(model, candidate, steps=2, modes=("teacher-forced", "free-running"))
    assert report.passed, report.first_divergence


# -- What must not be read ---------------------------------------------------------------------------------------------------
def filled_cache(tokens=100):
    """A cache of one sequence and the batch of its last token."""
    config, plan = CONFIG, WINDOW_SPEC.plan(CONFIG.num_layers)
    cache_ = new_cache(plan, config, 3)
    paging = PagedSequences(3, cache_.block_size)
    sequence, generator = paging.add(), torch.Generator().manual_seed(0)
    for count in (64, tokens - 65, 1):
        batch = paging.batch([sequence], [count])
        k, v = torch.randn(2, count, config.heads.num_kv_heads, config.heads.head_dim, generator=generator)
        reference.store_kv(k, v, cache_.view(AT, batch))
    return cache_, batch


def test_what_no_query_may_read_is_replaced_and_nothing_else():
    cache_, batch = filled_cache()
    before = snapshot(cache_, AT)
    q = torch.randn(1, CONFIG.heads.num_heads, CONFIG.heads.head_dim)
    after = without_unread(cache_, AT, before, batch, batch.seq_lens, q)
    codes, other = (snapshot_fields["k"]["codes"][0].transpose(0, 1) for snapshot_fields in (before, after))
    slots = [token for token in range(128) if not torch.equal(codes[token], other[token])]
    # Token 99 sees the newest 16 tokens and the first 4 in BF16, and all others packed; it is the last.
    assert slots == [*range(4), *range(84, 128)]
    changed_places = (before["window.v"]["data"] != after["window.v"]["data"]).any(-1).any(1)[0].nonzero().flatten().tolist()
    # The ring of 80 holds tokens 20 to 99; none of them before 84 is read there.
    assert changed_places == sorted(token % 80 for token in range(20, 84))
    assert torch.equal(before["sink.k"]["data"], after["sink.k"]["data"])
    expected = reference.paged_attention(q, cache_.view(AT, batch), 0.1)
    load(cache_, AT, after)
    assert torch.equal(reference.paged_attention(q, cache_.view(AT, batch), 0.1), expected)


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(
    ("name", "drive"),
    pairwise_cases(MORE_JUDGE, ["the window is one token short", "the last of the sinks is read packed"], list(DRIVES)),
)
def test_without_that_a_token_read_in_the_wrong_part_would_pass(monkeypatch, drive, name):
    """One token of 250, in a decode kernel alone: packed in 8 bits and in BF16 it is nearly the same."""
    model, spec = make_model("bfloat16"), KVSpec("tq8", tail=16, sink=4)
    wrong = next(fault for fault in window_faults(model, AT) if fault.name == name).ops["paged_attention"]

    def paged_attention(q, at, scale):
        decodes = len(q) == len(at.batch.seq_lens)
        return (wrong if decodes else reference.paged_attention)(q, at, scale)

    def report():
        candidate = DRIVES[drive](ReferenceExecutor(model, table_with({"paged_attention": paged_attention})))
        return validate_candidate(model, candidate, spec, [random_tokens(CONFIG, 250)])

    first = report().first_divergence
    assert (first.phase, first.layer, first.reason) == ("decode", AT, "fault")
    for module in (honest_runs, reference_side):
        monkeypatch.setattr(module, "without_unread", lambda _cache, _layer, kept, *_: kept)
    assert report().passed


@pytest.mark.parametrize("spec", [KVSpec("tq4"), KVSpec("bf16")], ids=lambda spec: spec.kv)
def test_a_decode_kernel_that_sees_the_place_behind_the_newest_token_is_found(monkeypatch, spec):
    """A place that was not written is nearly nothing beside 250 tokens."""
    model = make_model("bfloat16")
    one_more = next(fault for fault in common_bugs(model, AT) if fault.name == "one token too many is seen").ops[
        "paged_attention"
    ]

    def paged_attention(q, at, scale):
        if len(q) > len(at.batch.seq_lens):
            return reference.paged_attention(q, at, scale)
        longer_batch = replace(at.batch, seq_lens=at.batch.seq_lens + 1)  # or the mask would show it first
        return one_more(q, replace(at, batch=longer_batch), scale)

    def find_divergence():
        candidate = DRIVES["layers"](ReferenceExecutor(model, table_with({"paged_attention": paged_attention})))
        return validate_candidate(model, candidate, spec, [random_tokens(CONFIG, 250)]).first_divergence

    first = find_divergence()
    assert (first.phase, first.layer, first.reason, first.stage) == ("decode", AT, "fault", "attention_mlp")
    assert first.share > 10
    if spec.kv == "tq4":
        monkeypatch.setattr(windows, "_free_slots", lambda *_: None)
        assert not find_divergence().fails


# -- Sliding windows, whose blocks go round ----------------------------------------------------------------------------------
SLIDING = CONFIGS["gemma3"]


@pytest.mark.parametrize("drive", DRIVES)
def test_where_first_tokens_lay_a_ring_of_blocks_holds_newer_ones_that_are_read(drive):
    """Sinks that no query reads packed are not replaced there."""
    model, spec = small_model(SLIDING, dtype=torch.bfloat16), KVSpec("tq4", tail=20, sink=4)
    report = validate_candidate(model, DRIVES[drive](ReferenceExecutor(model)), spec, [random_tokens(SLIDING, 300)])
    assert report.passed, report.first_divergence


# -- What is exercised -------------------------------------------------------------------------------------------------------
def test_the_chosen_prompts_exercise_every_window():
    tiny = load_model("tiny")
    config = replace(CONFIG, max_position_embeddings=1024)
    model, plan = small_model(config), KVSpec("tq4", tail=20, sink=4).plan(2)
    ids = covering_prompts_for(load_tokenizer("tiny", tiny.config), config, plan, 2)
    assert [len(prompt) for prompt in ids] == [128, 129, 19, 515]
    prompts = [[token % config.vocab_size for token in prompt] for prompt in ids]
    report = validate(ReferenceExecutor(model), ReferenceExecutor(model), model, prompts, 2, plan, modes=("teacher-forced",))
    assert report.passed
    assert set(report.not_exercised) == {"whole forwards", TINY_SCALES, HUGE_SCALES}
    assert {"a decode step beyond a tail of 20", "a tail of 20 whose ring starts over"} <= set(report.exercised)
    assert "sinks that an earlier forward stored" in report.exercised


def test_a_short_prompt_says_which_windows_it_did_not_see():
    model = make_model()
    report = validate_candidate(model, ReferenceExecutor(model), prompts=[PROMPTS[0][:7]], steps=0)
    for what in ("is just full", "with one token beyond it", "with a block beyond it", "whose ring starts over"):
        assert f"a tail of 16 that {what}".replace("that with", "with").replace("that whose", "whose") in report.not_exercised
    assert "a tail of 16 that is not full" in report.exercised
    assert "sinks that an earlier forward stored" in report.not_exercised


@pytest.mark.parametrize("spec", [KVSpec("tq4"), WINDOW_SPEC], ids=["packed", "a tail"])
def test_a_token_that_a_sliding_window_hides_is_loud(spec):
    """Seen by decode steps alone, it is one of 41 tokens, but it draws all attention."""
    model = with_sliding_window(make_model(), AT)
    wrong = next(fault for fault in sliding_faults(model, AT) if fault.name.endswith("too many")).ops["paged_attention"]

    def attend(q, at, softmax_scale):
        step = len(q) == len(at.batch.seq_lens)
        return (wrong if step else reference.paged_attention)(q, at, softmax_scale)

    candidate = ReferenceExecutor(model, table_with({"paged_attention": attend}))
    report = validate_candidate(model, candidate, spec, [random_tokens(CONFIG, SLIDING_TOKENS + 20)])
    first = report.first_divergence
    assert (first.phase, first.stage, first.reason) == ("decode", "paged_attention", "fault")
    assert first.share > 1e9
