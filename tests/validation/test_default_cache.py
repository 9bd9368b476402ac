"""The cache of a model where none is named, in the command and in Python."""

import shutil

import pytest
import torch
from small_models import CONFIGS, gemma_config

from haarkv.engine.plans import SINKS, TAIL, plan_for
from haarkv.models.catalog import TINY, read_config
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import calibration_file
from haarkv.tq_ops.kv.cache import cache_bytes
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape
from haarkv.validation.planning import auto, calibrate, choice_cache
from haarkv.validation.planning.search import place_bytes, places
from tq.cli import main
from tq.loading import load

pytestmark = pytest.mark.chooses


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model with a home of its own."""
    monkeypatch.setattr(choice_cache, "home", lambda: tmp_path / "kv-auto")
    return shutil.copytree(TINY, tmp_path / "model")


@pytest.fixture
def choice_log(monkeypatch):
    """Models for which a cache was chosen; each gets `tq5`."""
    calls = []

    def cache_for(model, **how):
        calls.append((model, how["loss"]))
        return KVSpec("tq5")

    monkeypatch.setattr(choice_cache, "cache_for", cache_for)
    monkeypatch.setattr("tq.loading.cache_for", cache_for)
    return calls


def test_the_command_and_python_choose_for_a_model_of_yours(folder, choice_log, capsys):
    assert main(["generate", "--model", str(folder), "--prompt", "def", "--max-new-tokens", "2", "--json"]) == 0
    assert '"format": "tq5"' in capsys.readouterr().out
    assert load(folder).plan.describe() == "tq5"
    assert choice_log == [(str(folder), auto.LOSS)] * 2
    assert load(folder, kv="tq3", tail=8).plan.describe() == "tq3; tail 8"
    with pytest.raises(InputError, match="kivi2 quantizes 32 tokens together and needs tail=31 or more, not 0"):
        load(folder, kv="kivi2", tail=0)
    assert len(choice_log) == 2


def test_a_tail_alone_does_not_say_which_cache(folder, choice_log, capsys):
    args = ["generate", "--model", str(folder), "--prompt", "def", "--max-new-tokens", "2", "--kv-tail", "9"]
    assert main(args) == 2
    assert "--kv auto, the default, sets the whole cache; leave out --kv-tail, or name a format" in capsys.readouterr().err
    with pytest.raises(InputError, match="--kv auto, the default, sets the whole cache; leave out --kv-tail"):
        load(folder, tail=9)
    assert not choice_log


def test_a_calibration_alone_is_used(tmp_path, choice_log):
    subject = calibrate.load_subject("tiny")
    file = subject.calibration_file(subject.learn([torch.arange(200)], ()), {})
    assert load("tiny", calibration=file).plan.describe() == f"k=lr4,v=tq4; tail {TAIL}; sink {SINKS}"
    assert load("tiny", calibration=file, tail=7, kv="k=lr3,v=tq3").plan.describe() == "k=lr3,v=tq3; tail 7"
    path = tmp_path / "a.safetensors"
    calibration_file.save(path, file)
    assert load("tiny", calibration=path).plan.describe() == f"k=lr4,v=tq4; tail {TAIL}; sink {SINKS}"
    assert not choice_log


# -- Bytes of windows ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tail", [0, 30])
@pytest.mark.parametrize("name", [*sorted(CONFIGS), "gemma", "tiny-hybrid"])
def test_places_add_up_to_the_cache(name, tail):
    """Windows, heads and rings counted: what each place takes adds up to what a cache allocates."""
    gemma = gemma_config(num_layers=3, head_dim=64, window=512)
    config = (CONFIGS | {"gemma": gemma, "tiny-hybrid": read_config("tiny-hybrid")})[name]
    plan = plan_for(KVSpec("k=tq5,v=tq3", tail=tail or None, sink=2), config)
    for context in (50, 300, 3000):
        each = [place_bytes(plan, place, config.kv_shapes, context, plan.ring_chunk()) for place in places(config)]
        assert sum(each) == cache_bytes(plan, context, config.kv_shapes)


def test_a_window_beside_a_tail_keeps_room_for_the_tails_chunk_alone():
    shape = KVShape(1, 256, 512)
    alone, with_tail = (KVSpec("tq4", tail).plan(1) for tail in (None, 124))
    assert (alone.ring_chunk(), with_tail.ring_chunk()) == (512, 128)
    assert [shape.ring_blocks(32, chunk=plan.ring_chunk()) for plan in (alone, with_tail)] == [9, 6]
