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
        name: the word for it in `--executor`, the ops folder and the tests' marker.
        device: where the cache, batches and token ids that it is given live.
        description: a phrase for the user: what runs the model, and where.
        simulated: it runs in an interpreter of its device: right numbers, and times that mean nothing.
        compiled: seconds that the first calls of its programs took with their compilation, by the program's name; empty for an
            executor that keeps no programs.
        batches_alike: with formats of ours, a token's logits have the same bits however its sequence was cut, and whatever
            runs beside it. Else sums change with the batch, and where two tokens nearly tie, either may come.
        decode_step: keys that a decode step takes at once, where more of them are another way through its program; else None.
        blocks: types of quantised blocks, by name, for whose products it rounds x to 16-bit integers (`CpuOps.linear`). With
            other weights in blocks its products are those of the restored ones.
        weights: of the model, as they are on its device; a draft may share them.
        ops: the op table it runs, so that a recorder can wrap it; None if its layers are fused programs.
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
        """None, or in one sentence why this executor cannot run such a model with such a cache. An executor of the catalog
        answers as a class, before there is a model."""

    def compile_ahead(self, plan: KVPlan, on_program: Callable[[str], object]) -> None:
        """Compile what first forwards with such a cache would wait for: nothing, unless an executor keeps programs."""
        return

    def with_ops(self, wrap: Callable[[OpTable], OpTable]) -> Executor | None:
        """This executor with its op table wrapped, to look on as its ops run; None where it does not run op by op."""
        return None

    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        """Hidden states [T, hidden] after all layers, of T new tokens [T] int64, which all are stored: prefill, decode, and
        the check of drafted tokens alike. `head` makes logits of the rows that are wanted."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] fp32 of rows [N, hidden] of what the last `forward` gave.

        Raises:
            NonFiniteError: what the forward, or the head, makes of its weights is not finite; it names the weight.
        """

    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        """Hidden states [T, hidden] after the layers of `span`; what the validator drives."""


def last_rows(hidden: Tensor, batch: Batch) -> Tensor:
    """Of hidden states [T, hidden] those of each sequence's last new token, [B, hidden]."""
    return hidden if len(hidden) == len(batch.seq_lens) else hidden[batch.query_start_loc[1:].long() - 1]


def prefill(executor: Executor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    """Logits [B, vocab] fp32 after each sequence's last new token: one forward, and the head of those rows."""
    return executor.head(last_rows(executor.forward(token_ids, batch, cache), batch))


def verify(executor: Executor, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
    """Logits [T, vocab] fp32 after each of T new tokens."""
    return executor.head(executor.forward(token_ids, batch, cache))
