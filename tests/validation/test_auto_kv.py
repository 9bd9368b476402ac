"""`--kv auto`: the text that a model writes, the choice, and what is remembered of it."""

import json

import pytest
import torch

import tq
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning import auto, remembered
from haarkv.validation.planning.calibrate import load_subject
from haarkv.validation.planning.own_text import SEQUENCES, start_token, write
from tq.cli import main


@pytest.fixture(scope="module")
def subject():
    return load_subject("tiny")


@pytest.fixture(scope="module")
def chosen(subject):
    return auto.choose(subject, loss=0.002)


@pytest.fixture
def at_home(monkeypatch, tmp_path):
    monkeypatch.setattr(remembered, "home", lambda: tmp_path / "kv-auto")
    return tmp_path / "kv-auto"


def test_a_model_writes_texts_of_its_own_from_its_start_token(subject):
    session = subject.session(KVSpec("bf16"))
    ids = write(session, 200)
    length = -(-200 // SEQUENCES)
    assert len(ids) == 200
    assert set(ids[::length].tolist()) == {start_token(session.tokenizer)}
    assert torch.equal(ids, write(session, 200))
    others = write(session, 200, seed=SEQUENCES)
    assert not torch.equal(ids, others)
    # Drawn, and not the likeliest: texts differ from each other.
    assert len({tuple(text.tolist()) for text in ids.split(length)}) == SEQUENCES


def test_the_smallest_cache_under_the_bound_is_taken(chosen):
    bits = [row.bits_per_value for row in chosen.rows]
    assert bits == sorted(bits)
    smaller = [row for row in chosen.rows if row.bits_per_value < chosen.row.bits_per_value]
    assert smaller
    assert chosen.row.kl_mean <= 0.002 < min(row.kl_mean for row in smaller)
    assert chosen.spec.kv == chosen.row.kv
    # The next smaller one was measured: nothing between was passed over.
    assert smaller[-1].kv == auto.CHOICES[auto.CHOICES.index(chosen.spec.kv) - 1]
    assert (chosen.spec.tail, chosen.spec.sink) == (124, 4)
    assert f"takes {chosen.spec.kv} with 124 recent and 4 first tokens" in str(chosen)


def test_a_bound_that_is_none_is_refused(subject):
    with pytest.raises(InputError, match="--kv-loss is a mean KL in nats a token, above 0, not -1"):
        auto.choose(subject, loss=-1.0)


def test_a_choice_is_remembered_and_made_again_where_its_file_is_damaged(at_home, chosen, monkeypatch):
    asked = []

    def choose_for(model, **how):
        asked.append(how["loss"])
        return chosen

    monkeypatch.setattr(remembered, "choose_for", choose_for)
    said = []
    first = remembered.cache_for("tiny", loss=0.002, on_choice=said.append)
    again = remembered.cache_for("tiny", loss=0.002, on_choice=said.append)
    assert asked == [0.002]
    assert said == [str(chosen)]
    assert again.plan(6).describe() == first.plan(6).describe()
    assert again.weights == first.weights == chosen.file.fingerprint
    (file,) = at_home.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    remembered.cache_for("tiny", loss=0.002)
    remembered.cache_for("tiny", loss=0.01)
    assert asked == [0.002, 0.002, 0.01]


def test_the_command_takes_the_choice_and_says_it_once(at_home, chosen, monkeypatch, capsys):
    monkeypatch.setattr(remembered, "choose_for", lambda model, **how: chosen)
    for said in (1, 0):
        given = ["--kv", "auto", "--kv-loss", "0.002", "--prompt", "def", "--max-new-tokens", "2", "--json"]
        assert main(["generate", *given]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["kv"]["format"] == f"{chosen.spec.kv}; tail 124; sink 4"
        assert err.count(f"tq: {chosen}") == said


def test_where_nothing_can_be_kept_the_choice_is_used_all_the_same(chosen, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(remembered, "home", lambda: tmp_path / "file")
    monkeypatch.setattr(remembered, "choose_for", lambda model, **how: chosen)
    assert remembered.cache_for("tiny", loss=0.002) is chosen.spec


def test_load_takes_what_the_command_takes(at_home, tmp_path):
    """The choice is said once and remembered; what sets the whole cache stands alone."""
    said = []
    session = tq.load("tiny", kv="auto", kv_loss=0.05, on_choice=said.append)
    assert len(said) == 1
    assert session.plan.sink == auto.SINKS
    again = tq.load("tiny", kv="auto", kv_loss=0.05, on_choice=said.append)
    assert len(said) == 1
    assert again.plan.describe() == session.plan.describe()
    (file,) = at_home.iterdir()
    learned = tq.load("tiny", kv="k=lr3,v=tq3", calibration=file, tail=16, sink=2)
    assert learned.plan.describe() == "k=lr3,v=tq3; tail 16; sink 2"
    assert tq.load("tiny", plan=file).plan.describe() == session.plan.describe()
    with pytest.raises(InputError, match="auto sets the whole cache; leave out tail"):
        tq.load("tiny", kv="auto", tail=3)
    with pytest.raises(InputError, match="plan sets the whole cache; leave out kv"):
        tq.load("tiny", kv="tq4", plan=file)
    with pytest.raises(InputError, match="kv_loss says what kv='auto' may lose"):
        tq.load("tiny", kv="tq4", kv_loss=0.1)
