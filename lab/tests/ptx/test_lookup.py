"""The inline PTX that turns codes into centroids, executed on every byte: Triton's interpreter knows no PTX."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from haarkv.codebooks import cubic
from haarkv.tq_ops.formats.learned import COLUMNS
from haarkv.tq_ops.kv.plan import KVSpec
from lab.ptx import Memory, execute

pytest.importorskip("triton", "3.6", reason="Triton 3.6 is not installed")
from haarkv.tq_ops.cuda import lookup
from haarkv.tq_ops.cuda.layout import to_layout
from haarkv.tq_ops.cuda.lookup import column_asm

THREADS = 320


def run_ptx(ptx: str, input_words: torch.Tensor, outputs: int) -> torch.Tensor:
    """Two FP16 numbers of each output word, [threads, outputs, 2], after the text has run on words [threads, inputs]."""
    words, inputs = np.ascontiguousarray(input_words.numpy().astype(np.uint32)), input_words.shape[1]
    results, memory = np.zeros((THREADS, outputs), np.uint32), Memory()
    args = [memory.place("given", words), memory.place("results", results)]
    loads = "".join(f"ld.global.b32 %w{outputs + i}, [%rd0+{4 * i}];" for i in range(inputs))
    stores = "".join(f"st.global.b32 [%rd1+{4 * i}], %w{i};" for i in range(outputs))
    text = f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 p0, .param .u64 p1)
{{
    .reg .b32 %w<{outputs + inputs}>, %t; .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; mov.u32 %t, %tid.x;
    mul.wide.u32 %rd2, %t, {4 * inputs}; add.s64 %rd0, %rd0, %rd2;
    mul.wide.u32 %rd3, %t, {4 * outputs}; add.s64 %rd1, %rd1, %rd3;
    {loads}
    {ptx.replace("$", "%w")}
    {stores}
    ret;
}}
"""
    execute(text, "kernel", [1], [THREADS], args, memory)
    return torch.from_numpy(results.view(np.float16).reshape(THREADS, outputs, 2))


@pytest.mark.parametrize("name", ["tq2", "tq3", "tq4"])
def test_permutations_give_the_centroids_of_any_codes(name):
    layout = to_layout(KVSpec(name).plan(1).k(0), 0, 128, torch.device("cpu"))
    bits = layout.bits
    ptx = {2: lookup._FOUR, 3: lookup._EIGHT, 4: lookup._SIXTEEN}[bits].value
    tiles, parts = {2: (1, 4), 3: (3, 8), 4: (1, 2)}[bits]
    codes = torch.randint(0, 256, (THREADS, tiles, 4), generator=torch.Generator().manual_seed(0))
    codes[:256, 0, 0], codes[:256, -1, 3] = torch.arange(256), torch.arange(256).flip(0)
    words = [(codes << torch.tensor([0, 8, 16, 24])).sum(-1)]
    # Each word of the table is given once for each of four bytes.
    words += [(layout.words.long() & 0xFFFFFFFF).repeat_interleave(4).expand(THREADS, -1)]
    output = run_ptx(ptx, torch.cat(words, 1), 2 * parts)
    for part in range(parts):
        if bits == 3:  # two tiles of two bits, then one of the third
            level = codes[:, part % 2] >> (2 * (part // 2)) & 3 | (codes[:, 2] >> part & 1) << 2
        else:
            level = codes[:, 0] >> (bits * part) & (2**bits - 1)
        assert torch.equal(output[:, 2 * part : 2 * part + 2].flatten(1), layout.centroids.half()[level])


@pytest.mark.parametrize(
    "column",
    [pytest.param(one, id=f"lr{bits}-{n}") for bits, columns in COLUMNS.items() for n, one in enumerate(columns)],
)
def test_arithmetic_gives_the_nearest_fp16_number_of_every_level(column):
    units = torch.randint(0, 256**column.nbytes, (THREADS, 4 // column.nbytes), generator=torch.Generator().manual_seed(0))
    for part in column.parts:
        part_mask = (2**part.bits - 1) << part.shift
        units[:64] = units[:64] & ~part_mask | (torch.arange(64) % 2**part.bits << part.shift).unsqueeze(1)
    packed_units = (units << (8 * column.nbytes * torch.arange(units.shape[1]))).sum(-1, keepdim=True)
    words = 2 // column.nbytes  # of two centroids of a part
    output = run_ptx(column_asm(column)[0], packed_units, words * len(column.parts))
    for number, part in enumerate(column.parts):
        table, levels = cubic.centroids(part.bits).half(), units >> part.shift & (2**part.bits - 1)
        assert torch.equal(output[:, words * number : words * (number + 1)].flatten(1), table[levels])
