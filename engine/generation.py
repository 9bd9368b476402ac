"""Generate text with any executor: prefill a ragged batch in chunks, then decode until every sequence has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from haarkv.engine.drafts import DraftRun, DraftSource, Pace, Speculation
from haarkv.engine.sampling import BatchSampler, Sampling
from haarkv.executors.base import Executor, prefill, verify
from haarkv.tq_ops.kv.batch import PagedSequences, upload
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import WINDOW_CHUNK, WINDOW_ROOM
from haarkv.tq_ops.kv.stored import StoredSequence, put, reusable, take
from haarkv.tq_ops.memory import hand_back

PREFILL_CHUNK = 512
Finish = Literal["eos", "stop", "length", "context"]
OnPrefill = Callable[[int, int], None]
"""Called with (prompt tokens stored, prompt tokens): before the first chunk, and after each."""


@dataclass
class Completion:
    """The new tokens after one prompt.

    Attributes:
        reused_tokens: number of prompt tokens copied from a stored sequence.
        token_ids: new tokens, without the end-of-text token.
        finish: "eos", "stop" (a stop string, or `on_token`), "length" (max_new_tokens) or "context" (the cache is full).
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    reused_tokens: int = 0


@dataclass
class Timing:
    """Wall time of one call of `generate`.

    Attributes:
        prefill_s: seconds from the start to the first sampled tokens.
        decode_s: seconds of all decode steps, drafting included.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    drafts: Pace | None = None

    @property
    def decode_ms_per_token(self) -> float | None:
        """Mean ms of a decode step."""
        return 1e3 * self.decode_s / self.decode_steps if self.decode_steps else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """New tokens a second, all sequences together."""
        return self.decode_tokens / self.decode_s if self.decode_s else None


def tail_chunk(executor: Executor, plan: KVPlan) -> int:
    """The most new tokens of a sequence in one forward over a cache with a tail: `PREFILL_CHUNK` if logits do not depend on
    how a prompt is cut, else `WINDOW_CHUNK`.
    """
    return PREFILL_CHUNK if executor.batch_invariant(plan) else WINDOW_CHUNK


def prefill_in_chunks(
    executor: Executor, prompts: Sequence[Sequence[int]], sequences: Sequence[int], paging: PagedSequences,
    cache: PagedKVCache, chunk: int = PREFILL_CHUNK, on_prefill: OnPrefill | None = None, last: int = 0,
) -> Tensor:  # fmt: skip
    """Prefill prompts of different lengths together, in chunks of up to `chunk` tokens of each, or fewer if the cache asks.

    Args:
        last: the last `last` tokens of each prompt form a separate chunk.
    Returns:
        [B, vocab] fp32, the logits after each prompt's last token.
    """
    logits: dict[int, Tensor] = {}
    chunk = min(chunk, cache.most_new_tokens or chunk)
    done, total = 0, sum(map(len, prompts))
    if on_prefill:
        on_prefill(done, total)
    cuts = [_cut(prompt, chunk, min(last, chunk)) for prompt in prompts]
    for step in range(steps := max(map(len, cuts))):
        rows = [row for row, cut in enumerate(cuts) if step < len(cut)]
        pieces = [cuts[row][step] for row in rows]
        batch = paging.batch([sequences[row] for row in rows], [len(piece) for piece in pieces]).to(cache.device)
        token_ids = torch.tensor([t for piece in pieces for t in piece], device=cache.device)
        logits.update(zip(rows, prefill(executor, token_ids, batch, cache), strict=True))
        done += len(token_ids)
        if step + 1 < steps and cache.device.type == "cpu":
            hand_back()  # gives free memory back to the system; else gaps in the heap add up from chunk to chunk
        if on_prefill:
            on_prefill(done, total)
    return torch.stack([logits[row] for row in range(len(prompts))])


def _cut(prompt: Sequence[int], chunk: int, last: int) -> list[Sequence[int]]:
    begin = max(len(prompt) - last, 0)
    begins = sorted({*range(0, begin, chunk), begin} - {len(prompt)})
    return [prompt[begin:end] for begin, end in pairwise([*begins, len(prompt)])]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Arguments of one batch of `generate`.

    Attributes:
        prompts: token ids, at least one for each prompt, and at most `max_context`.
        max_new_tokens: at least 1.
        max_context: the most tokens of prompt and text together.
        unused_ids: vocabulary rows that are no tokens; never drawn.
        stored: for each prompt a stored sequence, or None; their common prefix is copied, not computed.
        on_token: called with (prompt index, token) for each new token except the end of text; True ends the sequence.
        on_end: called with (prompt index, stored sequence) for each prompt at the end.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    max_context: int
    eos_token_ids: Sequence[int] = ()
    unused_ids: Sequence[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stored: Sequence[StoredSequence | None] = ()
    draft: DraftSource | None = None
    draft_tokens: int = 4
    on_prefill: OnPrefill | None = None
    on_token: Callable[[int, int], bool | None] | None = None
    on_end: Callable[[int, StoredSequence], object] | None = None


def generate(
    executor: Executor,
    cache: PagedKVCache,
    paging: PagedSequences,
    request: GenerationRequest,
    prefiller: Executor | None = None,
) -> tuple[list[Completion], Timing]:
    """Continue prompts in one batch; a sequence leaves the batch when it ends.

    Args:
        prefiller: the same executor with a wrapped op table, for the prefill; `executor` unless given.
    """
    began, prompts, draft, on_end = time.perf_counter(), request.prompts, request.draft, request.on_end
    sequences: list[int] = []
    try:
        texts = []
        for prompt, prefix in zip(prompts, request.stored or [None] * len(prompts), strict=True):
            count = reusable(prefix, prompt, cache) if prefix else 0
            sequences.append(put(prefix, cache, paging, count) if prefix and count else paging.add())
            texts.append(Growing(Completion(len(prompt), reused_tokens=count), list(prompt), request))
        sampler, drafter = BatchSampler(request.sampling, prompts, unused_ids=request.unused_ids), None
        if draft and request.max_new_tokens > 1:
            drafter = draft.drafter(
                DraftRun(prompts, request.max_context, executor.config.vocab_size, sampler, paging, sequences)
            )
            executor = drafter.observe(executor)
            prefiller = drafter.observe(prefiller) if prefiller else None
        rest = [prompt[text.done.reused_tokens :] for prompt, text in zip(prompts, texts, strict=True)]
        timing = Timing(prefill_tokens=sum(map(len, rest)))
        # A later prompt may differ in the last tokens, which the chat template adds: keep the recurrent state before them.
        last = WINDOW_ROOM - 1 if on_end and len(cache.states) > len(cache.kv) else 0
        on_prefill = request.on_prefill
        logits = prefill_in_chunks(prefiller or executor, rest, sequences, paging, cache, on_prefill=on_prefill, last=last)
        begins = [take(cache, paging, *pair, whole=False) for pair in zip(sequences, prompts, strict=True)] if on_end else []
        speculation = None
        if draft and drafter:
            drafter.begin()
            speculation = Speculation(executor, cache, paging, sampler, drafter, request.draft_tokens, draft.experience)
            timing.drafts = speculation.pace
        running = list(range(len(prompts)))
        next_ids = sampler.next(logits, running)
        # Here the host waits for the device, for one id a sequence.
        came = [[token] for token in next_ids.tolist()]
        while True:
            counts = [texts[i].take(new, i) for i, new in zip(running, came, strict=True)]
            if speculation:
                speculation.keep(counts)
            _note(timing, time.perf_counter() - began, sum(counts))
            before, running = running, [index for index in running if texts[index].done.finish is None]
            if not running:
                for index, text in enumerate(texts if on_end else ()):
                    whole = take(cache, paging, sequences[index], text.token_ids, earlier=begins[index])
                    on_end(index, whole)  # type: ignore[misc]
                return [text.done for text in texts], timing
            if speculation:
                ids = [sequences[i] for i in running]
                came = speculation.next(
                    running, ids, {i: texts[i].token_ids for i in running}, {i: texts[i].room for i in running}
                )
                continue
            batch = paging.batch([sequences[i] for i in running], [1] * len(running)).to(cache.device)
            if len(running) < len(before):
                next_ids = torch.tensor([texts[i].token_ids[-1] for i in running])
            next_ids = sampler.next(verify(executor, upload(next_ids, cache.device), batch, cache), running)
            came = [[token] for token in next_ids.tolist()]
    finally:
        for sequence in sequences:
            paging.free(sequence)


@dataclass
class Growing:
    """One sequence during generation."""

    done: Completion
    token_ids: list[int]
    request: GenerationRequest

    @property
    def room(self) -> int:
        """The number of tokens after the next one that may still be generated and stored."""
        return min(self.request.max_new_tokens - len(self.done.token_ids) - 1, self.request.max_context - len(self.token_ids))

    def take(self, tokens: Sequence[int], index: int) -> int:
        """Append new tokens until the sequence ends. Returns how many tokens that the last step stored belong to the sequence
        (it stored the token before these, and all of these except the last).
        """
        done, request = self.done, self.request
        for count, token in enumerate(tokens, 1):
            if token in request.eos_token_ids:
                done.finish = "eos"
                return count
            done.token_ids.append(token)
            self.token_ids.append(token)
            if request.on_token and request.on_token(index, token) is True:
                done.finish = "stop"
            elif len(done.token_ids) == request.max_new_tokens:
                done.finish = "length"
            elif len(self.token_ids) > request.max_context:
                done.finish = "context"
            if done.finish:
                return count
        return len(tokens)


def _note(timing: Timing, elapsed_s: float, tokens: int) -> None:
    if not timing.prefill_s:
        timing.prefill_s = elapsed_s
        return
    timing.decode_s, timing.decode_steps = elapsed_s - timing.prefill_s, timing.decode_steps + 1
    timing.decode_tokens += tokens
