"""Text that a model writes itself: drawn from its own distribution, token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from haarkv.engine.generation import generate
from haarkv.engine.sampling import Sampling
from haarkv.engine.session import Session
from haarkv.models.text import Tokenizer

SEQUENCES = 16
"""Written side by side: a step of so many costs little more than one of a single sequence."""


def write(session: Session, tokens: int, *, seed: int = 0, on_step: Callable[[str, int], None] = lambda *_: None) -> Tensor:
    """Token ids [n] int64 of several texts, one after the other, each from the model's start token.

    They do not stop where a text ends: what a model writes behind that is its own as well.

    Args:
        session: a model with a cache that loses nothing.
        tokens: how many at least, start tokens among them.
        seed: of the first text.
        on_step: told what has been done, and how many tokens it took.
    """
    length = max(1, min(-(-tokens // SEQUENCES) - 1, session.config.max_position_embeddings - 1))
    start, found = start_token(session.tokenizer), list[Tensor]()
    while sum(map(len, found)) < tokens:
        prompts = [[start]] * SEQUENCES
        cache, paging = session.new_cache(SEQUENCES, length + 1)

        def stepped(index: int, _token: int) -> None:
            if index == SEQUENCES - 1:
                on_step("a text of its own", SEQUENCES)

        texts, _ = generate(
            session.executor, cache, paging, prompts, max_new_tokens=length, max_context=length + 1,
            sampling=Sampling(temperature=1.0, seed=seed), on_token=stepped, unused_ids=session.tokenizer.unused_ids,
        )  # fmt: skip
        found += [torch.tensor([start, *text.token_ids]) for text in texts]
        seed += SEQUENCES
    return torch.cat(found)[:tokens]


def start_token(tokenizer: Tokenizer) -> int:
    """What a model's texts begin with: its BOS token, or the one that ends a text and so stands before the next."""
    begins = tokenizer.encode("")
    return begins[0] if begins else next(iter(tokenizer.eos_token_ids), 0)
