"""What others rely on stays as it is: bytes of formats and files, public names, options and exit codes.

A change on purpose is `python tests/contract/freeze.py`, whose diff of `tests/contract/data` says what it breaks.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import frozen

from haarkv.engine.plans import shape_signature
from haarkv.tq_ops import formats
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.cache_file import load
from tq.cli import main

FORMATS, EXITS = frozen.read("formats"), frozen.read("exits")


@pytest.fixture(scope="module")
def tiny():
    return frozen.tiny()


def test_every_format_is_held():
    assert formats.names() == list(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_stores_the_same_bytes(name):
    assert dict(frozen._format_entries(name, FORMATS[name])) == FORMATS[name]


def test_a_level_of_one_vector_would_be_seen():
    tq4 = formats.get("tq4")
    fields = tq4.quantize(frozen.numbers(0, 1, 128), frozen.LAYER)
    before = frozen.digest(fields)
    fields["codes"][0, 0] ^= 1
    assert frozen.digest(fields) != before


def test_a_cache_file_is_read_and_written_as_before(tiny, tmp_path):
    content, path = frozen.unpack("cache.safetensors.xz"), tmp_path / "cache"
    path.write_bytes(content)
    snapshot, origin = load(path)
    assert tiny.load_cache(path).token_ids == snapshot.token_ids == tuple(range(frozen.TOKENS))
    expected = frozen.sequence(tiny)
    assert frozen.digest(snapshot.tensors) == frozen.digest(expected.tensors)
    again = frozen.cache_bytes(tmp_path / "again", expected, tiny._origin())
    assert frozen.same_file(again) == frozen.same_file(content)
    tiny.save_cache(path, snapshot, "a note", compress=True)
    assert frozen.digest(load(path)[0].tensors) == frozen.digest(expected.tensors)
    assert load(path)[1] == origin


def test_a_plan_file_is_read_and_written_as_before(tiny):
    path = frozen.DATA / "plan.json"
    assert frozen.plan_text(tiny) == path.read_text(encoding="utf-8")
    plan, layers = plan_file.load(path).plan(tiny.config.num_layers), tiny.config.num_layers
    assert plan == frozen.SPEC.plan(layers)


def test_a_calibration_file_is_read_and_written_as_before(tiny, tmp_path):
    content, path = frozen.unpack("calibration.safetensors.xz"), tmp_path / "calibration"
    path.write_bytes(content)
    file = calibration_file.load(path)
    assert (file.shape, file.calibration.context) == (shape_signature(tiny.config), 4096)
    assert file.fingerprint == tiny.weights.partition("-")[0]
    calibration_file.save(path, file)
    assert frozen.same_file(path.read_bytes()) == frozen.same_file(content)
    assert frozen.same_file(frozen.calibration_bytes(path, tiny)) == frozen.same_file(content)


def test_public_names_and_their_parameters_stay():
    pytest.importorskip("transformers")
    assert frozen.public_names() == frozen.read("names")


OPTIONS = frozen.options()


def test_every_command_is_held():
    assert list(OPTIONS) == list(frozen.read("options"))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_stay(name):
    assert OPTIONS[name] == frozen.read("options")[name]


@pytest.mark.parametrize("line", EXITS)
def test_exit_codes_stay(capsys, line):
    assert main(line.split()) == EXITS[line]
