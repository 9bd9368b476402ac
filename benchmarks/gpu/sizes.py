"""What is measured: the true sizes, or as little as shows that every part of the benchmark works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from haarkv.benchmarks.decode_cost import Case
from haarkv.models.config import ModelConfig
from haarkv.models.catalog import read_config


@dataclass(frozen=True)
class Prompt:
    """New tokens of one sequence, behind those that are stored already."""

    new: int
    stored: int


@dataclass(frozen=True)
class Sizes:
    """Shapes and cases of a run.

    Attributes:
        config: of the model; whole steps run all its layers where they fit.
        attention, append, steps: sequences, and tokens of each.
        prefill: prompts of one sequence.
        every_format: the cases in which each format that the kernels read is timed; the others take `tq4` alone.
        cold_bytes: so many bytes take turns, far more than a cache holds.
        most_copies: of one case's K and V.
        warm_up, repeats: turns that do not count, and turns that do.
        dry: in Triton's interpreter, on the CPU.
    """

    config: ModelConfig
    attention: Sequence[Case]
    append: Sequence[Case]
    prefill: Sequence[Prompt]
    steps: Sequence[Case]
    every_format: Sequence[Case]
    cold_bytes: int
    most_copies: int
    warm_up: int
    repeats: int
    dry: bool


QWEN3_14B = read_config("random:14b")
FULL = Sizes(
    config=QWEN3_14B,
    attention=[Case(batch, context) for batch in (1, 8, 32) for context in (1024, 4096, 16384, 32768)],
    append=[Case(1, 1), Case(8, 1), Case(32, 1), Case(1, 2048)],
    prefill=[Prompt(2048, 0), Prompt(2048, 32768)],
    steps=[Case(1, 4096), Case(8, 4096), Case(8, 32768)],
    every_format=[Case(1, 4096), Case(8, 32768)],
    cold_bytes=256 * 2**20,
    most_copies=256,
    warm_up=2,
    repeats=11,
    dry=False,
)
DRY = Sizes(
    config=replace(
        QWEN3_14B, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=61,
        max_position_embeddings=512,
    ),
    attention=[Case(2, 32)],
    append=[Case(2, 1)],
    prefill=[Prompt(8, 16)],
    steps=[Case(2, 32)],
    every_format=[],
    cold_bytes=2**14,
    most_copies=2,
    warm_up=0,
    repeats=1,
    dry=True,
)  # fmt: skip
