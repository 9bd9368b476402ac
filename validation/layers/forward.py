"""The forwards of a validation, and the record of a layer in one of them: every op with its inputs and its result."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from haarkv.engine.generation import PREFILL_CHUNK
from haarkv.models.base import DecoderModel
from haarkv.models.weights import TensorNames, Weights
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import LayerView, PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, WINDOW_CHUNK, blocks_for
from haarkv.tq_ops.table import OP_NAMES, OpTable, arguments, with_ops
from haarkv.validation.layers.parts import Snapshot, new_cache
from haarkv.validation.layers.report import Verdict


# -- Ops ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Call:
    """One recorded op; `stage` names this use of it. A cache in `args` is the live one, which has changed since."""

    op: str
    stage: str
    args: tuple[Any, ...]
    result: Any


class Recorder:
    """An op table that records its calls. A weight names its op's stage, whatever the order of the calls."""

    def __init__(self, ops: OpTable, weights: Weights) -> None:
        self._calls: list[Call] = []
        ends = [("final_norm", weights.final_norm), ("head", weights.lm_head)]
        # All experts of a layer are one stage: `experts.3.up_proj` is `experts.up_proj`.
        layer_names = [
            (re.sub(r"\.\d+\.", ".", field), tensor) for layer in weights.layers for field, _, tensor in layer.named_tensors()
        ]
        self._stages = TensorNames([*ends, *layer_names])
        self.ops = with_ops(ops, {name: self._recording_op(name, getattr(ops, name)) for name in OP_NAMES})

    def _recording_op(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = op(*args, **kwargs)
            args_by_name = arguments(name, *args, **kwargs)
            stage = self._stages.name_of(args_by_name["weight"]) if "weight" in args_by_name else None
            self._calls.append(Call(name, stage or name, tuple(args_by_name.values()), result))
            return result

        return run

    def take_calls(self) -> list[Call]:
        """The calls since the last time."""
        calls, self._calls = self._calls, []
        keys = [call.args[0] for call in calls if call.op == "store_kv"]

        delta = next((place for place, call in enumerate(calls) if call.op == "gated_delta"), len(calls))
        gate = next((call for call in calls[delta:] if call.op == "silu_mul"), None)

        def call_stage(call: Call) -> str:
            if call is gate:  # of what the state gave; the MLP's comes later
                return "delta_gate"
            # RoPE is given no weight: its result is stored as K, or it is Q's.
            is_k = any(call.result is k for k in keys)
            return call.stage if call.op != "rope" else "k_rope" if is_k else "q_rope"

        return [replace(call, stage=call_stage(call)) for call in calls]

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the model's weights."""
        return self._stages.name_of(tensor) is not None


def observe_vectors(
    ops: OpTable, on_kv: Callable[[Tensor, Tensor], object], on_q: Callable[[Tensor], object] = lambda _: None
) -> OpTable:
    """An op table that reports K and V [T, Hkv, D] as stored, and queries [T, Hq, D] as they attend."""

    def store_kv(k: Tensor, v: Tensor, at: LayerView) -> None:
        on_kv(k, v)
        ops.store_kv(k, v, at)

    def paged_attention(q: Tensor, at: LayerView, softmax_scale: float) -> Tensor:
        on_q(q)
        return ops.paged_attention(q, at, softmax_scale)

    return with_ops(ops, {"store_kv": store_kv, "paged_attention": paged_attention})


def copy_argument(value: Any, device: torch.device) -> Any:
    """A copy of a tensor or batch, so that the candidate can neither change ours nor return it."""
    if isinstance(value, LayerView):
        return replace(value, batch=copy_argument(value.batch, device))
    if isinstance(value, Batch):
        return Batch(**{name: tensor.to(device, copy=True) for name, tensor in value.tensors.items()})
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def replay(call: Call, ops: OpTable, cache: PagedKVCache, recorder: Recorder) -> tuple[Any, bool]:
    """Run a recorded call with another table, on copies of its inputs on the device of `cache`, in place of the recorded one.

    Returns:
        the result on the host (a message if the inputs were refused as not finite), and whether the inputs are unchanged.
    """
    arg_copies, device = list[Any](), cache.device
    for arg in call.args:
        if isinstance(arg, LayerView):
            arg_copies.append(replace(copy_argument(arg, device), cache=cache))
        elif isinstance(arg, Tensor) and recorder.is_weight(arg):
            arg_copies.append(arg.to(device))
        else:
            arg_copies.append(copy_argument(arg, device))
    try:
        result = getattr(ops, call.op)(*arg_copies)
    except NonFiniteError as error:
        result = str(error)
    if isinstance(result, Tensor):
        result = result.to("cpu", copy=True)
    return result, all(is_unchanged(ours, theirs) for ours, theirs in zip(call.args, arg_copies, strict=True))


def is_unchanged(ours: Any, theirs: Any) -> bool:
    """Whether a copy still equals the original."""
    if isinstance(ours, LayerView):
        return is_unchanged(ours.batch, theirs.batch)
    if isinstance(ours, Batch):
        return all(is_unchanged(tensor, getattr(theirs, name)) for name, tensor in ours.tensors.items())
    return not isinstance(ours, Tensor) or torch.equal(ours, theirs.cpu())


# -- Layers and forwards ------------------------------------------------------------------------------------------------
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


_DRAFT_TOKENS = 2
"""Tokens taken back after the first sequence's verify; of the second sequence one, of the third none, then two again."""


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
        draft_tokens = [prompt[: _DRAFT_TOKENS - row % (1 + _DRAFT_TOKENS)] for row, prompt in enumerate(self.prompts)]
        ids = [token for first, drafts in zip(tokens.tolist(), draft_tokens, strict=True) for token in (first, *drafts)]
        batch = self.batch(paging, list(range(len(draft_tokens))), [1 + len(drafts) for drafts in draft_tokens])
        return Forward("verify", 0, torch.tensor(ids), batch)

    def batch(self, paging: PagedSequences, sequences: list[int], counts: list[int]) -> Batch:
        """The next tokens. Rows are in reverse: a row is not the sequence's number."""
        batch = paging.batch(sequences, counts)
        return replace(batch, rows=self.num_blocks - 1 - batch.rows)
