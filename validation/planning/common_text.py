"""Texts to choose a cache by where nobody gives any.

    reference   Python's language reference, which every CPython brings: English and code, and known by heart to many models
    prose       `prose.txt`, written for this: letters, talk, tales, instructions; no model has read it

A cache can hold on one of them and not on the other, so `--kv auto` is judged by the worse.

What a model writes itself, from its start token at temperature 1, would need no such text. It was tried, and misleads: it
wanders, its next tokens are uncertain whatever the late layers say, and a cache that is coarse there looks ten times better
than on real text.
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

from haarkv.models.text import Tokenizer


def common_text(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """The first token ids of the reference, longest chapters first; where it has fewer, all.

    Args:
        tokens: how many at most.
    """
    chapters = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    found: list[int] = []
    for chapter in chapters:
        found += tokenizer.encode(chapter)
        if len(found) >= tokens:
            break
    return found[:tokens]


def prose(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the prose, some 1,800 with a vocabulary of a large model."""
    return tokenizer.encode((Path(__file__).parent / "prose.txt").read_text(encoding="utf-8"))
