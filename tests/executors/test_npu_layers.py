"""Layers by the NPU programs, in PyPTO's interpreter: stored bytes are the reference's, and so is what a layer adds.

One table of rows: families, formats, tails and sinks, windows, borders of stretches, decode and prefill. One text is built
into all of them by its declaration, so a part that is left out or another family's must be seen. And whole models: as many
layers as Qwen3-14B has, and greedy text of `tiny`.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from npu_layers import CONFIG, CONFIGS, WINDOW, error_of_layer, learned_spec
from npu_programs import needs_pypto, with_pypto
from planted_programs import IN_STEPS, NOT_SHRUNK, FaultyProgram
from small_models import random_tokens, resize_config, small_model

from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import TINY, load_model
from haarkv.models.qwen3_14b.npu.programs import LayerProgram
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu.device import SimRunner
from haarkv.validation.bounds import NPU_LAYER_ADDED
from haarkv.validation.bringup.rungs import long_decode
from haarkv.validation.bringup.workbench import Workbench
from haarkv.validation.fidelity.greedy_diff import greedy_diff
from haarkv.validation.fidelity.setup import Contender, load_contenders
from haarkv.validation.layers.runner import validate

# New and stored tokens. Of the longest sequence a windowed layer skips two steps of keys.
DECODE, PREFILL = ([1, 1, 1], [299, 0, 640]), ([33, 5], [250, 0])
LAYER_CASES = {
    "decode, GQA 5": ((10, 2), *DECODE),
    "decode, GQA 1": ((3, 3), [1, 1], [127, 128]),
    "decode, GQA 8": ((8, 1), [1], [4]),
    "prefill after a stored prefix, GQA 5": ((10, 2), *PREFILL),
    "prefill over two tiles, GQA 2": ((4, 2), [130], [3]),
}
"""Heads of queries and of keys, and tokens."""
# Sequences of 1,023, 1,024 and 1,025 tokens and a short one; later steps of 2,048 keys, the second of two stretches and of
# one; prompts that cross a border within a unit, stand at one, and end before one.
AT_A_BORDER, ACROSS_A_BORDER = ([1, 1, 1, 1], [1022, 1023, 1024, 5]), ([40, 3, 2], [1000, 1024, 7])
BORDERS = {
    "decode": AT_A_BORDER,
    "decode, two steps": ([1, 1], [2100, 3080]),
    "prefill": ACROSS_A_BORDER,
    "prefill, three stretches": ([3, 2], [2300, 1500]),
}
BOTH = {"decode": DECODE, "prefill": PREFILL}
FAR = resize_config(CONFIG, num_heads=4, max_position_embeddings=4096)
WINDOWED, WHOLE = range(0, 1), range(1, 2)
TAIL = {"tail": 20, "sink": 3}


def make_spec(config, kv="k=lr4,v=tq4", turning=True, **window_options):
    return replace(learned_spec(config, kv, turning=turning) if "lr" in kv else KVSpec(kv), **window_options)


def row(name, config, case, kv="tq4", layers=WHOLE, short=False, **options):
    marks = () if short else pytest.mark.npu_long
    return pytest.param(config, case, kv, layers, options, id=name, marks=marks)


def heads(case):
    (queries, keys), *tokens = LAYER_CASES[case]
    return resize_config(CONFIG, num_heads=queries, num_kv_heads=keys), tokens


FIXED_FORMATS = ["bf16", "tq4_seed", "k=bf16,v=tq4", "k=tq4,v=tq4_seed"]
LEARNED_FORMATS = ["k=lr2,v=tq4", "k=lr3,v=bf16", "k=lr5,v=tq4_seed", "k=lr4,v=tq4"]
RINGS = [{"tail": 1}, {"sink": 70}, {"tail": 300, "sink": 70}]
TEN, EIGHT = (resize_config(CONFIG, num_heads=n) for n in (10, 8))
# Each format, family and kind, a window, a tail and a border: these run in `make test`.
ROWS = [
    row("qwen3, decode", *heads("decode, GQA 5"), short=True),
    row("llama, prefill, bf16", CONFIGS["llama"], PREFILL, "bf16", short=True),
    row("qwen2, decode, tq4_seed", CONFIGS["qwen2"], DECODE, "tq4_seed", short=True),
    row("gemma3, window, prefill, learned", CONFIGS["gemma3"], PREFILL, "k=lr4,v=tq4", WINDOWED, short=True),
    row("gemma3, window, decode, tail", CONFIGS["gemma3"], DECODE, "tq4", WINDOWED, short=True, tail=8, sink=3),
    row("gemma3, prefill, tail", CONFIGS["gemma3"], ([20, 9], [250, 3]), "tq4", WHOLE, short=True, tail=64),
    row("border, decode, tail", FAR, AT_A_BORDER, "k=lr4,v=tq4", short=True, **TAIL),
    row("third stretch, decode", FAR, ([1, 1], [2100, 5]), "k=lr4,v=tq4", short=True),
    row("border, prefill", FAR, ACROSS_A_BORDER, "k=lr4,v=tq4", short=True),
    *(row(f"qwen3, {case}", *heads(case)) for case in LAYER_CASES if case != "decode, GQA 5"),
    *(
        row(f"{name}, {kind}, layer {layers.start}", CONFIGS[name], BOTH[kind], "tq4", layers)
        for name, kind, layers in product(CONFIGS, BOTH, (WINDOWED, WHOLE))
    ),
    *(
        row(f"{name}, {kv}", config, PREFILL, kv, WINDOWED)
        for (name, config), kv in product(CONFIGS.items(), ["bf16", "tq4_seed", "k=lr4,v=tq4"])
    ),
    *(row(f"{kind}, {kv}", TEN, BOTH[kind], kv) for kind, kv in product(BOTH, FIXED_FORMATS)),
    row("prefill, turns that are not known", TEN, PREFILL, "k=lr4,v=tq4", turning=False),
    *(row(f"{kind}, {kv}", TEN, BOTH[kind], kv) for kind, kv in product(BOTH, LEARNED_FORMATS)),
    *(row(f"border, {case}, {kv}", FAR, BORDERS[case], kv) for case, kv in product(BORDERS, LEARNED_FORMATS)),
    *(
        row(f"border, {case}, default tail", FAR, BORDERS[case], "k=lr4,v=tq4", tail=128, sink=4)
        for case in ("decode, two steps", "prefill", "prefill, three stretches")
    ),
    *(
        row(f"{kind}, {kv}, {kept}", EIGHT, BOTH[kind], kv, **kept)
        for kind, kv, kept in product(BOTH, ["tq4", "k=tq4,v=tq4_seed"], [TAIL, *RINGS])
    ),
    *(
        row(f"gemma3, {kind}, layer {layers.start}, {kept}", CONFIGS["gemma3"], BOTH[kind], "tq4", layers, **kept)
        for kind, layers, kept in product(BOTH, (WINDOWED, WHOLE), [{"tail": 8, "sink": 3}, {"tail": 64}])
    ),
]


@with_pypto
@pytest.mark.parametrize(("config", "case", "kv", "layers", "options"), ROWS)
def test_a_layer_stores_the_reference_bytes_and_adds_what_it_adds(config, case, kv, layers, options):
    error, wrong = error_of_layer(*case, make_spec(config, kv, **options), layers, config)
    assert not wrong
    assert error < NPU_LAYER_ADDED


# -- Parts left out ----------------------------------------------------------------------------------------------------------
def without(part="", **fields):
    def plant(program):
        layer = program.declared
        fields_of_layer = {part: replace(getattr(layer, part), **fields)} if part else fields
        return replace(program, declared=replace(layer, **fields_of_layer))

    return plant


def attending(**sizes):
    return lambda program: replace(program, attention=replace(program.attention, **sizes))


FAULTS = {
    "biases left out": ("qwen2", without("mixer", bias=False)),
    "norms of heads left out": ("gemma3", without("mixer", head_norms=False)),
    "norms behind left out": ("gemma3", without(post_norms=False)),
    "SiLU for GELU": ("gemma3", without("mlp", activation="silu")),
    "no window": ("gemma3", attending(window=None)),
    "a window one longer": ("gemma3", attending(window=WINDOW + 1)),
    "a window one shorter": ("gemma3", attending(window=WINDOW - 1)),
    "logits of another scale": ("llama", attending(scale=128**-0.5)),
}
SHORT = ("biases left out", "a window one longer")


@with_pypto
@pytest.mark.parametrize("fault", [pytest.param(f, marks=() if f in SHORT else pytest.mark.npu_long) for f in FAULTS])
def test_a_part_that_is_left_out_or_anothers_is_seen(fault):
    name, plant = FAULTS[fault]
    error, _ = error_of_layer(*DECODE, KVSpec("tq4"), WINDOWED, CONFIGS[name], plant)
    print(f"{fault}: {error:.1e}")
    assert error > 2 * NPU_LAYER_ADDED


@with_pypto
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == NOT_SHRUNK else pytest.mark.npu_long) for n in IN_STEPS])
def test_a_bring_up_finds_a_fault_of_a_step_in_a_decode_over_two(name, monkeypatch):
    """With `tiny` and its steps of 2,048 keys."""
    call = SimRunner.call

    def faulty_call(self, program, tensors):
        wrong = FaultyProgram.with_fault(program, *IN_STEPS[name]) if isinstance(program, LayerProgram) else program
        call(self, wrong, tensors)

    monkeypatch.setattr(SimRunner, "call", faulty_call)
    finding = long_decode(Workbench(lambda _: None, "npu", "sim"))
    assert (finding.passed, finding.where) == (False, "tq4, layer 0, attention"), finding.said


# -- As `tq validate` runs ---------------------------------------------------------------------------------------------------
@needs_pypto[1]
@pytest.mark.npu_long
@pytest.mark.parametrize(
    ("window_options", "length", "exercised"),
    [
        ({}, 20, None),
        (TAIL, 100, "sinks that an earlier forward stored"),
        (TAIL, STRETCH + 3, f"keys of a second stretch (over {STRETCH:,} tokens)"),
    ],
    ids=["packed", "tail", "border"],
)
def test_a_validation_passes(window_options, length, exercised):
    """Prompts in chunks, decode, and drafted tokens that are taken back, out of the ring as well."""
    config = resize_config(FAR, num_layers=1)
    model, plan = small_model(config, dtype=torch.bfloat16), make_spec(config, **window_options).plan(1)
    candidate = catalog.create("npu", model, plan, "sim")
    prompts = [random_tokens(config, length, 1), random_tokens(config, 5, 2)]
    report = validate(ReferenceExecutor(model), candidate, model, prompts, 1, plan)
    assert report.passed, report.first_divergence
    assert {row.phase for row in report.rows} == {"prefill", "decode", "verify"}
    assert exercised is None or exercised in report.exercised


# -- Whole models ------------------------------------------------------------------------------------------------------------
@needs_pypto[1]
@pytest.mark.npu_long
def test_forty_layers_stay_within_their_bounds():
    model = load_model("random:narrow", "bfloat16")
    layers = model.config.num_layers
    plan = KVSpec("tq4").plan(layers)
    reference_executor, on_trial = (
        catalog.create(name, model, plan, device) for name, device in (("reference", None), ("npu", "sim"))
    )
    tokens = [(7 * i * i + 3) % model.config.vocab_size for i in range(140)]
    report = validate(reference_executor, on_trial, model, [tokens], 1, plan)
    assert report.passed, report.first_divergence
    assert {(row.mode, row.layer) for row in report.rows} == {
        (mode, layer) for mode in ("teacher-forced", "free-running") for layer in range(40)
    }


@needs_pypto[1]
@pytest.mark.npu_long
@pytest.mark.parametrize(
    ("kv", "lengths"), [("tq4", [5]), ("tq4", [129]), ("tq4", [300, 5, 128]), ("bf16", [5]), ("tq4_seed", [5])],
    ids=str,
)  # fmt: skip
def test_prompts_give_the_references_tokens_but_for_near_ties(kv, lengths):
    """Around a block, and as a ragged batch."""
    *sides, _ = load_contenders("tiny", (Contender("reference", kv), Contender("npu", kv)), dtype="bfloat16", device="sim")
    text = (TINY / "held_out.txt").read_text(encoding="utf-8")
    prompts = [prompt_tokens(sides[0], text[100 * at :], tokens) for at, tokens in enumerate(lengths)]
    diff = greedy_diff(*sides, prompts, dtype="bfloat16", max_new_tokens=16)
    assert [prompt.a.prompt_tokens for prompt in diff.prompts] == lengths
    assert not diff.faulty, diff.unexplained
    # Near ties are rare: a wrong layer would make everything one.
    assert diff.near_ties <= diff.fidelity.positions // 4


def prompt_tokens(session, text, tokens):
    """The beginning of a text that encodes to this many tokens."""
    return next(text[:end] for end in range(1, 12 * tokens) if len(session.encode([text[:end]])[0]) == tokens)
