"""A loaded model, ready to generate; `engine.loading.load` makes one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Unpack

from haarkv.engine.collapse import Guard
from haarkv.engine.drafts import DraftSource
from haarkv.engine.generation import GenerationRequest, OnPrefill, generate, tail_chunk
from haarkv.engine.plans import shape_signature
from haarkv.engine.ranks import memory_here
from haarkv.engine.result import KVUsage, Result, Stream, draft_report
from haarkv.engine.sampling import Sampling, SamplingSettings, require_drawn
from haarkv.engine.text import Chat, Texts, context_for, encode, stop_list
from haarkv.executors.base import Executor
from haarkv.models.base import new_cache
from haarkv.models.catalog import model_files
from haarkv.models.config import ModelConfig
from haarkv.models.parallel import SINGLE_RANK, Ranks
from haarkv.models.text import Tokenizer
from haarkv.models.weights import WeightBytes
from haarkv.tq_ops.errors import InputError, count_noun, warn
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, cache_bytes
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.kv.stored import StoredSequence
from haarkv.tq_ops.memory import require_memory


@dataclass(frozen=True)
class LoadRecord:
    """Weights as counted before they were read, and seconds until the model was ready."""

    weights: WeightBytes
    seconds: float


@dataclass(frozen=True, repr=False)
class Session:
    """A loaded model, ready to generate; `tq.load` returns one.

    Threads may share a session: they generate one after the other. A process forked after loading cannot use it, because
    compute threads do not survive a fork.

    Attributes:
        generation: sampling settings of the model's `generation_config.json`; empty for greedy decoding.
        passed_over: name of a faster executor and why `auto` did not take it; "" if there is none.
        ranks: processes that run the model together. `config`, `executor` and caches are then this rank's part; all ranks must
            make the same calls, and each gets the whole result.
        guard: tells whether text from this cache would be garbage; None if nothing has to be checked.
        weights: fingerprint of the loaded weights; stored sequences hold it.
        draft_tokens: the most drafted tokens in one step.
    """

    name: str
    config: ModelConfig
    executor: Executor
    tokenizer: Tokenizer
    plan: KVPlan
    generation: Mapping[str, Any] = field(default_factory=dict)
    passed_over: str = ""
    ranks: Ranks = SINGLE_RANK
    weight_bytes: int = 0
    load_record: LoadRecord | None = None
    guard: Guard | None = None
    weights: str = ""
    draft: DraftSource | None = None
    draft_tokens: int = 4
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)
    _process: int = field(default_factory=os.getpid, repr=False, compare=False)

    def __repr__(self) -> str:
        per_token = self.ranks.size * self.plan.bytes_per_token(self.config.kv_shapes)
        kv = f"{self.plan.summary()}: {per_token:,.0f} bytes of K and V a token"
        return f"Session({self.name!r} on {self.executor.name}, {kv})"

    def new_cache(self, sequences: int, max_context: int) -> tuple[PagedKVCache, PagedSequences]:
        """An empty paged cache for `sequences` of up to `max_context` tokens, and its bookkeeping.

        Raises:
            InputError: this machine has too little memory, or the learned coordinates are valid for fewer tokens.
        """
        self.plan.require_context(max_context)
        self._require_room(sequences, max_context)
        return new_cache(
            self.config, self.plan, sequences=sequences, tokens=max_context, device=self.executor.device,
            chunk=tail_chunk(self.executor, self.plan),
        )  # fmt: skip

    def encode(
        self, prompts: Sequence[str | Sequence[int]], *, chat: bool | None = None, system: str | None = None,
        template_args: Mapping[str, Any] | None = None, parse_special: bool = False,
    ) -> list[list[int]]:  # fmt: skip
        """Token ids of prompts; see `engine.text.encode` and `engine.text.Chat`."""
        options = Chat(chat, system, template_args, parse_special)
        return encode(self.tokenizer, self.config.vocab_size, prompts, options)

    def sampling_with(self, **settings: Any) -> Sampling:
        """The model's sampling settings with some replaced; None keeps a setting.

        Raises:
            InputError: a value is out of range, or a filter was given but decoding is greedy.
            TypeError: an unknown setting.
        """
        overrides = {name: value for name, value in settings.items() if value is not None}
        require_drawn(self.generation, overrides)
        return Sampling(**{**self.generation, **overrides})

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        *,
        stored: StoredSequence | None = None,
        keep: bool = False,
        max_new_tokens: int = 64,
        max_context: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        chat: bool | None = None,
        system: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        parse_special: bool = False,
        on_prefill: OnPrefill | None = None,
        on_token: Callable[[int, int], object] | None = None,
        on_text: Callable[[int, str], object] | None = None,
        on_warning: Callable[[str], object] | None = None,
        **settings: Unpack[SamplingSettings],
    ) -> Result:
        """Continue one prompt, or several prompts in one ragged batch.

            session.generate("import os", max_new_tokens=100, temperature=0.7, top_p=0.9)

        Args:
            prompts: a text, or a list of texts and lists of token ids.
            stored: a sequence from an earlier `generate` with `keep`, or from `load_cache`. Tokens that a prompt has in common
                with its beginning are copied, not computed. Without a prompt, the stored sequence itself is continued.
            keep: also return each sequence with its K and V (`Result.stored`).
            max_context: tokens of prompt and text that the cache holds for each prompt; by default as many as needed, up to
                the model's limit.
            sampling: all sampling settings, in place of the model's; `settings` replace single ones.
            stop: a text ends before the first of these strings.
            chat, system, template_args, parse_special: as in `encode`.
            on_prefill: called with (prompt tokens stored, prompt tokens) before the prefill and during it.
            on_token: called with (prompt index, token); True ends that text, as a stop string does.
            on_text: called with (prompt index, piece of text) when no later token can change it; pieces add up to the text.
            on_warning: called if the context will cut a text short, or the cache loses too much; Python warnings unless given.
        Raises:
            InputError: no prompt, an invalid or too long one; a context longer than the model's; invalid sampling; a process
                forked after loading; or text from this cache would be garbage (see `load`).
            TypeError: an unknown setting.
        """
        if sampling is not None and settings:
            raise InputError(f"sampling says all of how tokens are drawn; leave out {next(iter(settings))}")
        sampling = sampling or self.sampling_with(**settings)
        if os.getpid() != self._process:
            raise InputError("this process was forked after the model was loaded; load it here, or spawn processes")
        try:
            several: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        except TypeError:
            raise InputError(f"a prompt is a text or a list of token ids, not {shown(prompts)}") from None
        ids = self._begins(several, stored, keep, Chat(chat, system, template_args, parse_special))
        context = context_for(ids, self.config.max_position_embeddings, max_new_tokens, max_context, on_warning)
        texts = Texts(self.tokenizer, len(ids), stop_list(stop), on_token, on_text)
        cache, paging = self.new_cache(len(ids), context)
        watcher, report = self._watched_prefill(ids, on_prefill, on_warning or warn)
        sequences: list[StoredSequence] = []
        request = GenerationRequest(
            prompts=ids, max_new_tokens=max_new_tokens, max_context=context, eos_token_ids=self.tokenizer.eos_token_ids,
            unused_ids=self.tokenizer.unused_ids, sampling=sampling, stored=[stored] * len(ids), draft=self.draft,
            draft_tokens=self.draft_tokens, on_prefill=report, on_token=texts.push,
            on_end=(lambda _, sequence: sequences.append(sequence)) if keep else None,
        )  # fmt: skip
        with self._lock:
            completions, timing = generate(self.executor, cache, paging, request, watcher)
        final_texts = texts.finish()
        memory = memory_here(self.ranks, self.executor.device, self.weight_bytes, cache.nbytes, model_files(self.name))
        ranks, drafting = tuple(self.ranks.collect(memory)), None
        if self.draft:
            drafting = draft_report(self.draft, self.draft_tokens, timing, self.executor, self.plan, len(ids), context)
        usage = self._usage(cache, len(ids), context)
        return Result(final_texts, completions, timing, usage, sampling, ranks, tuple(sequences), drafting)

    def _begins(
        self, prompts: list[str | Sequence[int]], stored: StoredSequence | None, keep: bool, chat: Chat
    ) -> list[list[int]]:
        if not prompts and stored is None:
            raise InputError("no prompt was given")
        if keep or stored is not None:
            origin = self._origin()
            if stored is not None:
                origin.require_fits(stored, self.plan, "the stored sequence")
        if prompts or stored is None:
            return encode(self.tokenizer, self.config.vocab_size, prompts, chat)
        chat.require_nothing_said()
        return [list(stored.token_ids)]

    def _watched_prefill(
        self, ids: Sequence[Sequence[int]], on_prefill: OnPrefill | None, on_warning: Callable[[str], object]
    ) -> tuple[Executor | None, OnPrefill]:
        """The executor for a prefill that the guard observes, None if it need not; and the callback to report progress."""
        guard = self.guard
        watcher = self.executor.with_ops(guard.table) if guard and guard.watches(ids) else None

        def report(done: int, total: int) -> None:
            if guard and watcher and done:
                guard.after_prefill(on_warning)
            if on_prefill:
                on_prefill(done, total)

        return watcher, report

    def stream(self, prompt: str | Sequence[int], *, on_prefill: OnPrefill | None = None, **options: Any) -> Stream:
        """Continue one prompt, and yield pieces of text as soon as no later token can change them.

            for piece in session.stream("import os", max_new_tokens=100):
                print(piece, end="", flush=True)

        Takes the arguments of `generate` except `on_token` and `on_text`; `on_prefill` is called in another thread. The
        stream's `result` is that of `generate`. Exceptions of `generate` are raised at the first piece.
        """
        return Stream(lambda **callbacks: self.generate([prompt], **options, **callbacks), on_prefill)

    def save_cache(self, path: str | Path, stored: StoredSequence, note: str = "", compress: bool = True) -> None:
        """Write a stored sequence to a file, whole or not at all.

        Args:
            note: a text that the file carries; `cache_file.read_note` reads it.
            compress: compress losslessly where that saves bytes.
        Raises:
            InputError: the sequence belongs to another model or cache, or the file cannot be written.
        """
        origin = self._origin()
        origin.require_fits(stored, self.plan, "the stored sequence")
        cache_file.save(Path(path), stored, origin, note, compress)

    def load_cache(self, path: str | Path) -> StoredSequence:
        """Read a sequence that this model stored in this cache.

        Raises:
            InputError: the file is damaged, or belongs to another model, cache, rotation or version.
        """
        sequence = cache_file.load_for(Path(path), self._origin(), self.plan)
        self.plan.require_context(len(sequence.token_ids))
        return sequence

    def _origin(self) -> cache_file.Origin:
        if self.ranks.size > 1:
            raise InputError("stored sequences are of one process; leave out --tensor-parallel")
        producer = f"{self.executor.name} {str(self.executor.weights.embedding.dtype).removeprefix('torch.')}"
        return cache_file.sequence_origin(self.plan, shape_signature(self.config), self.weights, producer)

    def _require_room(self, sequences: int, max_context: int) -> None:
        if self.executor.device.type != "cpu":
            return
        what = f"a KV cache for {count_noun(sequences, 'sequence')} of {count_noun(max_context, 'token')}"
        drafts = self.draft.cache_bytes(sequences, max_context) if self.draft else 0
        nbytes = cache_bytes(self.plan, max_context, self.config.kv_shapes, sequences, self.config.state_bytes) + drafts
        require_memory(nbytes, what, "take fewer tokens or sequences, or a smaller format")

    def _usage(self, cache: PagedKVCache, sequences: int, max_context: int) -> KVUsage:
        config, ranks = self.config, self.ranks.size
        bf16 = cache_bytes(
            KVSpec("bf16").plan(config.num_layers), max_context, config.kv_shapes, sequences, config.state_bytes
        )
        per_token = self.plan.bytes_per_token(config.kv_shapes)
        return KVUsage(self.plan.summary(), ranks * per_token, ranks * cache.nbytes, ranks * bf16)
