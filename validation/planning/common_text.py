"""Text to choose a cache by where nobody gives any: the language reference that every CPython brings, English and code.

What a model writes itself, from its start token at temperature 1, would need no such text. It was tried, and misleads: it
wanders, its next tokens are uncertain whatever the late layers say, and a cache that is coarse there looks ten times better
than on real text.
"""

from __future__ import annotations

import pydoc_data.topics

from haarkv.models.text import Tokenizer


def common_text(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """The first token ids of it, longest chapters first; where it has fewer, all.

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
