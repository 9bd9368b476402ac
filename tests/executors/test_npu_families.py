"""Layers of other families than Qwen3 by the NPU programs: Llama, Qwen2 with biases, Gemma 3 with windows; heads of 64 to 256.

One text is built into all of them (`programs.Parts`), so a part that is left out or another's must be seen.
"""

from dataclasses import replace

import pytest
from at_length import rest, thinned
from npu_checked import check_layer, error_of_layer
from npu_families import CONFIGS, WINDOW
from npu_learned import learned_spec
from npu_programs import with_pypto
from small_models import small_config

from haarkv.models.catalog import read_config
from haarkv.models.qwen3_14b.npu import programs
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.bounds import NPU_LAYER_ADDED

DECODE, PREFILL = ([1, 1, 1], [299, 0, 640]), ([33, 5], [250, 0])
"""New and stored tokens. Of the longest sequence a windowed layer skips two steps of keys."""
CASES = {f"{name}, {kind}": (name, *case) for name in CONFIGS for kind, case in (("decode", DECODE), ("prefill", PREFILL))}
WINDOWED, WHOLE = range(0, 1), range(1, 2)
# The rest runs with `make test-npu`.
LONG, PLAIN = pytest.mark.npu_long, (("qwen2, decode", WHOLE), ("gemma3, prefill", WINDOWED))


@with_pypto
@pytest.mark.parametrize(
    ("case", "layers"),
    [
        pytest.param(case, layers, marks=() if (case, layers) in PLAIN else LONG, id=f"{case}, layer {layers.start}")
        for case in CASES for layers in ((WINDOWED, WHOLE) if case.startswith("gemma3") else (WHOLE,))
    ],
)  # fmt: skip
def test_a_layer_stores_the_reference_bytes_and_adds_what_it_adds(case, layers):
    name, new, stored = CASES[case]
    check_layer(None, new, stored, KVSpec("tq4"), layers, CONFIGS[name])


@with_pypto
@pytest.mark.parametrize(("kv", "name"), thinned(LONG, ["bf16", "tq4_seed", "k=lr4,v=tq4"], list(CONFIGS)))
def test_other_formats_lie_in_heads_of_other_sizes_too(name, kv):
    config = CONFIGS[name]
    spec = learned_spec(config, kv, turning=True) if "lr" in kv else KVSpec(kv)
    check_layer(None, *PREFILL, spec, range(1), config)


@with_pypto
@pytest.mark.parametrize(
    ("layers", "tokens", "beside"), thinned(LONG, [WINDOWED, WHOLE], [DECODE, ([20, 9], [250, 3])], [(8, 3), (64, 0)])
)
def test_tokens_in_bf16_leave_a_window_as_packed_ones_do(layers, tokens, beside):
    """Sinks, and a tail longer than the window."""
    tail, sink = beside
    check_layer(None, *tokens, KVSpec("tq4", tail=tail, sink=sink), layers, CONFIGS["gemma3"])


def without(**parts):
    return lambda program: replace(program, parts=replace(program.parts, **parts))


def with_window(window):
    return lambda program: replace(program, attention=replace(program.attention, window=window))


FAULTS = {
    "biases left out": ("qwen2", without(bias=False)),
    "norms of heads left out": ("gemma3", without(head_norms=False)),
    "norms behind left out": ("gemma3", without(norms_behind=False)),
    "SiLU for GELU": ("gemma3", without(activation="silu")),
    "no window": ("gemma3", with_window(None)),
    "a window one longer": ("gemma3", with_window(WINDOW + 1)),
    "a window one shorter": ("gemma3", with_window(WINDOW - 1)),
    "logits of another scale": (
        "llama", lambda program: replace(program, attention=replace(program.attention, scale=128**-0.5))
    ),
}  # fmt: skip


@with_pypto
@pytest.mark.parametrize("fault", rest(LONG, FAULTS, lambda _, fault: fault in ("biases left out", "a window one longer")))
def test_a_part_that_is_left_out_or_anothers_is_seen(fault):
    name, plant = FAULTS[fault]
    error, _ = error_of_layer(None, *DECODE, KVSpec("tq4"), WINDOWED, CONFIGS[name], plant)
    print(f"{fault}: {error:.1e}")
    assert error > 2 * NPU_LAYER_ADDED


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("random:qwen3.5-27b", "layer 0 of this qwen3_5 model is another than it knows: it mixes tokens by DeltaNet"),
        ("random:30b-a3b", "layer 0 of this qwen3_moe model is another than it knows: it has experts"),
    ],
)
def test_experts_and_states_are_refused_by_name(model, reason):
    assert programs.unsupported(read_config(model)) == f"its programs are those of dense layers with attention, and {reason}"


def test_sizes_that_no_tile_holds_are_refused_by_name():
    config = CONFIGS["llama"]
    assert programs.unsupported(config) is None
    odd = replace(config, hidden_size=200)
    assert programs.unsupported(odd) == "its programs need a hidden_size that is a multiple of 64, not 200"
    of_96 = small_config(hidden_size=192, head_dim=96, intermediate_size=192)
    assert programs.unsupported(of_96) == "its programs are made for a head_dim of 64, 128 or 256, not 96"
