"""Records the launches of Triton's kernels as on an NVIDIA GPU, on a machine without one, for a compiler.

Triton's own launch code decides what is compiled: an integer argument that is 1 becomes a constant, one that 16 divides and a
pointer that 16 divides say so in their type. A driver here names the GPU, and a launch does nothing.

Run in a process of its own: where Triton has been imported to interpret, it does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
from block_weights import random_blocks
from small_models import gemma_config, small_config, small_model
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime.driver import driver

from haarkv.executors.cuda import CudaExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda import block_products, decode, delta, experts, ops, schedule
from haarkv.tq_ops.cuda.block_planes import PLANES, by_planes
from haarkv.tq_ops.cuda.layout import READS
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kernel_support import unsupported
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.recurrent import StateShape
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.tq_ops.table import Stack
from haarkv.tq_ops.weight import Blocks

_PROCESSORS = 132  # of an H100 or H200


@dataclass(frozen=True)
class LaunchRequest:
    """What a launch asks the compiler for."""

    source: ASTSource
    target: GPUTarget
    options: dict

    def named_constants(self) -> dict[str, object]:
        """Arguments that became constants, by name, those of a tuple as `k.BITS`."""
        return {self._name(path): value for path, value in self.source.constants.items()}

    def _name(self, path: tuple[int, ...]) -> str:
        name = self.source.fn.arg_names[path[0]]
        return f"{name}.{self.source.signature[name]._fields[path[1]]}" if path[1:] else name

    def __str__(self) -> str:
        constants, types = {name: str(value) for name, value in self.named_constants().items()}, {}
        for name, kind in self.source.signature.items():
            tuple_fields = kind._asdict().items() if isinstance(kind, tuple) else ()
            parts = {f"{name}.{field}": one for field, one in tuple_fields} or {name: kind}
            types |= {part: constants.get(part, one) for part, one in parts.items()}
        divisible = [self._name(path) for path, attributes in self.source.attrs.items() if attributes]
        return f"{self.source.fn.__name__} {types}, divisible by 16: {divisible}"


class _Driver:
    """As much of a GPU's driver as a launch asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class Nothing:
    """A compiled kernel whose launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        pass

    def run(self, *_: object) -> None:
        pass


@contextmanager
def record_launches(
    capability: int, kernel: Callable[[LaunchRequest], Nothing] = lambda _: Nothing()
) -> Iterator[dict[str, LaunchRequest]]:
    """The launches while it is open, each specialisation once; `kernel` makes what stands for a compiled kernel."""
    requests: dict[str, LaunchRequest] = {}

    def note(source: ASTSource, target: GPUTarget, options: dict, **_: object) -> Nothing:
        one = LaunchRequest(source, target, options)
        requests[str(one)] = one
        return kernel(one)

    originals = triton.compiler.compile, torch.Tensor.is_cuda, ops.linear, decode.nvrtc_missing, schedule.processors
    triton.compiler.compile = note
    torch.Tensor.is_cuda = property(lambda _: True)
    block_linear = ops.linear  # dense products are cuBLAS's
    ops.linear = lambda x, weight: (block_linear if isinstance(weight, Blocks) else reference.linear)(x, weight)
    schedule.processors = lambda _: _PROCESSORS
    decode.nvrtc_missing = lambda: "only Triton's kernels are recorded"
    driver.set_active(_Driver(capability))
    try:
        yield requests
    finally:
        triton.compiler.compile, torch.Tensor.is_cuda, ops.linear, decode.nvrtc_missing, schedule.processors = originals
        for one in requests.values():
            one.source.fn.device_caches.clear()  # or it would be known the next time


def serve(model: DecoderModel, spec: KVSpec, block_size: int, prompts: list[int], steps: int) -> None:
    """A prefill of prompts of given lengths, and decode steps of all of them and of fewer; op by op as well."""
    executor = CudaExecutor(model, interpreted=True)
    config, plan = model.config, spec.plan(model.config.num_layers)
    blocks = sum(-(-(n + steps) // block_size) + 1 for n in prompts)
    cache = PagedKVCache(
        plan, config.kv_shapes, num_blocks=blocks, num_rows=len(prompts), block_size=block_size, chunk=max(prompts),
        ring_chunk=max(prompts),
    )  # fmt: skip
    paging = PagedSequences(blocks, block_size)
    ids = [paging.add() for _ in prompts]

    def forward(batch: Batch) -> None:
        tokens = torch.zeros(len(batch.positions), dtype=torch.int64)
        executor._model.head(executor.forward(tokens, batch, cache), executor._table)
        executor._model.forward(tokens, batch, cache, executor.step_ops)

    forward(paging.batch(ids, prompts))
    for step in range(steps):
        some = ids[: max(1, len(ids) - step)]
        forward(paging.batch(some, [1] * len(some)))
    executor.ops.store_kv(
        *torch.zeros(2, 1, config.heads.num_kv_heads, config.heads.head_dim), cache.view(1, paging.batch(ids[:1], [1]))
    )


GEMMA = "gemma"
SHAPES = {64: (3, 3), 128: (10, 2), 256: (4, 2), GEMMA: (4, 1)}
"""By head_dim: query heads and KV heads. Gemma's head_dim is 256, with windows of 512 in all layers but one."""
PROMPTS = ([5, 16, 130], [1], [7] * 17)
"""Batches whose sizes are small, 1, and more than 16; token counts that 16 divides and others."""


def shaped_model(shape: int | str, dtype: torch.dtype, layers: int) -> DecoderModel:
    """A small model of a shape of `SHAPES`."""
    heads, kv_heads = SHAPES[shape]
    if shape == GEMMA:
        return small_model(gemma_config(num_layers=layers, hidden_size=64, num_heads=heads, window=512), dtype=dtype)
    config = small_config(
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=shape, hidden_size=64, max_position_embeddings=4096
    )
    return small_model(config, dtype=dtype)


FORMATS = ("tq4", "tq2", "tq3", "k=tq5,v=tq6", "tq8")
TQ4, TAIL = KVSpec("tq4"), KVSpec("tq4", tail=128, sink=4)
LEARNED_FORMATS = {64: "k=lr4,v=tq4", 128: "k=lr4,v=tq3", 256: "k=lr3,v=tq3", GEMMA: "k=lr3,v=tq3"}
"""By head_dim."""
OTHER_LEARNED = ("k=lr2,v=tq2", "k=lr3,v=tq4", "k=lr5,v=tq4", "k=lr4,v=tq8")
OTHER_TAILS = (KVSpec("tq4", tail=5), KVSpec("tq4", sink=300), KVSpec("k=tq8,v=tq3", tail=32, sink=1))


def learned_spec(kv: str, shape: int | str, layers: int, **window: int) -> KVSpec:
    """Learned keys of made-up coordinates, for a model of `shaped_model`."""
    head_dim = 256 if shape == GEMMA else shape
    return KVSpec(kv, calibration=synthetic.calibration(layers, SHAPES[shape][1], head_dim), **window)


STATES = ((16, 16, 128), (16, 48, 128), (2, 4, 16))
"""Heads of keys and of values of a layer of Gated DeltaNet, and their size: Qwen3.5-0.8B, 27B, and a small one."""


def deltas(states: Collection[tuple[int, int, int]]) -> None:
    """Launches of steps and prompts of Gated DeltaNet, with and without room for drafts; a gated product."""
    for key_heads, value_heads, size in states:
        channels = (2 * key_heads + value_heads) * size
        shapes = (("conv", (3, channels)), ("delta", (value_heads, size, size)))
        for versions, batches in ((2, ([1], [1] * 3, [5, 16, 130])), (6, ([1], [4, 1, 16]))):
            state = StateShape(tuple((name, shape, torch.float32) for name, shape in shapes), versions)
            for new in batches:
                cache = PagedKVCache(
                    TQ4.plan(1), (None,), num_blocks=24, num_rows=3, block_size=16, states={0: state}
                )  # fmt: skip
                paging = PagedSequences(24, 16, num_rows=3)
                batch = paging.batch([paging.add() for _ in new], new)
                x, a, b = (torch.zeros(sum(new), width) for width in (channels, value_heads, value_heads))
                weights = torch.zeros(channels, 1, 4), *torch.zeros(2, value_heads)
                delta.advance(x, a, b, *weights, cache.view(0, batch), ops.new_fault(x.device))
    ops.sigmoid_mul(*torch.zeros(2, 3, 64), torch.bfloat16)


MIXTURES = ((128, 8, 2048, 768, True), (512, 10, 2048, 512, True), (5, 2, 48, 40, False))
"""Experts, those of a token, hidden size, their width and whether shares sum to 1: Qwen3-30B-A3B, Qwen3-Next, and a small
one."""


def mixtures(shapes: Collection[tuple[int, int, int, int, bool]]) -> None:
    """Launches of experts for one token, some, and so many that tiles are fewer than pairs; weights take no memory."""
    for count, per_token, hidden, width, normalized in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            one = torch.zeros((), dtype=dtype)
            gate, down = one.expand(count * width, hidden), one.expand(count * hidden, width)
            stack = Stack(count, per_token, normalized, "silu", gate, gate, down)
            for tokens in (1, 16, 2 * count // per_token):
                experts.run_experts(one.expand(tokens, hidden), torch.zeros(tokens, count), stack)


def products() -> None:
    """Launches with weights in blocks of every type: products, with scales of rows and columns, rows, and experts."""
    for kind, planes in PLANES.items():
        for inputs in (512, 768) if planes.together == 8 else (512, 96):  # rows that begin at multiples of 16 bytes, and not
            plain = random_blocks(kind, 70, inputs)
            for weight in (plain, plain * torch.ones(70, 1) * torch.ones(inputs)):
                device_weight = by_planes(weight, torch.device("cpu"))
                for dtype in (torch.bfloat16, torch.float32):
                    for tokens in (1, 16, 70) if weight is plain else (3,):
                        block_products.product(torch.zeros(tokens, inputs, dtype=dtype), device_weight)
                    block_products.gather_rows(device_weight, torch.zeros(2, dtype=torch.int64), dtype)
        weight, x = by_planes(random_blocks(kind, 512, 256), torch.device("cpu")), torch.zeros(3, 256, dtype=torch.bfloat16)
        experts.run_experts(x, torch.zeros(3, 2), Stack(2, 1, True, "gelu_tanh", *[weight] * 3))


def everything(capability: int, head_dims: Collection[int | str] = tuple(SHAPES)) -> dict[str, LaunchRequest]:
    """The launches of models of these head_dims, of both dtypes and with every width of levels, over blocks and pages.

    Dtypes, widths and batches vary one by one around bf16 with tq4 over blocks of 128, with and without a tail and sinks.
    Head_dim 128 has all batches, pages of 16, other tails, and more widths of learned keys.
    """
    with record_launches(capability) as requests:
        for head_dim in head_dims:
            widest, width = head_dim == 128, 256 if head_dim == GEMMA else head_dim
            for spec in (TQ4, TAIL):
                for prompts in PROMPTS if widest else PROMPTS[:1]:
                    serve(shaped_model(head_dim, torch.bfloat16, 17), spec, 128, prompts, 3)
                serve(shaped_model(head_dim, torch.float32, 17), spec, 128, PROMPTS[0], 3)
            readable = [KVSpec(kv) for kv in FORMATS if unsupported(READS, KVSpec(kv).plan(2), KVShape(1, width)) is None]
            learns = [
                learned_spec(LEARNED_FORMATS[head_dim], head_dim, 2),
                learned_spec(LEARNED_FORMATS[head_dim], head_dim, 2, tail=32, sink=4),
            ]
            serve(shaped_model(head_dim, torch.float32, 2), learns[1], 128, PROMPTS[0], 1)
            deltas(STATES if widest else STATES[-1:])
            mixtures(MIXTURES if widest else MIXTURES[-1:])
            if widest:
                products()
                for spec in (TQ4, KVSpec("tq3"), learns[1]):  # prompts too short for 64 columns, in pages
                    serve(shaped_model(head_dim, torch.bfloat16, 2), spec, 16, PROMPTS[2], 1)
                learns += [*(learned_spec(kv, head_dim, 2) for kv in OTHER_LEARNED), *OTHER_TAILS]
            for spec in (*readable, *learns):
                serve(shaped_model(head_dim, torch.bfloat16, 2), spec, 16 if widest else 128, PROMPTS[0], 1)
    return requests


def because(error: BaseException) -> str:
    """What refused a launch, on one line: the error at the bottom, since those above it only say where."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[-400:]
