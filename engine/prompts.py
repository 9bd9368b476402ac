"""What a prompt becomes: token ids, and the context that the cache must hold for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from haarkv.models.text import Tokenizer
from haarkv.tq_ops.errors import InputError


def encode(
    tokenizer: Tokenizer,
    vocab_size: int,
    prompts: Sequence[str | Sequence[int]],
    chat: bool | None = None,
    system: str | None = None,
) -> list[list[int]]:
    """Token ids of prompts; one that is token ids already stays as it is.

    Args:
        chat: wrap each in the chat template; None does so if the tokenizer has one.
        system: the system message of the chat template.
    Raises:
        InputError: an empty prompt, text that is not valid Unicode, or a chat or system message without a template.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise InputError(f"prompt {number} is empty; give at least one character")
        if isinstance(prompt, str):
            _require_unicode(prompt, f"prompt {number}")
        elif not all(0 <= token < vocab_size for token in prompt):
            raise InputError(f"prompt {number} has a token that is none of this model's {vocab_size:,}")
    wrap = tokenizer.has_chat_template if chat is None else chat
    if system is not None and not wrap:
        why = "--no-chat leaves it out" if tokenizer.has_chat_template else "this model has none"
        raise InputError(f"a system message needs a chat template, and {why}; drop --system")
    _require_unicode(system or "", "the system message")
    encoded = iter(tokenizer.encode_chat(texts, system) if wrap and texts else map(tokenizer.encode, texts))
    return [next(encoded) if isinstance(prompt, str) else list(prompt) for prompt in prompts]


def context_for(
    ids: Sequence[Sequence[int]],
    limit: int,
    max_new_tokens: int,
    wanted: int | None = None,
    on_warning: Callable[[str], object] | None = None,
) -> int:
    """Tokens that the cache must hold for each prompt.

    Args:
        limit: of the model's positions.
        wanted: so many are asked for; by default as many as are needed, up to the limit.
        on_warning: called with a sentence if that cuts a text short.
    Raises:
        InputError: a prompt that does not fit, or more tokens asked for than the model has positions.
    """
    longest = max(map(len, ids), default=0)
    if wanted is not None and not 1 <= wanted <= limit:
        raise InputError(f"this model has a context of {limit} tokens; --max-context must lie in 1 … {limit}")
    if longest > limit:
        raise InputError(f"the longest prompt has {longest} tokens, this model's context only {limit}; shorten it")
    context = wanted or min(limit, longest + max_new_tokens)
    # The last token is predicted and never stored.
    if on_warning and longest <= context < longest + max_new_tokens - 1:
        on_warning(_cut_short(longest, max_new_tokens, context, limit))
    return context


def _require_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} is not valid UTF-8; convert it first") from None


def _cut_short(prompt: int, wanted: int, context: int, limit: int) -> str:
    room = context - prompt + 1
    remedy = "shorten the prompt" if context == limit else "raise --max-context"
    tokens = f"{room} of {wanted} new token{'s' * (wanted != 1)}"
    return f"the context ends after {tokens}: the prompt has {prompt} tokens, the context {context}; {remedy}"
