"""Needles: planted where they should be, judged by what a key raises, in a model that YaRN extends."""

import json
import random

import pytest
import torch

import tq
from haarkv.benchmarks.needles import Needle, ask, judged, needles, planted, stretched
from haarkv.models.catalog import read_config
from haarkv.tq_ops.errors import InputError
from tq.cli import main


@pytest.fixture(scope="module")
def session():
    return tq.load("tiny", kv="tq4", executor="cpu")


def test_needles_stand_at_even_distances():
    wanted = [Needle((1, 2), 3), Needle((4, 5), 6)]
    assert planted([0] * 8, wanted, [9]) == [0, 0, 9, 1, 2, 3, 9, 0, 0, 0, 0, 9, 4, 5, 6, 9, 0, 0]


def test_needles_are_words_that_the_text_has_not(session):
    text = list(range(0, 4096, 3))
    made = needles(session, text, 20, random.Random(0))
    tokens = [token for of in made for token in (*of.key, of.value)]
    assert len(set(tokens)) == 60
    assert not set(tokens) & set(text)
    assert all(session.tokenizer.decode([of.value]).strip().isalpha() for of in made)
    with pytest.raises(InputError, match="too few words"):
        needles(session, range(4090), 20, random.Random(0))


def test_what_is_likely_anyhow_is_not_found():
    """Value 0 is the likeliest after every key; a key raises its own value, or another's."""
    logits = torch.zeros(3, 10)
    logits[:, 7] = 5.0
    values = [7, 8, 9]
    logits[range(3), values] += 1.0
    assert judged(logits, values) == (3, 1)
    logits[1, 8], logits[1, 9] = 0.0, 2.0
    assert judged(logits, values) == (1, 1)  # the third key raises its value less than the second did
    logits[2, 9] = 9.0
    assert judged(logits, values) == (3, 2)


@pytest.mark.slow
def test_a_short_haystack_is_searched_with_a_packed_cache(session):
    """Chance finds 1 of 12; this model three or more, within what it was trained on."""
    found = ask(session, "tq4", 512, 12, 0)
    assert found.needles == 12
    assert found.found > 3
    assert found == ask(session, "tq4", 512, 12, 0)


def test_a_model_is_stretched_to_a_context(tmp_path):
    folder = stretched("tiny", 16384, tmp_path / "long")
    config = read_config(folder)
    assert config.max_position_embeddings == 16384
    scaling = config.common.attention.rope.scaling
    assert (scaling.factor, scaling.original_positions) == (4.0, 4096)
    assert stretched("tiny", 4096, tmp_path) == "tiny"
    for model in (folder, "random:0.6b"):
        with pytest.raises(InputError, match="no plain checkpoint"):
            stretched(model, 10**6, tmp_path / "no")


def test_the_command_says_what_was_found(capsys):
    assert main(["bench", "needles", "--contexts", "200", "--needles", "2", "--haystacks", "1", "--kv", "tq4", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert [(row["kv"], row["context"], row["needles"]) for row in line["rows"]] == [("tq4", 200, 2)]


def test_what_cannot_be_filled_is_refused(session):
    with pytest.raises(InputError, match="cannot be filled"):
        ask(session, "tq4", 40, 12, 0)
