"""Executes real batches through the PTX of the Triton kernels, and prints what came of each as JSON.

    python lab/tests/support/ptx_cases.py CAPABILITY GROUP …

A process of its own: where Triton has been imported to interpret, it does not compile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import bounds
import cuda_mixtures
import numpy as np
import torch
import triton
from block_weights import random_blocks
from cuda_caches import as_bytes, everything_in, pad_batch, same
from cuda_mixtures import Mixture
from op_contract import suite
from op_contract.caches import Attention, Store
from op_contract.cases import Product
from op_contract.delta import Delta
from op_contract.suite import CUDA, OpCase
from op_tables import LAYER, Case, filled, relative
from ptx_faults import FAULTS
from ptx_launches import ptx_execution
from small_models import decode, gemma_config, new_cache, new_paging, prefill, resize_config, small_config, small_model

from haarkv.executors.cuda import CudaExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda import experts, ops
from haarkv.tq_ops.cuda.block_planes import PLANES, PlaneBlocks, by_planes
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.validation.faults.states import small_hybrid
from lab.ptx import far

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
TQ4 = KVSpec("tq4")
# Blocks of 33 KiB: the last of them lie beyond 2**31 bytes, as do their codes in one field.
FAR_BLOCKS, FAR_BLOCK = 70_000, 128

Check = tuple[str, Callable[[int], str | None]]
"""A name, and what is wrong on a GPU of a capability, or None."""


def contract(case: OpCase) -> Check:
    """A case of the contract that every op table keeps."""

    def check(capability: int) -> str | None:
        with ptx_execution(capability):
            finding = case.check(ops, CPU)
        return None if finding.passed else str(finding)

    return str(case), check


def far_cache(blocks: list[int]) -> tuple[PagedKVCache, PagedSequences]:
    """A cache of `FAR_BLOCKS` in pages that take memory only where they are touched, its blocks handed out as listed."""
    plan = TQ4.plan(LAYER + 1)
    size = page_bytes(plan.layers[LAYER], 2, 128, FAR_BLOCK)
    assert size * FAR_BLOCKS > 2**31
    pages = torch.from_numpy(far(size * FAR_BLOCKS)).view(FAR_BLOCKS, size)
    for block in blocks:
        pages[block] = 255
    kv_cache = PagedKVCache(plan, KVShape(2, 128), num_blocks=FAR_BLOCKS, block_size=FAR_BLOCK, pages={LAYER: pages})
    return kv_cache, PagedSequences(FAR_BLOCKS, FAR_BLOCK, order=blocks, num_rows=8)


def far_batch(tokens: int) -> tuple[PagedKVCache, Batch, torch.Tensor]:
    """Two sequences in blocks at the far end and the near one, `tokens` new ones of each; queries."""
    kv_cache, paging = far_cache([69_999, 3, 65_536, 69_998, 0, 69_000])
    ids = [paging.add(), paging.add()]
    generator = torch.Generator().manual_seed(0)
    for new in ([130, 200], [tokens, tokens]):
        batch = paging.batch(ids, new)
        reference.store_kv(*torch.randn(2, sum(new), 2, 128, generator=generator), kv_cache.view(LAYER, batch))
    return kv_cache, batch, torch.randn(2 * tokens, 10, 128, generator=generator).to(BF16)


def far_attention(tokens: int) -> Check:
    def check(capability: int) -> str | None:
        kv_cache, batch, q = far_batch(tokens)
        with ptx_execution(capability):
            ours = ops.paged_attention(q, kv_cache.view(LAYER, batch), 128**-0.5)
        error = relative(ours, reference.paged_attention(q, kv_cache.view(LAYER, batch), 128**-0.5))
        return None if error <= bounds.LAYER_BF16.attention else f"error {error}"

    return f"attention of {tokens} new tokens in blocks beyond 2**31 bytes", check


def dead_sequences(capability: int, **window: int) -> str | None:
    """What pads a captured batch: length 0, slot -1, and a block table of -1, which nothing may follow."""
    kv_cache, batch = filled(Case("tq4", 128, 5, 2, 128, (130, 9), (1, 1), **window))
    dead = pad_batch(batch, 2, table=-1, width=3)
    q = torch.randn(4, 10, 128, generator=torch.Generator().manual_seed(1)).to(BF16)
    before = as_bytes(kv_cache)
    with ptx_execution(capability):
        ours = ops.paged_attention(q, kv_cache.view(LAYER, dead), 128**-0.5)
        fault = ops.new_fault(CPU)
        kv = torch.full((4, 2, 128), float("nan"))
        ops.append(kv, kv, kv_cache.view(LAYER, replace(dead, slot_mapping=torch.full((4,), -1))), fault)
        ops.raise_fault(fault, kv_cache, dead)
    error = relative(ours[:2], reference.paged_attention(q[:2], kv_cache.view(LAYER, batch), 128**-0.5))
    if error > bounds.LAYER_BF16.attention:
        return f"error {error}"
    if not (ours[2:] == 0).all():
        return "a dead sequence's output is not 0"
    return None if same(before, as_bytes(kv_cache)) else "a dead sequence was stored"


def in_any_order(case: OpCase) -> Check:
    """Programs together, one by one from the last, and one by one at random: the same bytes."""

    def run(capability: int, order: str, together: int | None) -> bytes:
        args = case.arguments(CPU)
        with ptx_execution(capability, order=order, together=together):
            result = getattr(ops, case.op)(*args)
        tensors = [result] if result is not None else everything_in(args[2].cache)
        return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)

    def check(capability: int) -> str | None:
        results = {run(capability, *how) for how in (("ascending", None), ("descending", 1), ("random", 3))}
        return None if len(results) == 1 else f"{len(results)} different results"

    return f"{case} in any order of programs", check


def executor(
    dtype: torch.dtype, layers: int, spec: KVSpec, config: ModelConfig | None = None, model: DecoderModel | None = None
) -> Check:
    """Logits of a ragged prefill and two decode steps that are padded."""
    config = model.config if model else config or small_config(hidden_size=64, num_layers=layers)

    def run(one: object) -> torch.Tensor:
        cache = new_cache(config, spec, num_blocks=6)
        paging = new_paging(cache, order=range(5, -1, -1))
        ids = [paging.add() for _ in range(3)]
        logits = [prefill(one, cache, paging, ids, [[1, 2, 3], [4], [5, 6]]), decode(one, cache, paging, ids, [7, 8, 9])]
        return torch.cat([*logits, decode(one, cache, paging, ids[::2], [3, 1])])

    def check(capability: int) -> str | None:
        decoder = model or small_model(config, dtype=dtype)
        theirs = run(ReferenceExecutor(decoder))
        with ptx_execution(capability):
            ours = run(CudaExecutor(decoder, interpreted=True))
        error = float(((ours - theirs).abs().amax(-1) / theirs.std(dim=-1)).max())
        bound = bounds.EXECUTOR_LOGITS[str(dtype).removeprefix("torch.")]
        return None if error <= bound else f"error {error}, bound {bound}"

    what = f"a {config.model_type} of {layers} layers in {dtype} with {spec.plan(layers).describe()}"
    return f"prefill and decode of {what}", check


def fault_check(name: str) -> Check:
    """A fault of `ptx_faults`, which must be found."""
    return f"planted: {name}", lambda capability: None if FAULTS[name].is_found(capability) else f"not found: {name}"


# -- Mixtures of experts ---------------------------------------------------------------------------------------------------


def mixture(case: Mixture, *kinds: str) -> Check:
    """Tokens through their experts, in blocks of these types of gate, up and down."""
    bound = bounds.LAYER_FP32.op if case.dtype == FP32 else bounds.LAYER_BF16.rounded_op

    def check(capability: int) -> str | None:
        def in_planes(name: str, numbers: torch.Tensor) -> PlaneBlocks:
            return by_planes(random_blocks(kinds[("gate", "up", "down").index(name)], *numbers.shape), CPU)

        with ptx_execution(capability):
            error = cuda_mixtures.off_by(case, make_weight=in_planes if kinds else None)
        return None if error <= bound else f"error {error}"

    return f"{case} {' '.join(kinds)}", check


FAR_EXPERT, OF_AN_EXPERT = 70_000, (32, 1024)
"""Its number, and the rows and columns of each expert's weight."""


def far_expert(capability: int) -> str | None:
    """The last expert of a stack, whose numbers lie beyond 2**31 others, which take no memory."""
    rows, columns = OF_AN_EXPERT
    count = (FAR_EXPERT + 1) * rows * columns
    assert FAR_EXPERT * rows * columns > 2**31
    weight = torch.from_numpy(far(2 * count)).view(BF16).view(-1, columns)
    generator = torch.Generator().manual_seed(1)
    weight[-rows:] = torch.randn(rows, columns, generator=generator).to(BF16)
    x, out = torch.randn(2, columns, generator=generator).to(BF16), torch.empty(2, rows)
    order, tiles = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[FAR_EXPERT, 0, 2]], dtype=torch.int32)
    with ptx_execution(capability):
        experts.multiply(x, order, tiles, weight, None, out, 1, "")
    error = relative(out, (x.double() @ weight[-rows:].double().T)[order.long()])
    return None if error <= bounds.LAYER_FP32.op else f"error {error}"


QWEN3_CASES = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip


def attention(
    kv: str, head_dim: int, group: int, kv_heads: int, block: int, lengths: tuple, new: tuple, **more: int
) -> Attention:
    return Attention(Case(kv, head_dim, group, kv_heads, block, lengths, new, **more), BF16)


def store(kv: str, head_dim: int, *sizes: Any, **more: int) -> Store:
    """As `attention`, without query heads."""
    return Store(Case(kv, head_dim, 1, *sizes, **more))


GROUPS: dict[str, list[Check]] = {
    "short": [
        contract(attention("tq4", 128, 5, 1, 128, (300, 3), (1, 1))),
        contract(attention("tq4", 128, 5, 1, 128, (130, 0), (9, 3))),
        contract(Product("Q4_K", 3, 512, 40, BF16)),
        contract(Product("Q8_0", 3, 96, 40, BF16)),
        contract(Delta(1, 2, 16, 20, (5, 0), (1, 3))),
        mixture(Mixture(5, 2, 40, 20, 6, dtype=BF16)),
    ],
    "attention": [
        # A sequence of 32k beside short ones, whose rows of the block table are -1 beyond their blocks.
        contract(attention("tq4", 128, 5, 1, 128, (32_511, 3, 127, 0, 700), (1,) * 5)),
        contract(attention("tq4", 64, 8, 1, 16, (0, 15, 16, 140), (1,) * 4, pages=True)),
        ("dead sequences", dead_sequences),
        far_attention(1),
        far_attention(3),
        contract(attention("tq4", 128, 5, 2, 128, (300, 0, 127), (40, 3, 1))),
        # The look-ups of two and of three bits, and a prompt wide enough that its columns are rows.
        contract(attention("k=tq3,v=tq2", 64, 8, 1, 8, (40,), (9,))),
        contract(Attention(Case("tq4", 64, 2, 1, 24, (0, 30), (1, 1)), FP32)),
        *(
            in_any_order(attention("tq4", 128, 2, 1, 16, (90, 0), (2, 9), **more))
            for more in ({"pages": True}, {"window": 40}, {"tail": 9, "sink": 4})
        ),
    ],
    "tail": [
        contract(attention("tq4", 128, 5, 1, 128, (200, 3, 0, 11), (1,) * 4, tail=9, sink=4)),
        contract(attention("tq4", 64, 8, 1, 16, (40, 0), (9, 3), tail=5, sink=2)),
        ("dead sequences beside a tail", partial(dead_sequences, tail=128, sink=4)),
        contract(store("tq4", 64, 3, 8, (0, 30, 12, 5), (11, 9, 1, 2), tail=4, sink=3)),
    ],
    "window": [
        contract(attention("tq4", 256, 4, 1, 128, (600, 3, 0), (1, 1, 1), window=512)),
        contract(attention("tq4", 256, 4, 1, 128, (530, 0), (9, 3), window=512)),
        contract(attention("tq3", 64, 8, 1, 16, (60, 30), (9, 8), window=20)),
        contract(attention("k=lr5,v=tq3", 64, 2, 2, 16, (60, 3), (2, 1), tail=5, window=20)),
        ("dead sequences in a window", partial(dead_sequences, window=70)),
    ],
    "learned": [
        contract(attention("k=lr4,v=tq4", 128, 5, 2, 128, (200, 3), (1, 1))),
        contract(attention("k=lr2,v=tq4", 64, 8, 2, 16, (40, 0), (9, 3), tail=5, sink=2)),
        contract(attention("k=lr5,v=tq2", 128, 5, 1, 128, (130, 0), (9, 3))),
        contract(attention("k=lr4,v=tq4", 64, 2, 1, 128, (2600,), (1,))),
        contract(store("k=lr4,v=tq3", 64, 1, 16, (1022,), (4,))),
        in_any_order(store("k=lr3,v=tq4", 128, 2, 128, (0, 0), (1, 9))),
    ],
    "store": [
        contract(store("tq4", 128, 2, 128, (0, 0, 0), (1, 9, 1))),
        contract(store("tq4", 64, 3, 16, (0, 0), (11, 4), pages=True)),
        in_any_order(store("tq4", 128, 2, 128, (0, 0, 0), (1, 9, 1))),
    ],
    "blocks": [
        *(contract(Product(kind, *sizes, BF16)) for kind in PLANES for sizes in ((1, 1536, 33), (40, 768, 70))),
        *(contract(Product(kind, 5, 512, 33, FP32)) for kind in PLANES),
    ],
    "delta": [
        contract(Delta(1, 3, 24, 40, (0, 5, 1), (6, 2, 1))),
        contract(Delta(2, 4, 128, 128, (0, 9), (1, 1))),
    ],
    "experts": [
        mixture(Mixture(7, 3, 40, 33, 5, normalized=False)),
        mixture(Mixture(9, 2, 136, 48, 3, activation="gelu_tanh", dtype=BF16)),
        mixture(Mixture(3, 2, 256, 256, 3, dtype=BF16), "Q4_K", "Q8_0", "Q6_K"),
        ("an expert beyond 2**31 numbers", far_expert),
    ],
    "executor": [
        executor(BF16, 2, TQ4),
        executor(FP32, 1, KVSpec("tq4", tail=2, sink=1)),
        executor(BF16, 2, TQ4, gemma_config(window=4)),
        executor(BF16, 1, KVSpec("k=lr3,v=tq3", calibration=synthetic.calibration(1, 2, 128), tail=2, sink=1)),
        executor(BF16, 1, TQ4, resize_config(small_config(hidden_size=64, num_layers=1), **QWEN3_CASES)),
        executor(FP32, 3, TQ4, model=small_hybrid(FP32, 61)),
    ],
    "planted": [fault_check(name) for name in FAULTS],
    "contract": [contract(case) for case in suite.cases(replace(CUDA, interpreted=False)) if case.op != "linear"],
}


def rows(capability: int, group: str) -> Iterator[dict]:
    for name, check in GROUPS[group]:
        began = time.perf_counter()
        try:
            wrong = check(capability)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        seconds = round(time.perf_counter() - began, 1)
        yield {"case": name, "group": group, "triton": triton.__version__, "wrong": wrong, "seconds": seconds}


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    for name in sys.argv[2:]:
        for row in rows(int(sys.argv[1]), name):
            print(json.dumps(row), flush=True)
