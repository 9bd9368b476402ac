"""Stop strings: the text ends before the first, and no part of one is given out early."""

import random

import pytest

from haarkv.engine.text import GrowingText, before_stop, stop_list
from haarkv.tq_ops.errors import InputError


class Pieces:
    """A stream whose token i is piece i."""

    def __init__(self, pieces):
        self.push = pieces.__getitem__


def given(pieces, stops):
    """(texts as they were given out, whether it stopped), fed until it stops."""
    growing = GrowingText(Pieces(pieces), stops)
    out = []
    for token in range(len(pieces)):
        out.append(growing.push(token))
        if growing.stopped:
            break
    whole = before_stop("".join(pieces[: len(out)]), stops)
    return [*out, growing.rest(whole)], growing.stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "out", "stopped"),
    [
        (["ab", "cd"], [], ["ab", "cd", ""], False),
        (["ab", "cd"], ["bc"], ["a", "", ""], True),
        (["ab", "xd"], ["bc"], ["a", "bxd", ""], False),
        (["ab", "b", "c"], ["bc"], ["a", "b", "", ""], True),
        (["a", "b"], ["bc"], ["a", "", "b"], False),  # the end of the text, and no stop
        (["xENDy"], ["END"], ["x", ""], True),
        (["aab", "aac"], ["aac", "aabaa"], ["", "", ""], True),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", "", ""], True),
        (["one two"], ["two", "one"], ["", ""], True),
        (["baa"], ["baa", "a"], ["b", ""], True),  # as if the letters came one by one
        (["xab"], ["b", "ab"], ["x", ""], True),
    ],
)
def test_text_is_given_out_when_no_stop_can_begin_in_it(pieces, stops, out, stopped):
    assert given(pieces, stops) == (out, stopped)


def test_any_pieces_of_any_text_end_where_the_text_is_cut():
    """However a text is cut into pieces, it ends as if its letters came one by one: 20,000 random texts of two letters."""
    rng = random.Random(0)
    for _ in range(20_000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 12)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text) + 1)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        expected, ends = text, False
        for end in range(len(text) + 1):
            if found := [stop for stop in stops if text[:end].endswith(stop)]:
                expected, ends = text[: end - max(map(len, found))], True
                break
        out, stopped = given(pieces, stops)
        assert ("".join(out), stopped) == (expected, ends), (text, stops, pieces)
        assert before_stop(text, stops) == expected


def test_stop_texts_are_one_or_several_and_not_empty():
    assert stop_list("\n\n") == ("\n\n",)
    assert stop_list(["a", "b"]) == ("a", "b")
    with pytest.raises(InputError, match="--stop"):
        stop_list(["a", ""])
