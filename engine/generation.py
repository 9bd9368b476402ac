"""Generate with any executor: prefill a ragged batch in chunks, then decode until every sequence has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from haarkv.engine.sampling import BatchSampler, Sampling
from haarkv.executors.base import Executor
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences, uploaded
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.stored import StoredSequence, put, reusable, take

PREFILL_CHUNK = 512
Finish = Literal["eos", "stop", "length", "context"]
OnPrefill = Callable[[int, int], None]
"""Called with (prompt tokens stored, prompt tokens in all): before the first chunk, and after each."""


@dataclass
class Completion:
    """What was generated after one prompt.

    Attributes:
        prompt_tokens: tokens of the prompt.
        reused_tokens: of them, those that were stored already and not computed again.
        token_ids: new tokens, without the end-of-text token.
        finish: "eos", "stop" (a stop text came), "length" (max_new_tokens) or "context" (the cache holds no more).
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    reused_tokens: int = 0


@dataclass
class Timing:
    """Wall time of one `generate`.

    Attributes:
        prefill_s: all prompts, up to and with the first sampled tokens.
        decode_s: all decode steps.
        decode_steps: forwards of one token a sequence.
        prefill_tokens: tokens of all prompts that were computed.
        decode_tokens: tokens that the decode steps gave, of all sequences.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0

    @property
    def decode_ms_per_token(self) -> float | None:
        """Mean latency of a decode step in ms, None without one."""
        return 1e3 * self.decode_s / self.decode_steps if self.decode_steps else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens a second, None if nothing was measured."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """New tokens a second, of all sequences together; None without a decode step."""
        return self.decode_tokens / self.decode_s if self.decode_s else None


def prefill_in_chunks(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    sequences: Sequence[int],
    paging: PagedSequences,
    cache: PagedKVCache,
    chunk: int = PREFILL_CHUNK,
    on_prefill: OnPrefill | None = None,
) -> Tensor:
    """Prefill prompts of different lengths together, at most `chunk` tokens of each at a time, or what the cache takes.

    Returns:
        [B, vocab] fp32, the logits after each prompt's last token.
    """
    last: dict[int, Tensor] = {}
    chunk = min(chunk, cache.most_new_tokens or chunk)
    done, total = 0, sum(map(len, prompts))
    if on_prefill:
        on_prefill(done, total)
    for begin in range(0, max(map(len, prompts)), chunk):
        rows = [row for row, prompt in enumerate(prompts) if begin < len(prompt)]
        pieces = [prompts[row][begin : begin + chunk] for row in rows]
        batch = paging.batch([sequences[row] for row in rows], [len(piece) for piece in pieces]).to(cache.device)
        token_ids = torch.tensor([t for piece in pieces for t in piece], device=cache.device)
        last.update(zip(rows, executor.prefill(token_ids, batch, cache), strict=True))
        done += len(token_ids)
        if on_prefill:
            on_prefill(done, total)
    return torch.stack([last[row] for row in range(len(prompts))])


def generate(
    executor: Executor,
    cache: PagedKVCache,
    paging: PagedSequences,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_context: int,
    eos_token_ids: Sequence[int] = (),
    sampling: Sampling | None = None,
    chunk: int = PREFILL_CHUNK,
    on_prefill: OnPrefill | None = None,
    on_token: Callable[[int, int], bool | None] | None = None,
    prefiller: Executor | None = None,
    stored: Sequence[StoredSequence | None] = (),
    on_end: Callable[[int, StoredSequence], object] | None = None,
) -> tuple[list[Completion], Timing]:
    """Continue prompts, all in one batch; a sequence leaves the batch when it ends.

    Args:
        prompts: token ids, each at least one.
        max_new_tokens: at most so many for each prompt.
        max_context: at most so many tokens of prompt and text together.
        on_token: called with (index of the prompt, token) as tokens come; not for the end of text. True ends the sequence.
        prefiller: the same executor, looking on; it runs the prefill.
        stored: for each prompt, a sequence that may begin like it: what they share is copied, and not computed.
        on_end: called with (index of the prompt, the sequence as it is stored in the end), for each.
    Raises:
        InputError: an empty prompt or one longer than max_context; nothing was run.
    """
    _check_prompts(prompts, max_context, max_new_tokens)
    began, sequences = time.perf_counter(), []
    try:
        reused = []
        for prompt, known in zip(prompts, stored or [None] * len(prompts), strict=True):
            reused.append(reusable(known, prompt, cache.plan) if known else 0)
            sequences.append(put(known, cache, paging, reused[-1]) if known and reused[-1] else paging.add())
        completions = [Completion(len(prompt), reused_tokens=count) for prompt, count in zip(prompts, reused, strict=True)]
        sampler = BatchSampler(sampling or Sampling(), prompts)
        running = list(range(len(prompts)))
        rest = [prompt[count:] for prompt, count in zip(prompts, reused, strict=True)]
        timing = Timing(prefill_tokens=sum(map(len, rest)))
        logits = prefill_in_chunks(prefiller or executor, rest, sequences, paging, cache, chunk, on_prefill)
        while True:
            drawn, before = sampler.next(logits, running), running
            # Here the host waits for the device, for one id a sequence.
            for index, token in zip(running, drawn.tolist(), strict=True):
                done = completions[index]
                if token in eos_token_ids:
                    done.finish = "eos"
                    continue
                done.token_ids.append(token)
                if on_token and on_token(index, token) is True:
                    done.finish = "stop"
                elif len(done.token_ids) == max_new_tokens:
                    done.finish = "length"
                elif done.prompt_tokens + len(done.token_ids) > max_context:
                    done.finish = "context"
            now = time.perf_counter()
            if not timing.prefill_s:
                timing.prefill_s = now - began
            else:
                timing.decode_s, timing.decode_steps = now - began - timing.prefill_s, timing.decode_steps + 1
                timing.decode_tokens += len(running)
            running = [index for index in running if completions[index].finish is None]
            if not running:
                for index, done in enumerate(completions if on_end else ()):
                    whole = [*prompts[index], *done.token_ids]
                    on_end(index, take(cache, paging, sequences[index], whole))  # type: ignore[misc]
                return completions, timing
            batch = paging.batch([sequences[i] for i in running], [1] * len(running)).to(cache.device)
            if len(running) < len(before):
                drawn = torch.tensor([completions[i].token_ids[-1] for i in running])
            token_ids = uploaded(drawn, cache.device)
            logits = executor.decode(token_ids, batch, cache)
    finally:
        for sequence in sequences:
            paging.free(sequence)


def _check_prompts(prompts: Sequence[Sequence[int]], max_context: int, max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise InputError(f"prompt {number} is empty; give at least one token of text")
        if len(prompt) > max_context:
            raise InputError(f"prompt {number} has {len(prompt)} tokens, the cache holds {max_context}; raise --max-context")
    if not prompts:
        raise InputError("no prompt was given")
