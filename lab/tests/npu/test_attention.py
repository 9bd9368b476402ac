"""Scope 2b on the device: attention over packed codes, against the reference, three ways."""

from dataclasses import replace

import pytest
import torch
from npu_programs import needs_pypto, rotation

from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.npu.program import ordered
from haarkv.tq_ops.npu.sim.simulator import Mode
from lab.npu.attention import VARIANTS, AttentionProgram, pipe_shares
from lab.npu.cost import CostSimulator

pytestmark = needs_pypto


@pytest.fixture(scope="module")
def plain():
    with CostSimulator() as simulator:
        yield simulator


HEADS, KV_HEADS, LAYER = 10, 2, 1
# Half a step of the BF16 output and what FP16 probabilities, centroids and outputs leave. Measured: 2**-9 and 3e-4.
RTOL, ATOL = 2.0**-8, 1e-3


def attention_case(variant, lengths, step):
    """A program's arguments over a filled cache with permuted blocks, and the reference's output [B, Hq, 128]."""
    program = AttentionProgram.tuned(variant, HEADS, KV_HEADS, step)
    kv = formats.get("bf16" if variant == "bf16" else "tq4")
    blocks = sum(-(-n // 128) for n in lengths) + 1
    cache = PagedKVCache(KVPlan.uniform(kv, kv, LAYER + 1), KVShape(KV_HEADS, 128), num_blocks=blocks)
    generator = torch.Generator().manual_seed(11)
    # Leftovers of others in every slot that is not written.
    for fields in (cache.k_fields(LAYER), cache.v_fields(LAYER)):
        for tensor in fields.values():
            tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator).to(tensor.dtype))
    paging = PagedSequences(blocks, 128, torch.randperm(blocks, generator=generator).tolist())
    sequences = [paging.add() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        batch = paging.batch([sequence], [length])
        k, v = (torch.randn(length, KV_HEADS, 128, generator=generator) for _ in "kv")
        cache.write(LAYER, k, v, batch)
    q = torch.randn(len(lengths), HEADS, 128, generator=generator).bfloat16()
    # The batch of a decode step whose tokens are stored already.
    table = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(paging._blocks[s], dtype=torch.int32) for s in sequences], batch_first=True, padding_value=-1
    )
    batch = paging.batch(sequences, [1] * len(lengths))
    lens = torch.tensor(lengths, dtype=torch.int32)
    batch = replace(batch, positions=lens.long() - 1, block_table=table, seq_lens=lens)
    expected = reference.paged_attention(q.float(), cache, LAYER, batch, 128**-0.5)

    named = {
        "q": torch.zeros(program.rows * HEADS, 128, dtype=torch.bfloat16),
        "rotation": rotation(LAYER),
        "mask": program.shape.mask(),
        "block_table": torch.nn.functional.pad(table, (0, -table.shape[1] % (step // 128)), value=-1).contiguous(),
        "seq_lens": lens,
        "out": torch.full((program.rows * HEADS, 128), 7.0).bfloat16(),
    }
    named["q"][: q.shape[0] * HEADS] = q.view(-1, 128)
    for side, fields in (("k", cache.k_fields(LAYER)), ("v", cache.v_fields(LAYER))):
        codes = fields["data"] if variant == "bf16" else fields["codes"].view(torch.int8)
        named[f"{side}_codes"] = codes.view(-1, codes.shape[-1])
        named[f"{side}_scale"] = (
            fields["scale"].view(-1, 128) if variant != "bf16" else torch.ones(blocks * KV_HEADS, 128).half()
        )
    return program, ordered(program, named), named["out"], expected


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("lengths", "step"), [([1, 300, 129], 256), pytest.param([700], 2048, marks=pytest.mark.long)])
def test_every_variant_attends_as_the_reference(plain, variant, lengths, step):
    program, arguments, out, expected = attention_case(variant, lengths, step)
    plain.run(program, arguments, Mode.NUMBERS)
    ours = out.view(program.rows, HEADS, 128)[: len(lengths)].float()
    assert ((ours - expected).abs() <= ATOL + RTOL * expected.abs()).all()
    assert expected.abs().max() > 0.1


def test_a_step_costs_what_it_must_read(plain):
    """Blank arguments are enough for the cost model, and more tokens cost more cycles and tasks."""
    program = AttentionProgram.tuned("tq4", HEADS, KV_HEADS, 256)
    runs = [plain.cost(program, program.blank_call(1, context)) for context in (128, 1024)]
    assert runs[0].cycles < runs[1].cycles
    assert runs[0].tasks < runs[1].tasks
    assert program.kv_bytes(1, 1024) == 2 * 1024 * KV_HEADS * 66
    assert AttentionProgram.tuned("bf16", HEADS, KV_HEADS).kv_bytes(3, 1024) == 3 * 2 * 1024 * KV_HEADS * 256


def test_pipe_shares_are_read_off_the_report():
    report = "Average Cube Usage...............................:    325.55    0.11%\nAverage MTE_IN Usage....: 1.0  26.07%\n"
    assert pipe_shares(report) == {"cube": 0.11, "load": 26.07}
