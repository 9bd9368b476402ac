"""Texts where the user gives none: Python's language reference, which every CPython brings, for `tq calibrate`, and
`samples.txt`, written for this, by which a model's cache is chosen.

What a model writes itself, from its start token at temperature 1, misleads: its next tokens are uncertain whatever the late
layers say. It serves `tq quantize` alone.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from haarkv.engine.generation import GenerationRequest, generate
from haarkv.engine.sampling import Sampling
from haarkv.engine.session import Session
from haarkv.models.text import Tokenizer


def common_text(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """The first token ids of the reference, longest chapters first; all if it has fewer."""
    chapters = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    token_ids: list[int] = []
    for chapter in chapters:
        token_ids += tokenizer.encode(chapter)
        if len(token_ids) >= tokens:
            break
    return token_ids[:tokens]


PIECES = 4
"""Of each sample."""


def samples(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """At most `tokens` ids of fourteen texts of seven kinds, told in turns: the first piece of each, then the second of each.

    So what a piece continues lies 250 tokens back and more, outside the newest tokens that caches store in BF16. (Told one
    after the other, short texts hardly need what is packed: a cache chosen by them lost five times as much on C.)
    A start token stands before the first alone: within a text it would be attended to by all that follows.
    """
    text = (Path(__file__).parent / "samples.txt").read_text(encoding="utf-8")
    start = tokenizer.encode("")
    contents = [tokenizer.encode(sample.partition("\n")[2])[len(start) :] for sample in text.split("==== ")[1:]]
    size = max(1, (tokens - len(start)) // (PIECES * len(contents)))
    pieces = (ids[at : at + size] for at in range(0, PIECES * size, size) for ids in contents)
    return list(chain(start, *pieces))[:tokens]


# -- What a model writes itself ------------------------------------------------------------------------------------------
SEQUENCES = 16
"""Written side by side: such a step costs little more than one of a single sequence."""


def write(session: Session, tokens: int, *, seed: int = 0, on_step: Callable[[str, int], None] = lambda *_: None) -> Tensor:
    """Token ids [n] int64 of several texts by the model, each from its start token; they do not stop where a text ends.

    Args:
        session: with a cache that loses nothing.
        tokens: the least number of tokens, start tokens included.
    """
    length = max(1, min(-(-tokens // SEQUENCES) - 1, session.config.max_position_embeddings - 1))
    start, pieces = start_token(session.tokenizer), list[Tensor]()
    while sum(map(len, pieces)) < tokens:
        prompts = [[start]] * SEQUENCES
        cache, paging = session.new_cache(SEQUENCES, length + 1)

        def report_step(index: int, _token: int) -> None:
            if index == SEQUENCES - 1:
                on_step("a text of its own", SEQUENCES)

        texts, _ = generate(
            session.executor, cache, paging,
            GenerationRequest(
                prompts=prompts, max_new_tokens=length, max_context=length + 1, unused_ids=session.tokenizer.unused_ids,
                sampling=Sampling(temperature=1.0, seed=seed), on_token=report_step,
            ),
        )  # fmt: skip
        pieces += [torch.tensor([start, *text.token_ids]) for text in texts]
        seed += SEQUENCES
    return torch.cat(pieces)[:tokens]


def start_token(tokenizer: Tokenizer) -> int:
    """The BOS token, or the one that ends a text and so stands before the next."""
    begins = tokenizer.encode("")
    return begins[0] if begins else next(iter(tokenizer.eos_token_ids), 0)
