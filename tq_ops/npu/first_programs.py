"""The first programs to run on a new card: a sum, a product, the look-up of every byte, and storing K and V as an op that can
be held against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.npu.device import Runner
from haarkv.tq_ops.npu.program import Argument, Kernel, ordered
from haarkv.tq_ops.npu.reads import HEAD_DIM, READS
from haarkv.tq_ops.npu.scopes import StoreProgram
from haarkv.tq_ops.npu.sides import sides_of
from haarkv.tq_ops.npu.turns import nothing_turned, turns_of_tokens


@dataclass(frozen=True)
class AddProgram:
    """out = x + y, each [n * rows, width] FP32.

    Attributes:
        rows: of a tile.
    """

    rows: int = 32
    width: int = HEAD_DIM
    name: str = "add"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return Argument("x"), Argument("y"), Argument("out", output=True)

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.tq_ops.npu.kernels import add_kernel

        kernel: Kernel = add_kernel.build(self, options)
        return kernel


def add(runner: Runner, x: Tensor, y: Tensor) -> Tensor:
    """x + y by a program, on the host; its result begins as NaN, so that nothing written is not mistaken for something.

    Args:
        x, y: [n * 32, 128] fp32, on the host.
    """
    device, program = runner.device, AddProgram()
    out = torch.full_like(x, torch.nan).to(device)
    runner.call(program, ordered(program, {"x": x.to(device), "y": y.to(device), "out": out}))
    return out.cpu()


@dataclass(frozen=True)
class ProductProgram:
    """out = x @ y.T, x [rows, inner] and y [columns, inner] FP16, out FP32: every tile of a cube core once or more."""

    rows: int = 64
    inner: int = 512
    columns: int = 256
    name: str = "product"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return Argument("x"), Argument("y"), Argument("out", output=True)

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.tq_ops.npu.kernels import product_kernel

        kernel: Kernel = product_kernel.build(self, options)
        return kernel


def product(runner: Runner) -> tuple[Tensor, Tensor]:
    """A product of small whole numbers by a program, and what it should be, both on the host: FP32 sums of these are exact in
    any order."""
    program, device, generator = ProductProgram(), runner.device, torch.Generator().manual_seed(0)
    x, y = (
        torch.randint(-8, 9, (count, program.inner), generator=generator).half() for count in (program.rows, program.columns)
    )
    out = torch.full((program.rows, program.columns), torch.nan, device=device)
    runner.call(program, ordered(program, {"x": x.to(device), "y": y.to(device), "out": out}))
    return out.cpu(), x.float() @ y.float().T


@dataclass(frozen=True)
class LookUpProgram:
    """Codes of `tq4`, [rows, width / 2] INT8, to the centroids they stand for, [rows, width] FP16.

    Attributes:
        rows: of one or two blocks of 128 tokens, as attention restores them together.
        width: head_dim.
    """

    rows: int = 256
    width: int = HEAD_DIM
    name: str = "look_up"

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return Argument("codes"), Argument("out", output=True)

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.tq_ops.npu.kernels import look_up_kernel

        kernel: Kernel = look_up_kernel.build(self, options)
        return kernel


def look_up(runner: Runner) -> tuple[Tensor, Tensor, Tensor]:
    """Every byte in every column by a program: the bytes [256, 64] uint8, what became of them [256, 128] FP16, on the host,
    and what should have."""
    program, device = LookUpProgram(), runner.device
    codes = torch.arange(program.rows).view(-1, 1).add(torch.arange(program.width // 2)).remainder(256).to(torch.uint8)
    out = torch.full((program.rows, program.width), torch.nan, dtype=torch.float16, device=device)
    runner.call(program, ordered(program, {"codes": codes.view(torch.int8).to(device), "out": out}))
    book = torch.tensor(READS.built_in(program.width).centroids)
    return codes, out.cpu(), book[torch.cat([codes & 15, codes >> 4], 1).long()].half()


class StoreByProgram:
    """The op `store_kv`, run by a program of its own: tokens are padded to whole tiles, the cache is handed over as it is.

    Args:
        runner: calls the program.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, k: Tensor, v: Tensor, cache: PagedKVCache, layer: int, batch: Batch) -> None:
        """Store K and V [T, Hkv, D] fp32 at the batch's slots of a layer, in 128-token blocks."""
        head_dim = cache.shape(layer).head_dim
        k_side, v_side = sides_of(cache.plan, layer, head_dim)
        program = StoreProgram(cache.shape(layer).num_kv_heads, k=k_side, v=v_side)
        matrix = READS.built_in(head_dim).transform.matrix(layer, head_dim)
        tensors = {"rotation": matrix.to(cache.device).contiguous(), "slot": batch.slot_mapping.int()}
        tensors |= k_side.domain_tensors(cache.plan.k(layer), layer, cache.device)
        turns = cache.plan.k(layer).turns(layer)
        missing = -k.shape[0] % program.rows
        back = nothing_turned(cache.device, head_dim)
        if turns:
            back = pad(turns_of_tokens(turns, batch.positions), (0, 0, 0, missing))
        tensors["back"] = back
        given = ((k_side, k, cache.k_fields(layer)), (v_side, v, cache.v_fields(layer)))
        for prefix, (side, x, fields) in zip("kv", given, strict=True):
            tensors[prefix] = pad(x.float(), (0, 0, 0, 0, 0, missing))
            tensors |= side.tensors(prefix, fields)
        self._runner.call(program, ordered(program, tensors))
        for in_bf16, x in zip(cache.kept(layer), (k, v), strict=True):
            if in_bf16:  # only the program of a layer keeps tokens in BF16 itself
                in_bf16.write(x, batch)
