"""What an executor is: something that runs the forward of one model, and can be held against the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.weights import Weights
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.table import OpTable


class Executor(Protocol):
    """Runs one model's forwards.

    Attributes:
        name: in `--executor`, the ops folder and the tests' marker.
        device: of the cache, batches and token ids.
        description: for the user: what runs the model, and where.
        simulated: it runs in an interpreter of its device: right numbers, meaningless times.
        compiled: seconds that the first calls of its programs took with their compilation, by the program's name.
        batch_invariant: with our formats a token's logits have the same bits however its sequence was cut, and whatever runs
            beside it; else of two tokens that nearly tie either may come.
        decode_step: keys that a decode step takes at once, where more take another path through its program; else None.
        blocks: types of weight blocks for whose products it rounds x to 16-bit integers (`CpuOps.linear`).
        weights: on its device; a draft may share them.
        ops: the op table it runs, for a recorder to wrap; None if its layers are fused programs.
    """

    name: str
    config: ModelConfig
    device: torch.device
    description: str
    simulated: bool = False
    batch_invariant: bool = False
    decode_step: int | None = None
    blocks: tuple[str, ...] = ()
    ops: OpTable | None = None
    _model: DecoderModel

    @property
    def compiled(self) -> Mapping[str, float]:
        return {}

    @property
    def weights(self) -> Weights:
        return self._model.weights

    def supports(self, config: ModelConfig, plan: KVPlan) -> str | None:
        """None, or in one sentence why this executor cannot run a model with a cache; static where it is cataloged."""

    def compile_ahead(self, plan: KVPlan, on_program: Callable[[str], object]) -> None:
        """Compile the programs that first forwards with such a cache would wait for."""
        return

    def with_ops(self, wrap: Callable[[OpTable], OpTable]) -> Executor | None:
        """This executor with its op table wrapped; None where it does not run op by op."""
        return None

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        """Hidden states [T, hidden] of new tokens [T] int64, any number a sequence, after all layers; K and V are stored."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] fp32 of rows of the last `forward`; NonFiniteError of it or the head, which names the weight."""

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        """Hidden states [T, hidden] after the layers of `span`, for the validator."""


def last_rows(hidden: Tensor, batch: Batch) -> Tensor:
    """Hidden states [B, hidden] of each sequence's last new token."""
    return hidden if len(hidden) == len(batch.seq_lens) else hidden[batch.query_start_loc[1:].long() - 1]


def prefill(executor: Executor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    """Logits [B, vocab] fp32 after each sequence's last new token."""
    return executor.head(last_rows(executor.forward(token_ids, batch, cache), batch))


def verify(executor: Executor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    """Logits [T, vocab] fp32 after each of T new tokens."""
    return executor.head(executor.forward(token_ids, batch, cache))
