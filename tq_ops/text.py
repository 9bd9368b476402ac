"""Small things that sentences are made with."""

from __future__ import annotations


def count_noun(number: int, noun: str) -> str:
    """A number and what it counts, in the plural unless it is one."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
