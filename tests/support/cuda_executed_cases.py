"""Executes real batches through the PTX of the Triton kernels, and prints what came of each as JSON.

    python tests/support/cuda_executed_cases.py CAPABILITY GROUP …

A process of its own: where Triton has been imported to interpret, it does not compile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import cuda_delta_faults
import cuda_expert_faults
import numpy as np
import planted_kernels
import torch
import triton
from block_weights import made
from cuda_caches import as_bytes, everything_in, padded, same
from cuda_executed import executed
from cuda_expert_faults import Mixture
from cuda_faults import FAULTS
from delta_runs import Run
from delta_runs import same as same_state
from op_tables import LAYER, Case, cache_tensors, filled, relative
from ptx import LaunchFault, far
from small_models import decode, gemma_config, new_cache, new_paging, prefill, resized, small_config, small_model

from haarkv.executors.cuda import CudaExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda import block_products, experts, ops
from haarkv.tq_ops.cuda.block_planes import PLANES, PlaneBlocks, by_planes
from haarkv.tq_ops.formats import made_up
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.pages import page_bytes
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.weight import Blocks, numbers_of
from haarkv.validation import bounds
from haarkv.validation.faults.states import small_hybrid
from haarkv.validation.ops import suite
from haarkv.validation.ops.blocks import Product
from haarkv.validation.ops.cases import Attention, Plain, Store
from haarkv.validation.ops.delta import Delta
from haarkv.validation.ops.suite import OpCase
from haarkv.validation.ops.tables import CUDA

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
TQ4 = KVSpec("tq4")
# Blocks of 33 KiB: the last of them lie beyond 2**31 bytes, as do their codes in one field.
FAR_BLOCKS, FAR_BLOCK = 70_000, 128

Check = tuple[str, Callable[[int], str | None]]
"""A name, and what is wrong on a GPU of a capability, or None."""


def contract(case: OpCase, chosen_for: int | None = None) -> Check:
    """A case of the contract that every op table keeps; with `chosen_for`, launches as another GPU would be given them."""

    def check(capability: int) -> str | None:
        with executed(capability):  # puts back what is replaced
            if chosen_for:
                ops.capability = lambda _: chosen_for
            finding = case.check(ops, CPU)
        return None if finding.passed else str(finding)

    return f"{case}{f' as for {chosen_for}' if chosen_for else ''}", check


def far_cache(blocks: list[int]) -> tuple[PagedKVCache, PagedSequences]:
    """A cache of `FAR_BLOCKS` in pages that take memory only where they are touched, its blocks handed out as listed."""
    plan = TQ4.plan(LAYER + 1)
    size = page_bytes(plan.layers[LAYER], 2, 128, FAR_BLOCK)
    assert size * FAR_BLOCKS > 2**31
    pages = torch.from_numpy(far(size * FAR_BLOCKS)).view(FAR_BLOCKS, size)
    for block in blocks:
        pages[block] = 255
    made = PagedKVCache(plan, KVShape(2, 128), num_blocks=FAR_BLOCKS, block_size=FAR_BLOCK, pages={LAYER: pages})
    return made, PagedSequences(FAR_BLOCKS, FAR_BLOCK, order=blocks, num_rows=8)


def far_batch(tokens: int) -> tuple[PagedKVCache, Batch, torch.Tensor]:
    """Two sequences in blocks at the far end and the near one, `tokens` new ones of each; queries."""
    made, paging = far_cache([69_999, 3, 65_536, 69_998, 0, 69_000])
    ids = [paging.add(), paging.add()]
    generator = torch.Generator().manual_seed(0)
    for new in ([130, 200], [tokens, tokens]):
        batch = paging.batch(ids, new)
        reference.store_kv(*torch.randn(2, sum(new), 2, 128, generator=generator), made, LAYER, batch)
    return made, batch, torch.randn(2 * tokens, 10, 128, generator=generator).to(BF16)


def far_attention(tokens: int) -> Check:
    def check(capability: int) -> str | None:
        made, batch, q = far_batch(tokens)
        with executed(capability):
            ours = ops.paged_attention(q, made, LAYER, batch, 128**-0.5)
        error = relative(ours, reference.paged_attention(q, made, LAYER, batch, 128**-0.5))
        return None if error <= bounds.LAYER_BF16.attention else f"error {error}"

    return f"attention of {tokens} new tokens in blocks beyond 2**31 bytes", check


def far_store(capability: int) -> str | None:
    generator, fields = torch.Generator().manual_seed(1), []
    k, v = torch.randn(2, 9, 2, 128, generator=generator)
    for store in (reference.store_kv, ops.store_kv):
        made, paging = far_cache([69_999, 12, 65_536])
        batch = paging.batch([paging.add(), paging.add()], [5, 4])
        if store is ops.store_kv:
            with executed(capability):
                store(k, v, made, LAYER, batch)
        else:
            store(k, v, made, LAYER, batch)
        fields.append([tensor[[69_999, 12]].view(torch.uint8) for *_, tensor in cache_tensors(made)])
    different = [int((a != b).sum()) for a, b in zip(*fields, strict=True)]
    return None if not any(different) else f"{different} bytes differ"


def dead_sequences(capability: int, **kept: int) -> str | None:
    """What pads a captured batch: length 0, slot -1, and a block table of -1, which nobody may follow."""
    made, batch = filled(Case("tq4", 128, 5, 2, 128, (130, 9), (1, 1), **kept))
    dead = padded(batch, 2, table=-1, width=3)
    q = torch.randn(4, 10, 128, generator=torch.Generator().manual_seed(1)).to(BF16)
    before = as_bytes(made)
    with executed(capability):
        ours = ops.paged_attention(q, made, LAYER, dead, 128**-0.5)
        fault = ops.new_fault(CPU)
        kv = torch.full((4, 2, 128), float("nan"))
        ops.append(kv, kv, made, LAYER, replace(dead, slot_mapping=torch.full((4,), -1)), fault)
        ops.raise_fault(fault, made, dead)
    error = relative(ours[:2], reference.paged_attention(q[:2], made, LAYER, batch, 128**-0.5))
    if error > bounds.LAYER_BF16.attention:
        return f"error {error}"
    if not (ours[2:] == 0).all():
        return "a dead sequence's output is not 0"
    return None if same(before, as_bytes(made)) else "a dead sequence was stored"


def in_any_order(case: OpCase) -> Check:
    """Programs together, one by one from the last, and one by one at random: the same bytes."""

    def run(capability: int, order: str, together: int | None) -> bytes:
        given = case.arguments(CPU)
        with executed(capability, order=order, together=together):
            result = getattr(ops, case.op)(*given)
        tensors = [result] if result is not None else everything_in(given[2])
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
        found = [prefill(one, cache, paging, ids, [[1, 2, 3], [4], [5, 6]]), decode(one, cache, paging, ids, [7, 8, 9])]
        return torch.cat([*found, decode(one, cache, paging, ids[::2], [3, 1])])

    def check(capability: int) -> str | None:
        made = model or small_model(config, dtype=dtype)
        theirs = run(ReferenceExecutor(made))
        with executed(capability):
            ours = run(CudaExecutor(made, interpreted=True))
        error = float(((ours - theirs).abs().amax(-1) / theirs.std(dim=-1)).max())
        bound = bounds.EXECUTOR_LOGITS[str(dtype).removeprefix("torch.")]
        return None if error <= bound else f"error {error}, bound {bound}"

    what = f"a {config.model_type} of {layers} layers in {dtype} with {spec.plan(layers).describe()}"
    return f"prefill and decode of {what}", check


def planted(name: str) -> Check:
    """A fault of `cuda_faults`, which must be found."""

    def check(capability: int) -> str | None:
        found = FAULTS[name].found(SimpleNamespace(capability=capability, far_batch=far_batch))
        return None if found else f"not found: {name}"

    return f"planted: {name}", check


RAGGED = Case("tq4", 128, 5, 1, 128, (32_511, 3, 127, 0, 700), (1, 1, 1, 1, 1))
"""A sequence of 32k beside short ones, whose rows of the block table are -1 beyond their blocks."""


# -- Weights in blocks -----------------------------------------------------------------------------------------------------


def rows_in(kind: str, capability: int) -> str | None:
    weight, index = made(kind, 12, 768), torch.tensor([11, 0, 3])
    for dtype in (FP32, BF16):
        with executed(capability):
            ours = block_products.rows_of(by_planes(weight, CPU), index, dtype)
        if not torch.equal(ours, weight.rows(index, dtype)):
            return f"other bits in {dtype}"
    return None


def off_by(x: torch.Tensor, weight: Blocks, stored: PlaneBlocks, capability: int) -> float:
    with executed(capability):
        ours = block_products.product(x, stored)
    numbers = numbers_of(weight).double()
    return float(((ours - x.double() @ numbers.T).abs() / (x.double().abs() @ numbers.abs().T)).max())


def scaled_product(capability: int) -> str | None:
    generator = torch.Generator().manual_seed(2)
    powers = (2.0 ** torch.randint(-3, 4, (count,), generator=generator) for count in (37, 512))
    rows, columns = powers
    weight = made("Q5_1", 37, 512) * rows.unsqueeze(1) * columns
    error = off_by(torch.randn(3, 512, generator=generator).to(BF16), weight, by_planes(weight, CPU), capability)
    return None if error < 1.5e-7 else f"error {error}"


def wrong_product(fault: str, capability: int) -> str | None:
    """A fault in the stored bytes that must be seen."""
    weight, x = made("Q4_K", 9, 512), torch.randn(2, 512, generator=torch.Generator().manual_seed(1)).to(BF16)
    stored = by_planes(weight, CPU)
    high, _, minima, d, _ = stored.planes.places(16)
    data = stored.data.clone()
    data[:, minima:d] = 0 if fault == "no minima" else data[:, minima:d]
    data[:, :high] = data[:, :high].roll(16, 1) if fault == "a neighbour's block" else data[:, :high]
    error = off_by(x, weight, replace(stored, data=data), capability)
    return None if error > 1e-4 else f"not seen: error {error}"


# -- Gated DeltaNet --------------------------------------------------------------------------------------------------------


def delta_text(capability: int, *, fault: str | None = None) -> str | None:
    """A text with drafts that are taken back, a chunk that is run again and a row that begins anew; with a fault, if named."""
    with executed(capability), cuda_delta_faults.planted(fault) if fault else nullcontext():
        error = cuda_delta_faults.off_by(ops)
    if fault:
        return None if not error <= bounds.LAYER_FP32.op else f"not found: {fault}"
    return None if error <= bounds.LAYER_FP32.op else f"error {error}"


def delta_pieces(capability: int) -> str | None:
    """A prompt in pieces, alone and beside another sequence, in any order of programs: the bits of the whole prompt."""
    case, found = Delta(1, 2, 16, 20, (0,), (1,)), []
    for counts, order, together in (((7,), "ascending", None), ((3, 1, 3), "descending", 1), ((1, 5, 1), "random", 3)):
        run, out = Run(ops, case, sequences=2, length=7), []
        for count in counts:
            rows = [1, 0] if together else [0]
            with executed(capability, order=order, together=together):
                out.append(run.run(rows, [count for _ in rows])[-1])
        found.append((torch.cat(out), run.state()))
    (whole, state), *others = found
    alike = [torch.equal(out, whole) and same_state(of, state) for out, of in others]
    return None if all(alike) else f"the same bits: {alike}"


DELTAS = [
    contract(Delta(1, 3, 24, 40, (0, 5, 1), (6, 2, 1))),
    contract(Delta(2, 4, 128, 128, (0, 9), (1, 1))),
    ("a text of a hybrid's layer", delta_text),
    ("a prompt in pieces", delta_pieces),
    *((f"planted: {fault}", partial(delta_text, fault=fault)) for fault in cuda_delta_faults.FAULTS),
]

# -- Mixtures of experts ---------------------------------------------------------------------------------------------------


def mixture(case: Mixture, *, fault: str | None = None, kinds: tuple[str, ...] = ()) -> Check:
    """Tokens through their experts; with a fault, if named, which must be found; in blocks, of types of gate, up and down."""
    bound = bounds.LAYER_FP32.op if case.dtype == FP32 else bounds.LAYER_BF16.rounded_op

    def check(capability: int) -> str | None:
        def in_planes(name: str, numbers: torch.Tensor) -> PlaneBlocks:
            return by_planes(made(kinds[("gate", "up", "down").index(name)], *numbers.shape), CPU)

        with executed(capability), cuda_expert_faults.planted(fault) if fault else nullcontext():
            error = cuda_expert_faults.off_by(case, stored=in_planes if kinds else None)
        if fault:
            return None if not error <= 100 * bound else f"not found: {fault}"
        return None if error <= bound else f"error {error}"

    return f"planted: {fault}" if fault else f"{case} {' '.join(kinds)}", check


def experts_in_pieces(capability: int) -> str | None:
    """A prompt at once, in pieces and in another order of tokens, in any order of programs: the same bits."""
    case = replace(cuda_expert_faults.FULL, dtype=BF16)
    (x, logits), stack, found = case.inputs(), case.stack(), []
    for sizes, order, together in (((20,), "ascending", None), ((1, 17, 2), "descending", 1), ((20,), "random", 3)):
        moved = torch.randperm(20, generator=torch.Generator().manual_seed(1)) if order == "random" else torch.arange(20)
        out = torch.empty(x.shape)
        for part in torch.split(moved, sizes):
            with executed(capability, order=order, together=together):
                out[part] = experts.through(x[part], logits[part], stack)
        found.append(out)
    alike = [torch.equal(found[0], other) for other in found[1:]]
    return None if all(alike) else f"the same bits: {alike}"


FAR_EXPERT, OF_AN_EXPERT = 70_000, (32, 1024)
"""Its number, and the rows and columns of each expert's weight."""


def far_expert(capability: int, *, fault: bool = False) -> str | None:
    """The last expert of a stack, whose numbers lie beyond 2**31 others, which take no memory."""
    rows, columns = OF_AN_EXPERT
    count = (FAR_EXPERT + 1) * rows * columns
    assert FAR_EXPERT * rows * columns > 2**31
    weight = torch.from_numpy(far(2 * count)).view(BF16).view(-1, columns)
    generator = torch.Generator().manual_seed(1)
    weight[-rows:] = torch.randn(rows, columns, generator=generator).to(BF16)
    x, out = torch.randn(2, columns, generator=generator).to(BF16), torch.empty(2, rows)
    order, tiles = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[FAR_EXPERT, 0, 2]], dtype=torch.int32)
    wrong = planted_kernels.planted(experts, "expert_kernels", "row = expert.to(tl.int64) *", "row = expert *")
    try:
        with executed(capability), wrong if fault else nullcontext():
            experts.multiply(x, order, tiles, weight, None, out, 1, "")
    except LaunchFault as found:
        return None if fault and "does not fit an int32" in str(found) else str(found)
    if fault:
        return "not found"
    error = relative(out, (x.double() @ weight[-rows:].double().T)[order.long()])
    return None if error <= bounds.LAYER_FP32.op else f"error {error}"


OF_QWEN3 = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
MIXTURES = [
    mixture(Mixture(7, 3, 40, 33, 5, normalized=False)),
    mixture(Mixture(9, 2, 136, 48, 3, activation="gelu_tanh", dtype=BF16)),
    mixture(replace(cuda_expert_faults.FULL, dtype=BF16)),
    mixture(Mixture(3, 2, 256, 256, 3, dtype=BF16), kinds=("Q4_K", "Q8_0", "Q6_K")),
    ("experts of a prompt in pieces", experts_in_pieces),
    ("an expert beyond 2**31 numbers", far_expert),
    ("planted: its place in 32 bits", partial(far_expert, fault=True)),
    *(mixture(cuda_expert_faults.FAULTS[fault][0], fault=fault) for fault in cuda_expert_faults.FAULTS),
]

GROUPS: dict[str, list[Check]] = {
    "short experts": [mixture(Mixture(5, 2, 40, 20, 6, dtype=BF16))],
    "experts": [*MIXTURES, executor(BF16, 1, TQ4, resized(small_config(hidden_size=64, num_layers=1), **OF_QWEN3))],
    "short delta": [contract(Delta(1, 2, 16, 20, (5, 0), (1, 3)))],
    "delta": [*DELTAS, executor(FP32, 3, TQ4, model=small_hybrid(FP32, 61))],
    "decode": [
        contract(Attention(RAGGED, BF16)),
        contract(Attention(Case("tq4", 64, 8, 1, 16, (0, 15, 16, 140), (1,) * 4, pages=True), BF16)),
        ("dead sequences", dead_sequences),
        far_attention(1),
        in_any_order(Attention(Case("tq4", 128, 5, 1, 128, (300, 3), (1, 1)), BF16)),
    ],
    "prefill": [
        contract(Attention(Case("tq4", 128, 5, 2, 128, (300, 0, 127), (40, 3, 1)), BF16)),
        far_attention(3),
        # The look-ups of two and of three bits, and a prompt wide enough that its columns are rows.
        contract(Attention(Case("k=tq3,v=tq2", 64, 8, 1, 8, (40,), (9,)), BF16)),
    ],
    "store": [
        contract(Store(Case("tq4", 128, 1, 2, 128, (0, 0, 0), (1, 9, 1)))),
        contract(Store(Case("tq4", 64, 1, 3, 16, (0, 0), (11, 4), pages=True), BF16)),
        ("store in blocks beyond 2**31 bytes", far_store),
        in_any_order(Store(Case("tq4", 128, 1, 2, 128, (0, 0, 0), (1, 9, 1)))),
    ],
    "hopper": [
        contract(Attention(Case("tq4", 128, 5, 1, 128, (300, 3), (1, 1)), BF16)),
        contract(Attention(Case("tq4", 128, 5, 1, 128, (130, 0), (9, 3)), BF16)),
    ],
    "short blocks": [contract(Product("Q4_K", 3, 512, 40, BF16)), contract(Product("Q8_0", 3, 96, 40, BF16))],
    "blocks": [
        *(contract(Product(kind, *sizes, BF16)) for kind in PLANES for sizes in ((1, 1536, 33), (40, 768, 70))),
        *(contract(Product(kind, 5, 512, 33, FP32)) for kind in PLANES),
        *((f"rows of {kind}", partial(rows_in, kind)) for kind in PLANES),
        ("blocks with scales", scaled_product),
        *((f"planted: {fault}", partial(wrong_product, fault)) for fault in ("a neighbour's block", "no minima")),
    ],
    # Blackwell's PTX is not executed, but what is launched there differs: V's words are K's, and sizes are others.
    "short blackwell": [contract(Attention(Case("tq3", 64, 2, 1, 16, (30, 3), (1, 1)), BF16), 100)],
    "blackwell": [
        contract(Attention(Case("tq4", 128, 5, 1, 128, (300, 3), (1, 1)), BF16), 100),
        contract(Attention(Case("tq2", 64, 2, 1, 16, (40, 0), (9, 3)), BF16), 100),
        contract(Attention(Case("k=tq3,v=tq2", 64, 2, 1, 16, (30,), (1,)), BF16), 100),
        contract(Attention(Case("k=tq5,v=tq6", 64, 1, 1, 16, (40,), (1,)), BF16), 100),
        contract(Attention(Case("k=lr3,v=tq4", 64, 2, 2, 16, (30, 3), (2, 1)), BF16), 100),
        contract(Attention(Case("tq4", 256, 1, 1, 128, (70, 3), (1, 1)), BF16), 100),
    ],
    "rest": [
        in_any_order(Attention(Case("tq4", 128, 2, 1, 16, (30, 0), (2, 9), pages=True), BF16)),
        contract(Attention(Case("tq4", 64, 2, 1, 24, (0, 30), (1, 1)), FP32)),
    ],
    "short tail": [
        contract(Attention(Case("tq4", 64, 2, 1, 16, (30, 3), (1, 1), tail=9, sink=4), BF16)),
        contract(Store(Case("tq4", 64, 1, 1, 8, (30, 12), (5, 1), tail=4, sink=3))),
    ],
    "tail": [
        *(executor(dtype, 1, KVSpec("tq4", tail=2, sink=1)) for dtype in (BF16, FP32)),
        contract(Attention(Case("tq4", 128, 5, 1, 128, (200, 3, 0, 11), (1,) * 4, tail=9, sink=4), BF16)),
        ("dead sequences beside a tail", partial(dead_sequences, tail=128, sink=4)),
        contract(Attention(Case("tq4", 64, 8, 1, 16, (40, 0), (9, 3), tail=5, sink=2), BF16)),
        contract(Store(Case("tq4", 64, 1, 3, 8, (0, 30, 12, 5), (11, 9, 1, 2), tail=4, sink=3))),
        contract(Attention(Case("tq4", 128, 5, 1, 128, (130, 3), (1, 1), tail=40, sink=4), BF16)),
        in_any_order(Attention(Case("tq4", 128, 2, 1, 16, (30, 0), (2, 9), tail=9, sink=4), BF16)),
    ],
    "short window": [
        contract(Attention(Case("tq4", 64, 2, 1, 16, (60, 3), (1, 1), window=20), BF16)),
        contract(Attention(Case("tq4", 64, 2, 1, 16, (60, 3), (3, 2), tail=9, sink=4, window=20), BF16)),
        ("dead sequences in a window", partial(dead_sequences, window=70)),
    ],
    "window": [
        executor(BF16, 2, TQ4, gemma_config(window=4)),
        contract(Attention(Case("tq4", 256, 4, 1, 128, (600, 3, 0), (1, 1, 1), window=512), BF16)),
        contract(Attention(Case("tq4", 256, 4, 1, 128, (530, 0), (9, 3), window=512), BF16)),
        contract(Attention(Case("tq3", 64, 8, 1, 16, (60, 30), (9, 8), window=20), BF16)),
        contract(Attention(Case("k=lr5,v=tq3", 64, 2, 2, 16, (60, 3), (2, 1), tail=5, window=20), BF16)),
        contract(Attention(Case("tq4", 128, 5, 1, 128, (300, 3), (1, 1), window=140), BF16), 100),
        in_any_order(Attention(Case("tq4", 128, 2, 1, 16, (90, 0), (2, 9), window=40), BF16)),
    ],
    "short learned": [
        contract(Attention(Case("k=lr4,v=tq3", 64, 2, 2, 16, (30, 3), (1, 1), tail=9, sink=4), BF16)),
        contract(Attention(Case("k=lr4,v=tq3", 64, 2, 1, 16, (1030, 3), (1, 1), window=30), BF16)),
        contract(Store(Case("k=lr4,v=tq3", 64, 1, 1, 16, (1022,), (4,)))),
    ],
    "learned": [
        contract(Store(Case("k=lr4,v=tq4", 64, 1, 2, 8, (0,), (5,)))),
        executor(BF16, 1, KVSpec("k=lr3,v=tq3", calibration=made_up.calibration(1, 2, 128), tail=2, sink=1)),
        contract(Attention(Case("k=lr4,v=tq4", 128, 5, 2, 128, (200, 3), (1, 1)), BF16)),
        contract(Attention(Case("k=lr2,v=tq4", 64, 8, 2, 16, (40, 0), (9, 3), tail=5, sink=2), BF16)),
        contract(Attention(Case("k=lr5,v=tq2", 128, 5, 1, 128, (130, 0), (9, 3)), BF16)),
        contract(Attention(Case("k=lr4,v=tq4", 64, 2, 1, 128, (2600,), (1,)), BF16)),
        contract(Attention(Case("k=lr4,v=tq3", 64, 8, 1, 128, (1020,), (9,)), BF16)),
        in_any_order(Store(Case("k=lr3,v=tq4", 128, 1, 2, 128, (0, 0), (1, 9)))),
    ],
    "planted": [],  # `rows` fills it, and `contract`
    "step": [executor(BF16, 1, TQ4)],
    "executor": [executor(BF16, 2, TQ4), executor(FP32, 2, TQ4)],
    "contract": [],
}


def rows(capability: int, group: str) -> Iterator[dict]:
    checks = GROUPS[group].copy()
    if group == "rest":
        checks += [contract(case) for case in suite.cases(CUDA) if isinstance(case, Plain) and case.op != "linear"]
    if group == "contract":
        checks += [contract(case) for case in suite.cases(replace(CUDA, interpreted=False)) if case.op != "linear"]
    if group == "planted":
        checks += [planted(name) for name, fault in FAULTS.items() if getattr(fault, "capability", 0) in (0, capability)]
    for name, check in checks:
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
