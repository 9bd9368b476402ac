"""The forwards of a validation, and the record of a layer in one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.engine.generation import PREFILL_CHUNK
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, WINDOW_CHUNK, blocks_for
from haarkv.validation.layers.parts import Snapshot, new_cache
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.report import Verdict


@dataclass(frozen=True)
class Forward:
    """One forward of a validation: token ids [T] and their places; `phase` is "prefill", "decode" or "verify"."""

    phase: str
    step: int
    token_ids: Tensor
    batch: Batch

    def with_place(self, verdict: Verdict, layer: int | None) -> Verdict:
        return replace(verdict, phase=self.phase, step=self.step, layer=layer)

    @property
    def logit_rows(self) -> Tensor:
        """Tokens [N] after which there are logits: of a verify all T, else each sequence's last."""
        if self.phase == "verify":
            return torch.arange(len(self.token_ids))
        return self.batch.query_start_loc[1:].long() - 1


@dataclass(frozen=True)
class LayerRecord:
    """What the reference computed in one layer of a forward.

    Attributes:
        calls: its ops; empty of a record read from a file.
        before: the layer's cache before it ran, poisoned where it must not read.
        hidden_in, hidden_out: [T, hidden].
        kv: K and V [T, Hkv, D] fp32, as quantized; None of a layer that keeps a state.
        new_fields: every part where the forward's tokens go; or the state of its sequences.
    """

    index: int
    forward: Forward
    calls: list[Call]
    before: Snapshot
    hidden_in: Tensor
    hidden_out: Tensor
    kv: tuple[Tensor, Tensor] | None
    new_fields: Snapshot

    @property
    def batch(self) -> Batch:
        return self.forward.batch

    @property
    def k(self) -> Tensor:
        """K as quantized, [T, Hkv, D] fp32."""
        assert self.kv is not None
        return self.kv[0]

    @property
    def v(self) -> Tensor:
        assert self.kv is not None
        return self.kv[1]


_DRAFT_TOKENS = 2
"""Tokens taken back after the first sequence's verify; of the next one fewer, then none, and so on."""


class Schedule:
    """The forwards in order: all prompts in chunks, then `steps` decode steps; then a verify of a token and drafted ones,
    which are taken back, and a decode step in their place. An executor that keeps anything of a token that is gone fails
    there.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], steps: int, plan: KVPlan) -> None:
        self.prompts, self.steps, self.plan = prompts, steps, plan
        self._blocks = [blocks_for(len(prompt) + self.more(steps)) for prompt in prompts]

    def __len__(self) -> int:
        return -(-max(map(len, self.prompts)) // self.chunk) + self.steps + 2 * bool(self.steps)

    @staticmethod
    def more(steps: int) -> int:
        """Tokens behind each prompt that need room."""
        return steps + 1 + _DRAFT_TOKENS if steps else 0

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that run at once; a cache with a tail has no room for more."""
        has_ring = any(map(self.plan.ring_tokens, self.plan.formats))
        return min(PREFILL_CHUNK, WINDOW_CHUNK) if has_ring else PREFILL_CHUNK

    @property
    def num_blocks(self) -> int:
        """Room for all of it, and one block and one row of no sequence."""
        return sum(self._blocks) + 1

    def new_cache(self, model: DecoderModel) -> PagedKVCache:
        """An empty cache in which the drafted tokens can be taken back."""
        return new_cache(self.plan, model.config.for_drafts(_DRAFT_TOKENS), self.num_blocks)

    def paging(self) -> PagedSequences:
        """Bookkeeping that hands out the last block first, so that ignoring the block table finds the wrong tokens."""
        paging = PagedSequences(self.num_blocks, BLOCK_SIZE, range(self.num_blocks - 1, -1, -1))
        for _ in self.prompts:
            paging.add()
        return paging

    def run(self, paging: PagedSequences, run_forward: Callable[[Forward], Tensor | None]) -> None:
        """Run every forward in order, greedily; no logits [N, vocab] end the run."""
        tokens, every = torch.zeros(len(self.prompts), dtype=torch.int64), list(range(len(self.prompts)))
        for rows, forward in self._prefill(paging):
            if (logits := run_forward(forward)) is None:
                return
            tokens[rows] = logits.argmax(-1)
        for step in range(self.steps):
            if (logits := run_forward(self._decode(step, tokens, paging))) is None:
                return
            tokens = logits.argmax(-1)
        if not self.steps:
            return
        forward = self._verify(tokens, paging)
        if (logits := run_forward(forward)) is None:
            return
        paging.take_back(every, (forward.batch.query_start_loc.diff() - 1).tolist())
        first = forward.batch.query_start_loc[:-1].long()
        run_forward(self._decode(self.steps, logits[first].argmax(-1), paging))

    def _prefill(self, paging: PagedSequences) -> list[tuple[list[int], Forward]]:
        forwards = []
        for step, begin in enumerate(range(0, max(map(len, self.prompts)), self.chunk)):
            rows = [row for row, prompt in enumerate(self.prompts) if begin < len(prompt)]
            pieces = [self.prompts[row][begin : begin + self.chunk] for row in rows]
            batch = self.batch(paging, rows, [len(piece) for piece in pieces])
            forwards.append((rows, Forward("prefill", step, torch.tensor([t for p in pieces for t in p]), batch)))
        return forwards

    def _decode(self, step: int, tokens: Tensor, paging: PagedSequences) -> Forward:
        rows = list(range(len(self.prompts)))
        return Forward("decode", step, tokens, self.batch(paging, rows, [1] * len(rows)))

    def _verify(self, tokens: Tensor, paging: PagedSequences) -> Forward:
        draft_tokens = [list(prompt[: count - 1]) for prompt, count in zip(self.prompts, self.verify_lengths, strict=True)]
        ids = [token for first, drafts in zip(tokens.tolist(), draft_tokens, strict=True) for token in (first, *drafts)]
        batch = self.batch(paging, list(range(len(draft_tokens))), [1 + len(drafts) for drafts in draft_tokens])
        return Forward("verify", 0, torch.tensor(ids), batch)

    @property
    def verify_lengths(self) -> list[int]:
        """Most tokens of each sequence in a verify."""
        return [1 + _DRAFT_TOKENS - row % (1 + _DRAFT_TOKENS) for row in range(len(self.prompts))]

    def batch(self, paging: PagedSequences, sequences: list[int], counts: list[int]) -> Batch:
        """The next tokens. Rows are in reverse: a row is not the sequence's number."""
        batch = paging.batch(sequences, counts)
        return replace(batch, rows=self.num_blocks - 1 - batch.rows)
