"""A loaded model ready to generate: executor, tokenizer and the KV format to store in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from haarkv.engine.generation import Completion, Timing, generate
from haarkv.engine.sampling import Sampling
from haarkv.executors.base import Executor
from haarkv.executors.catalog import create, default_dtype
from haarkv.models.base import DecoderConfig
from haarkv.models.catalog import load_model
from haarkv.models.checkpoint import Progress
from haarkv.models.text import Tokenizer, load_tokenizer
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache, blocks_for
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec, ModelShape


@dataclass(frozen=True)
class KVUsage:
    """What the KV cache of a run cost.

    Attributes:
        format: the KV plan in words; of a plain one as `--kv` takes it.
        bytes_per_token: of one more token: K and V of all layers and heads, scales included, tokens in BF16 not.
        bytes: really allocated, all included.
        bf16_bytes: the same slots in bf16.
    """

    format: str
    bytes_per_token: float
    bytes: int
    bf16_bytes: int


@dataclass(frozen=True)
class Result:
    """Texts and cost of one `Session.generate`."""

    texts: list[str]
    completions: list[Completion]
    timing: Timing
    kv: KVUsage


@dataclass(frozen=True)
class Session:
    """What `tq.load` returns."""

    name: str
    config: DecoderConfig
    executor: Executor
    tokenizer: Tokenizer
    plan: KVPlan

    def new_cache(self, sequences: int, max_context: int) -> tuple[PagedKVCache, PagedSequences]:
        """An empty paged cache for so many sequences of so many tokens, and its bookkeeping."""
        cache = PagedKVCache(
            self.plan,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            num_blocks=sequences * blocks_for(max_context),
            num_rows=sequences,
            device=self.executor.device,
        )
        return cache, PagedSequences(cache.num_blocks, cache.block_size, num_rows=sequences)

    def encode(self, prompts: Sequence[str], *, chat: bool | None = None) -> list[list[int]]:
        """Token ids of prompts.

        Args:
            chat: wrap each in the chat template; None does so if the tokenizer has one.
        Raises:
            InputError: an empty prompt, text that is not valid Unicode, or chat without a template.
        """
        for number, prompt in enumerate(prompts, 1):
            if not prompt:
                raise InputError(f"prompt {number} is empty; give at least one character")
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise InputError(f"prompt {number} is not valid UTF-8; convert it first") from None
        wrap = self.tokenizer.has_chat_template if chat is None else chat
        return [self.tokenizer.encode_chat(p) if wrap else self.tokenizer.encode(p) for p in prompts]

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 64,
        max_context: int | None = None,
        sampling: Sampling | None = None,
        chat: bool | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> Result:
        """Continue prompts, all in one ragged batch.

        Args:
            max_context: tokens of prompt and text that the cache can hold for each prompt; as much as is needed, at most
                the model's own limit, unless given.
            sampling: greedy unless given.
            on_token: called with (index of the prompt, token) as tokens come.
        Raises:
            InputError: a prompt that is empty or does not fit, or a context beyond the model's.
        """
        ids = self.encode(prompts, chat=chat)
        longest = max((len(i) for i in ids), default=0)
        limit = self.config.max_position_embeddings
        if max_context is not None and not 1 <= max_context <= limit:
            raise InputError(f"this model has a context of {limit} tokens; --max-context must lie in 1 … {limit}")
        context = max_context or min(limit, longest + max_new_tokens)
        if longest > limit:
            raise InputError(f"the longest prompt has {longest} tokens, this model's context only {limit}; shorten it")
        cache, paging = self.new_cache(len(prompts), context)
        completions, timing = generate(
            self.executor, cache, paging, ids,
            max_new_tokens=max_new_tokens, max_context=context, eos_token_ids=self.tokenizer.eos_token_ids,
            sampling=sampling, on_token=on_token,
        )  # fmt: skip
        texts = [self.tokenizer.decode(completion.token_ids) for completion in completions]
        return Result(texts, completions, timing, self._usage(cache))

    def _usage(self, cache: PagedKVCache) -> KVUsage:
        shape = (self.config.num_kv_heads, self.config.head_dim)
        bf16 = KVSpec("bf16").plan(self.config.num_layers)
        return KVUsage(
            format=self.plan.describe(),
            bytes_per_token=self.plan.bytes_per_token(*shape),
            bytes=cache.nbytes,
            bf16_bytes=round(cache.num_slots * bf16.bytes_per_token(*shape)),
        )


def shape_of(config: DecoderConfig) -> ModelShape:
    """What a plan file says of the model that it was made for."""
    return ModelShape(config.num_layers, config.num_kv_heads, config.head_dim, config.hidden_size, config.vocab_size)


def plan_for(spec: KVSpec, config: DecoderConfig) -> KVPlan:
    """The KV plan of a model that was asked for.

    Raises:
        InputError: it does not fit the model.
    """
    plan = spec.plan(config.num_layers, shape_of(config))
    plan.require_layout(config.head_dim)
    return plan


def load(
    model: str = "tiny",
    *,
    kv: str | KVSpec = "tq4",
    executor: str = "reference",
    device: str | None = None,
    dtype: str | None = None,
    layers: int | None = None,
    progress: Progress | None = None,
) -> Session:
    """Load a model and everything around it.

    Args:
        model: `tiny`, a folder in Hugging Face format, or `random:SIZE`.
        kv: a KV format, `k=NAME,v=NAME`, or more than that in a `KVSpec`.
        executor: who runs the forwards.
        device: where the executor runs, its default unless given; for `npu`: sim or npu:N; for `onnx`: cpu, cuda or cann.
        dtype: float32 or bfloat16; the executor's default unless given (npu and cuda: bfloat16, all others: float32).
        layers: for `random:SIZE`, how many layers to build.
        progress: called with (tensors done, tensors in all).
    Raises:
        InputError: whatever of this does not exist or does not fit together.
    """
    spec = KVSpec(kv) if isinstance(kv, str) else kv
    formats.parse(spec.kv)  # a slip is told before the model is loaded
    loaded = load_model(model, dtype or default_dtype(executor), layers, progress)
    plan = plan_for(spec, loaded.config)
    return Session(
        name=model,
        config=loaded.config,
        executor=create(executor, loaded, plan, device),
        tokenizer=load_tokenizer(model, loaded.config),
        plan=plan,
    )
