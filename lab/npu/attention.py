"""Decode attention alone as a program, three ways: designs to be compared in PyPTO's cost model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haarkv.models.qwen3_14b.npu.programs import BLOCK
from haarkv.tq_ops.npu.program import HEAD_DIM, Argument, AttentionShape, Kernel, heads_at_once, ordered, with_tuned

VARIANTS = {
    "tq4": "codes as stored, queries rotated once",
    "published": "the same codes, every tile un-rotated",
    "bf16": "a cache of bf16",
}


@dataclass(frozen=True)
class AttentionProgram:
    """Scope 2b of decode: one query token of each sequence over a paged cache.

    Attributes:
        variant: of `VARIANTS`.
        rows: sequences that q and out have room for.
    """

    variant: str
    shape: AttentionShape
    rows: int = 16
    name: str = "attention"

    @classmethod
    def tuned(cls, variant: str, num_heads: int, num_kv_heads: int, step_tokens: int = 2048) -> AttentionProgram:
        """A variant with the sizes that the cost model likes best for it; figures in benchmarks/LOG.md."""
        most, longest = {"tq4": (8, 2048), "published": (4, 1024), "bf16": (2, 2048)}[variant]
        at_once = heads_at_once(num_kv_heads, most)
        return cls(variant, AttentionShape(num_heads, num_kv_heads, 1, step_tokens, at_once, longest))

    @property
    def arguments(self) -> tuple[Argument, ...]:
        names = ("q", "k_codes", "k_scale", "v_codes", "v_scale", "rotation", "mask", "block_table", "seq_lens")
        return (*(Argument(name) for name in names), Argument("out", output=True))

    def kv_bytes(self, batch: int, context: int) -> int:
        """Bytes of codes, scales or values that a step reads at least once."""
        return 2 * batch * context * self.shape.num_kv_heads * (256 if self.variant == "bf16" else 66)

    def blank_call(self, batch: int, context: int) -> list[Tensor]:
        """Arguments of that size, zeros: the cost model looks at sizes, the block table and the lengths alone."""
        shape = self.shape
        blocks = -(-context // shape.step_tokens) * (shape.step_tokens // BLOCK)
        tiles = batch * blocks * shape.num_kv_heads
        width, dtype = (HEAD_DIM, torch.bfloat16) if self.variant == "bf16" else (HEAD_DIM // 2, torch.int8)
        named = {
            "q": torch.zeros(self.rows * shape.num_heads, HEAD_DIM, dtype=torch.bfloat16),
            "rotation": torch.zeros(HEAD_DIM, HEAD_DIM, dtype=torch.bfloat16),
            "mask": shape.mask(),
            "block_table": torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks),
            "seq_lens": torch.full((batch,), context, dtype=torch.int32),
            "out": torch.zeros(self.rows * shape.num_heads, HEAD_DIM, dtype=torch.bfloat16),
        }
        for side in "kv":
            named[f"{side}_codes"] = torch.zeros(tiles * BLOCK, width, dtype=dtype)
            named[f"{side}_scale"] = torch.zeros(tiles, BLOCK, dtype=torch.float16)
        return ordered(self, named)

    def build(self, **options: dict[str, Any]) -> Kernel:
        from lab.npu import attention_kernel

        kernel: Kernel = attention_kernel.build(self, with_tuned(options))
        return kernel


_PIPES = {"cube": "Cube", "vector": "Vector", "load": "MTE_IN", "load L0": "MTE1", "store": "MTE_OUT"}


def pipe_shares(report: str) -> dict[str, float]:
    """Percent of all cycles in which the average pipe of a kind is busy, from the cost model's report."""
    found = {name: re.search(rf"Average {pipe} Usage\.*:\s*[\d.]+\s+([\d.]+)%", report) for name, pipe in _PIPES.items()}
    return {name: float(match[1]) for name, match in found.items() if match}
