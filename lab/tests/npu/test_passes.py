"""Whole layers and the head through PyPTO's own verifier, pass by pass: what is compiled is what was interpreted."""

import pytest
import torch
from npu_layers import layer_call, worst_token
from npu_programs import needs_pypto
from npu_verify import check_verified

from haarkv.models.catalog import load_model
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.tq_ops import reference
from haarkv.tq_ops.npu.sides import BF16, PUBLISHED, TQ4
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator, SimulatorError
from haarkv.validation.bounds import NPU_LAYER_ADDED

pytestmark = [*needs_pypto, pytest.mark.long]

UNSET = "Invalid slot index"
"""What PyPTO 0.2.0 dies of while it verifies some layers, now these and now others: the index is another one each time, as of
memory that was never written. It interprets, compiles and costs the same layers."""


def pair_name(pair):
    return "-".join(side.name for side in pair)


def verify_layer(program, new, stored):
    arguments, goldens, out, tiling, expected = layer_call(program, new, stored)
    try:
        with Simulator() as simulator:
            run = simulator.run(program, arguments, Mode.VERIFY, goldens)
    except SimulatorError as error:
        if UNSET in str(error):
            pytest.xfail(f"PyPTO's verifier died: {UNSET}")
        raise
    # The whole cache, bit for bit; but FP32 norms, for K has been summed otherwise: to their last bit.
    norms = [golden for golden in goldens.values() if golden.dtype == torch.float32]
    last_bit = 2.0**-22 * max((float(norm.max()) for norm in norms), default=0.0)
    assert check_verified(program, run, {i: arguments[i] for i in goldens}, goldens, last_bit) <= last_bit
    assert len({row.pass_name for row in run.rows}) >= 6
    assert worst_token(arguments[out][tiling.row], expected) < NPU_LAYER_ADDED
    assert run.cycles > 0


def test_a_decode_layer_keeps_its_numbers_through_every_pass():
    verify_layer(programs.decode_program(load_model("tiny", "bfloat16").config), [1, 1], [299, 129])


def test_a_prefill_layer_keeps_its_numbers_through_every_pass():
    verify_layer(programs.prefill_program(load_model("tiny", "bfloat16").config), [40, 3], [20, 127])


# PyPTO 0.2.0 dies whenever it verifies these, of that or of "data.valid: Index out of bounds"; the cause is not known. What
# survives is verified: each side in decode, beside tq4.
DIES = pytest.mark.xfail(raises=SimulatorError, strict=True, reason="PyPTO dies while it verifies this program")


@pytest.mark.parametrize(
    "pair", [(BF16, TQ4), (TQ4, BF16), (PUBLISHED, PUBLISHED), pytest.param((BF16, BF16), marks=DIES)], ids=pair_name
)
def test_a_decode_layer_of_another_format_keeps_its_numbers_through_every_pass(pair):
    verify_layer(programs.decode_program(load_model("tiny", "bfloat16").config, *pair), [1, 1], [299, 129])


@pytest.mark.parametrize("pair", [(PUBLISHED, PUBLISHED), pytest.param((BF16, BF16), marks=DIES)], ids=pair_name)
def test_a_prefill_layer_of_another_format_keeps_its_numbers_through_every_pass(pair):
    verify_layer(programs.prefill_program(load_model("tiny", "bfloat16").config, *pair), [40, 3], [20, 127])


def test_the_head_keeps_its_numbers_through_every_pass():
    model = load_model("tiny", "bfloat16")
    program = programs.head_program(model.config)
    hidden = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    arguments, logits = inputs.head_call(program, inputs.head_constants(model, program)[0], hidden)
    padded = torch.cat([hidden, hidden.new_zeros(13, hidden.shape[1])])
    normed = reference.rms_norm(padded, model.weights.final_norm, model.config.final_norm.eps)
    golden = {3: reference.linear(normed, model.weights.lm_head)}
    with Simulator() as simulator:
        run = simulator.run(program, arguments, Mode.VERIFY, golden)
    assert check_verified(program, run, {3: logits}, golden, 1e-3) < 1e-3
