"""What an executor is: an object that runs the forward of one model; `validation` compares it with the reference."""

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
        name: its name in `--executor`, in folders of ops and in markers of tests.
        device: device of the cache, batches and token ids.
        description: text for the user: what runs the model, and where.
        simulated: whether it runs in an interpreter of its device: its numbers are right, its times mean nothing.
        compiled: program's name -> seconds of its first call, compilation included.
        decode_step: number of keys that one step of its decode program takes; more keys take another path. None without steps.
        blocks: names of the types of quantised blocks for whose products it rounds x to 16-bit integers (`CpuOps.linear`).
            With other blocks it multiplies as with the restored weights.
        weights: weights on its device; a draft may share them.
        ops: the op table that it runs, for a recorder to wrap; None if its layers are fused programs.
    """

    name: str
    config: ModelConfig
    device: torch.device
    description: str
    simulated: bool = False
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
        """None, or one sentence: why this executor cannot run a model with this cache. Static in the catalog's classes."""

    def batch_invariant(self, plan: KVPlan) -> bool:
        """Whether, with this cache, a token's logits have the same bits for any batch and any cut of its sequence. If not,
        sums change with the batch, and one of two tokens that nearly tie may replace the other.
        """
        return False

    def compile_ahead(self, plan: KVPlan, on_program: Callable[[str], object]) -> None:
        """Compile the programs for which the first forwards with a cache of this plan would wait."""
        return

    def with_ops(self, wrap: Callable[[OpTable], OpTable]) -> Executor | None:
        """This executor with its op table wrapped; None if it does not run op by op."""
        return None

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        """Hidden states [T, hidden] after all layers for T new tokens, token_ids [T] int64; stores their K and V in the cache.
        For prefill, decode and the check of drafted tokens alike."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] fp32 for rows [N, hidden] of the last `forward`'s result.

        Raises:
            NonFiniteError: a number of the forward or the head is not finite; the message names the weight.
        """

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        """Hidden states [T, hidden] after the layers in `span`, for the validator."""


def last_rows(hidden: Tensor, batch: Batch) -> Tensor:
    """The rows of hidden states [T, hidden] for each sequence's last new token: [B, hidden]."""
    return hidden if len(hidden) == len(batch.seq_lens) else hidden[batch.query_start_loc[1:].long() - 1]


def prefill(executor: Executor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    """Run a forward; logits [B, vocab] fp32 after each sequence's last new token."""
    return executor.head(last_rows(executor.forward(token_ids, batch, cache), batch))


def verify(executor: Executor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    """Run a forward; logits [T, vocab] fp32 after each of T new tokens."""
    return executor.head(executor.forward(token_ids, batch, cache))
