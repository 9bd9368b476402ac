"""The C++ that PyPTO emits, executed on the host: whole programs of tiny, task by task, below PyPTO's interpreter."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from executed_leaves import ROWS, functions, wrong_bytes, wrong_numbers, wrong_stores
from npu_calls import LAYER, StridedWhere, layer_call
from npu_layers import CONFIGS, learned_spec, worst_token
from npu_programs import store_case
from small_models import SMALL, resize_config, small_model

from haarkv.models.catalog import load_model, read_config
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.models.qwen3_14b.npu.compile import PROGRAMS, compile_programs
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu.program import order_arguments
from haarkv.tq_ops.npu.sides import layer_sides, window_shape
from haarkv.validation.bounds import NPU_LAYER_ADDED
from lab.npu.aicore.build import check_leaves
from lab.npu.aicore.emission import Recorder, emit
from lab.npu.aicore.leaf import read_leaves

# Absolute; 2.5e-3 was measured.
LOGITS_ATOL = 1e-2


def note(name, emission, machine, verdict):
    """One row of the table for each leaf. Returns the share of leaves that ran."""
    calls = machine.call_counts()
    leaves = {symbol: same[0] for symbol, same in functions(emission).items()}
    ROWS[name] = [(leaf.scope, leaf.kind, leaf.file, calls[symbol], verdict) for symbol, leaf in leaves.items()]
    return sum(symbol in calls for symbol in leaves) / len(leaves)


def check_layer(name, simulator, toolchain, call, program):
    """A layer's cache bit for bit, and what it adds to a faint hidden state within its bound, against the reference."""
    arguments, goldens, out, tiling, expected = call
    emission = emit(simulator, program, arguments)
    machine = emission.machine(toolchain)
    after = machine.run()
    wrong = {program.arguments[i].name: wrong_numbers(after[i], golden) for i, golden in goldens.items()}
    assert not any(wrong.values()), f"wrong: {wrong}"
    assert all(wrong_bytes(arguments[i], golden) for i, golden in goldens.items()), "nothing was to be stored"
    error = worst_token(after[out][tiling.row], expected)
    assert error < NPU_LAYER_ADDED
    return note(name, emission, machine, f"cache equal, added within {error:.1e}")


@pytest.mark.long
def test_a_decode_layer_stores_the_very_bytes_and_gives_the_reference_output(simulator, toolchain):
    """Three steps of keys and one: the first, one between, the last, and one that is both first and last."""
    program = programs.decode_program(load_model("tiny", "bfloat16").config)
    call = layer_call(program, [1, 1], [4200, 17], blocks=40)
    coverage = check_layer("decode", simulator, toolchain, call, program)
    assert coverage >= 0.9


@pytest.mark.long
@pytest.mark.parametrize("kv", ["bf16", "k=tq4,v=bf16", "tq4_seed", "k=lr4,v=tq4", "k=lr3,v=bf16", "k=lr5,v=tq4"])
def test_a_decode_layer_of_other_formats_does_so_too(kv, simulator, toolchain):
    """Two steps of keys. Learned keys have products in FP32, the cube's adding up of bytes, and transposed tiles; their
    queries are turned for three stretches."""
    config = load_model("tiny", "bfloat16").config
    spec = learned_spec(config, kv) if "lr" in kv else KVSpec(kv)
    program = programs.decode_program(config, *layer_sides(spec.plan(config.num_layers), LAYER))
    call = layer_call(program, [1, 1], [2200, 17], blocks=24, spec=spec)
    assert check_layer(kv, simulator, toolchain, call, program) >= 0.85


WINDOW = {"tail": 128, "sink": 4}


def window_call(config, make, new, lengths, blocks=12, model=None, **window):
    """A layer of learned keys with tokens in BF16 beside them, about to run."""
    spec = replace(learned_spec(config), **window)
    plan = spec.plan(config.num_layers)
    program = make(config, *layer_sides(plan, LAYER), window_shape(plan, LAYER))
    call = layer_call(program, new, lengths, blocks, model, spec)
    assert len(call[1]) == (6 if window else 4)
    return program, call


@pytest.mark.long
def test_a_decode_layer_keeps_tokens_in_bf16_and_attends_to_them(simulator, toolchain):
    """Two steps of packed keys and the one of BF16; a sequence that does not fill the tail has one packed step, all masked."""
    program, call = window_call(
        load_model("tiny", "bfloat16").config, programs.decode_program, [1, 1], [2300, 17], blocks=24, **WINDOW
    )
    assert check_layer("kept decode", simulator, toolchain, call, program) >= 0.85


@pytest.mark.long
def test_a_prefill_layer_keeps_tokens_in_bf16_and_attends_to_them(simulator, toolchain):
    program, call = window_call(load_model("tiny", "bfloat16").config, programs.prefill_program, [40, 3], [1000, 2], **WINDOW)
    assert check_layer("kept prefill", simulator, toolchain, call, program) >= 0.85


@pytest.mark.long
def test_a_prefill_layer_of_learned_keys_reads_two_stretches(simulator, toolchain):
    """A unit of 32 tokens on both sides of the border."""
    program, call = window_call(load_model("tiny", "bfloat16").config, programs.prefill_program, [40, 3], [1000, 2])
    assert check_layer("turned prefill", simulator, toolchain, call, program) >= 0.85


def test_a_small_decode_layer_keeps_tokens_in_bf16_and_attends_to_them(simulator, toolchain):
    program, call = small_call(tail=20, sink=4)
    assert check_layer("kept", simulator, toolchain, call, program) == 1


def small_call(step=256, **window):
    """More than a stretch of keys, in five short steps or in one that holds two stretches, beside shorter sequences."""
    config = resize_config(SMALL, hidden_size=128, intermediate_size=128, num_heads=5, num_kv_heads=1)
    model = small_model(config, dtype=torch.bfloat16)
    make = partial(programs.decode_program, step_tokens=step)
    return window_call(config, make, [1, 1, 1], [1100, 60, 2], blocks=14, model=model, **window)


@pytest.mark.parametrize(("step", "least"), [(256, 1), (2048, 0.85)], ids=["steps of 256", "one step"])
def test_a_small_decode_layer_reads_two_stretches(step, least, simulator, toolchain):
    program, call = small_call(step)
    assert check_layer(f"turned {step}", simulator, toolchain, call, program) >= least


@pytest.mark.parametrize("kind", ["decode", pytest.param("prefill", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_small_layer_of_another_family(name, kind, simulator, toolchain):
    """Of Gemma 3 one with a window: its first sequence skips a step of keys, and sees some of two."""
    config = replace(CONFIGS[name], layers=CONFIGS[name].layers[::-1])
    model = small_model(config, dtype=torch.bfloat16)
    if kind == "decode":
        program, new, lengths = programs.decode_program(config, step_tokens=256, layer=LAYER), [1, 1, 1], [520, 60, 2]
    else:
        program, new, lengths = programs.prefill_program(config, layer=LAYER), [20, 3], [300, 2]
    assert (program.attention.window is not None) == (name == "gemma3")
    call = layer_call(program, new, lengths, blocks=14, model=model)
    assert check_layer(f"{name} {kind}", simulator, toolchain, call, program) >= 0.85


def test_keys_behind_a_border_are_stored_as_the_reference_turns_them(simulator, toolchain):
    case = store_case(16, pair=(synthetic.calibration().format(4), formats.get("tq4")))
    emission = emit(simulator, case.program, order_arguments(case.program, case.tensors))
    wrong = wrong_stores(emission, emission.machine(toolchain).run(), case.goldens)
    assert not any(wrong.values()), wrong
    assert note("turned store", emission, emission.machine(toolchain), "all bytes equal")


@pytest.mark.long
def test_a_prefill_layer_stores_the_very_bytes_and_gives_the_reference_output(simulator, toolchain):
    program = programs.prefill_program(load_model("tiny", "bfloat16").config)
    call = layer_call(program, [40, 3], [530, 20])
    coverage = check_layer("prefill", simulator, toolchain, call, program)
    assert coverage >= 0.9


def test_the_head_gives_the_reference_logits(simulator, toolchain):
    model = load_model("tiny", "bfloat16")
    program = programs.head_program(model.config)
    hidden = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    arguments, _ = inputs.head_call(program, inputs.head_constants(model, program)[0], hidden)
    emission = emit(simulator, program, arguments)
    machine = emission.machine(toolchain)
    logits = emission.outputs(machine.run())["logits"][:3]
    expected = reference.linear(
        reference.rms_norm(hidden, model.weights.final_norm, model.config.final_norm.eps), model.weights.lm_head
    )
    difference = float((logits[:, : expected.shape[1]] - expected).abs().max())
    assert note("head", emission, machine, f"logits within {difference:.1e}") >= 0.9
    assert difference < LOGITS_ATOL
    assert expected.abs().max() > 1


def test_quantize_and_append_write_the_bytes_of_the_format(store_run):
    emission, machine, goldens = store_run
    wrong = wrong_stores(emission, machine.run(), goldens)
    assert note("store", emission, machine, "all bytes equal") == 1
    assert not any(wrong.values()), wrong


def test_levels_of_the_published_layout_are_equal_and_norms_nearly(simulator, toolchain):
    """FP32 norms, sums of 128 squares in another order than the interpreter's, differ in their last places."""
    case = store_case(16, pair=(formats.PUBLISHED,) * 2)
    emission = emit(simulator, case.program, order_arguments(case.program, case.tensors))
    outputs = emission.outputs(emission.machine(toolchain).run())
    assert not any(wrong_numbers(outputs[name], golden) for name, golden in case.goldens.items())
    for name in ("k_codes", "v_codes"):
        assert wrong_bytes(outputs[name], case.goldens[name]) == 0
    off = [int((outputs[name] != case.goldens[name]).sum()) for name in ("k_scale", "v_scale")]
    print(f"norms that differ in their last places, of 32 each: {off}")


def test_the_strided_where_writes_wrong_codes(toolchain):
    """What PyPTO's interpreter finds right: `where` of views into a wider tile. Half of the codes are wrong, no scale is."""
    case = store_case(16, make=StridedWhere)
    with Recorder() as simulator:
        emission = emit(simulator, case.program, order_arguments(case.program, case.tensors))
    wrong = wrong_stores(emission, emission.machine(toolchain).run(), case.goldens)
    print(wrong)
    assert wrong["k_scale"] == wrong["v_scale"] == 0
    for name in ("k_codes", "v_codes"):
        assert 800 < wrong[name] < 1100, wrong


def test_a_wrong_stride_is_found(store_run, toolchain):
    """The tensor that QUANTIZE writes its codes to, given as 128 wide instead of 64."""
    emission, _, goldens = store_run

    def spoil(task):
        place = next((i for i, o in enumerate(task.operands) if o.is_write and o.whole == (32, 64)), None)
        if place is None:
            return task
        # Behind its index: offsets, shape and the whole shape, two numbers each.
        begin = 1 + sum(1 + 4 * len(o.whole) for o in task.operands[:place])
        attributes = list(task.attributes)
        assert attributes[begin + 6] == 64
        attributes[begin + 6] = 128
        return replace(task, attributes=tuple(attributes))

    steps = tuple(tuple(spoil(task) for task in step) for step in emission.schedule.steps)
    faulty = replace(emission, schedule=replace(emission.schedule, steps=steps))
    wrong = wrong_stores(emission, faulty.machine(toolchain).run(), goldens)
    assert any(wrong.values())


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kernel_function_of_14b_is_accepted_by_the_compiler(toolchain, name):
    [program] = compile_programs(read_config("random:14b"), (name,), lambda _: None)
    leaves = read_leaves(program.sources)
    assert leaves
    assert check_leaves(toolchain, leaves) == {}
