"""A compiled program as the rest of the project knows it, and the sizes of attention in one. No PyPTO here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

Kernel = Callable[..., None]
"""A built program: called with its tensors in order, it fills the outputs in place."""


@dataclass(frozen=True)
class Argument:
    """One tensor parameter of a program.

    Attributes:
        output: the program writes it, in place.
        unread: dtype and shape of the zeros that a call without such a tensor passes, which the program does not read; None if
            every call has one. PyPTO's signatures cannot vary.
    """

    name: str
    output: bool = False
    unread: tuple[torch.dtype, tuple[int, ...]] | None = None


class Program(Protocol):
    """A PyPTO program of fixed shapes; hashable and picklable. Its arguments are in the kernel's order."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> tuple[Argument, ...]: ...

    def build(self, **options: dict[str, Any]) -> Kernel:
        """The jit-decorated kernel, not traced yet; `options` are PyPTO's `runtime_options`, `verify_options` and so on."""


@cache
def unread_zeros(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """What stands for an argument that no program reads; the same tensor each time."""
    return torch.zeros(shape, dtype=dtype, device=device)


def order_arguments(program: Program, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """A program's tensors in order, zeros for `unread` ones; ValueError if one is missing or none of its arguments."""
    device = next(iter(tensors.values())).device
    zeros = {a.name: unread_zeros(*a.unread, device) for a in program.arguments if a.unread and a.name not in tensors}
    tensors = {**tensors, **zeros}
    names = [argument.name for argument in program.arguments]
    if set(names) != set(tensors):
        raise ValueError(f"{program.name}: arguments differ: {sorted(set(names) ^ set(tensors))}")
    return [tensors[name] for name in names]


HEAD_DIM = 128
_BLOCK = 128
_L0B, _L1B, _BF16 = 64 * 2**10, 256 * 2**10, 2
_LONGEST_CUBE = 2048


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of attention in a program.

    Attributes:
        unit_tokens: consecutive tokens of one sequence that attend together.
        step_tokens: keys of one step of the online softmax, a multiple of the block size.
        heads_at_once: KV heads of one iteration; divides `num_kv_heads`.
        window: the newest tokens that a query sees, itself among them; None for all.
        scale: of the logits; 1 / sqrt(head_dim) if None.
    """

    num_heads: int
    num_kv_heads: int
    unit_tokens: int
    step_tokens: int
    heads_at_once: int
    head_dim: int = HEAD_DIM
    window: int | None = None
    scale: float | None = None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def blocks(self) -> int:
        return self.step_tokens // _BLOCK

    @property
    def queries(self) -> int:
        """Query rows that share the loads of a step's keys."""
        return self.unit_tokens * self.group

    @property
    def cube_rows(self) -> int:
        """M tile of the cube: 16 pads a small group; a larger one is cut evenly."""
        return 32 if self.queries % 32 == 0 else 16

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def score_cube(self, width: int) -> tuple[list[int], list[int], list[int]]:
        """Tiles (M, K, N) of q @ k.T for keys of `width` numbers: all unpacking of a head feeds one task."""
        keys = min(self.step_tokens, _LONGEST_CUBE)
        even = width & -width
        k = min(even, _L0B // (_BF16 * keys))
        return [self.cube_rows] * 2, [k, min(even, 4 * k)], [keys, keys]

    def weigh_cube(self) -> tuple[list[int], list[int], list[int]]:
        """Tiles (M, K, N) of p @ v: probabilities are loaded once, values as many at a time as fit, 1,024 of 128 numbers."""
        tokens = [128, min(self.step_tokens, 2048), min(self.step_tokens, _L1B // (_BF16 * self.head_dim))]
        return [self.cube_rows] * 2, tokens, square_tile(self.head_dim)

    def mask(self) -> Tensor:
        """[queries, 2 * step + unit] fp32: row r is 0 up to column `step + its token` and -1e30 behind it.

        A view at a moving column is the causal mask of any step; no masked load survives every pass of PyPTO.
        """
        token = torch.arange(self.unit_tokens).repeat_interleave(self.group).unsqueeze(1)
        column = torch.arange(2 * self.step_tokens + self.unit_tokens)
        return torch.where(column <= self.step_tokens + token, 0.0, -1e30)

    def left_behind(self) -> Tensor:
        """The complement of `mask`: a view of it hides the keys that have left a query's window."""
        return -1e30 - self.mask()


def square_tile(size: int) -> list[int]:
    """L0 and L1 tile of an axis of the cube along a head, so that a square of 256 fits L0 as well."""
    return [min(size, 128), size]


def heads_at_once(num_kv_heads: int, most: int) -> int:
    """The largest divisor of the KV heads that is no larger than `most`."""
    return next(n for n in range(min(most, num_kv_heads), 0, -1) if num_kv_heads % n == 0)


TUNED_OPTIONS: dict[str, dict[str, Any]] = {
    "runtime_options": {"stitch_function_max_num": 32},
    "pass_options": {"vec_nbuffer_setting": {-1: 16}, "cube_nbuffer_setting": {-1: 1}},
}
"""PyPTO's options for a program with attention: vector tasks are merged, cube tasks of different heads are not.

A launch's workspace is proportional to `stitch_function_max_num`, the passes through loops that the device orders at once.
"""


def with_tuned(options: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options of a call joined with `TUNED_OPTIONS`."""
    return {**TUNED_OPTIONS, **options, "runtime_options": {**TUNED_OPTIONS["runtime_options"], **options["runtime_options"]}}
