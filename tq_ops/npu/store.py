"""The op `store_kv` as an NPU program of its own, compared with the reference before a layer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from haarkv.tq_ops.kv.cache import LayerView
from haarkv.tq_ops.npu.device import Runner
from haarkv.tq_ops.npu.program import Argument, Kernel, order_arguments
from haarkv.tq_ops.npu.sides import READS, TQ4, Side, layer_sides, turns_of_tokens


@dataclass(frozen=True)
class StoreProgram:
    """Scope 2a: K and V [rows * Hkv, D] FP32, padded to a multiple of `rows` tokens, into the paged cache.

    Attributes:
        rows: tokens of a tile.
        k, v: how K and V are stored.
    """

    num_kv_heads: int
    rows: int = 16
    name: str = "store_kv"
    k: Side = TQ4
    v: Side = TQ4

    @property
    def arguments(self) -> tuple[Argument, ...]:
        inputs = (Argument(name) for name in ("k", "v", "rotation", "slot"))
        back = Argument("back", unread=(torch.float32, (1, self.k.head_dim)))
        return (*inputs, back, *self.k.domain_arguments(), *self.k.arguments("k"), *self.v.arguments("v"))

    def build(self, **options: dict[str, Any]) -> Kernel:
        from haarkv.tq_ops.npu.kernels import sides

        kernel: Kernel = sides.build(self, options)
        return kernel


class StoreByProgram:
    """The op `store_kv`, run by a program of its own: tokens are padded to whole tiles."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, k: Tensor, v: Tensor, at: LayerView) -> None:
        """Store K and V [T, Hkv, D] fp32 at the batch's slots of a layer."""
        batch, device, k_format = at.batch, k.device, at.kv.k.kv_format
        head_dim = at.kv.shape.head_dim
        k_side, v_side = layer_sides(at.cache.plan, at.layer, head_dim)
        program = StoreProgram(at.kv.shape.num_kv_heads, k=k_side, v=v_side)
        matrix = READS.built_in(head_dim).transform.matrix(at.layer, head_dim)
        tensors = {"rotation": matrix.to(device).contiguous(), "slot": batch.slot_mapping.int()}
        tensors |= k_side.domain_tensors(k_format, at.layer, device)
        turns = k_format.rope_shift(at.layer)
        missing = -k.shape[0] % program.rows
        if turns:
            tensors["back"] = pad(turns_of_tokens(turns, batch.positions), (0, 0, 0, missing))
        side_inputs = ((k_side, k, at.kv.k.fields), (v_side, v, at.kv.v.fields))
        for prefix, (side, x, fields) in zip("kv", side_inputs, strict=True):
            tensors[prefix] = pad(x.float(), (0, 0, 0, 0, 0, missing))
            tensors |= side.tensors(prefix, fields)
        self._runner.call(program, order_arguments(program, tensors))
        for in_bf16, x in zip(at.kv.windows, (k, v), strict=True):
            if in_bf16:  # only the program of a layer keeps tokens in BF16 itself
                in_bf16.write(x, batch)
