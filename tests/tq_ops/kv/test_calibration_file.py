"""Calibration files: what comes back, what is refused, and a plan that lives in one."""

import json
from dataclasses import fields, replace

import pytest
import torch

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops import artifact
from haarkv.tq_ops.artifact import CALIBRATION
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, load, make_calibration, save
from haarkv.tq_ops.kv.model_shape import ModelShape

SYNTHETIC = calibration(layers=2, heads=2, dim=32)
SHAPE = ModelShape.uniform(2, 2, 32, 64, 257)
FILE = CalibrationFile(make_calibration(SYNTHETIC.k), SHAPE, "0123456789abcdef", {"tokens": 5})
HYBRID = replace(
    FILE,
    calibration=make_calibration((None, SYNTHETIC.k[0], None)),
    shape=replace(SHAPE, layers=(None, SHAPE.layers[0], None)),
)


def test_keys_are_learned_in_layers_that_have_some():
    plan = replace(HYBRID.spec, kv="k=lr3,v=tq3").plan(3, HYBRID.shape)
    plan.require_layout(HYBRID.shape.layers)
    assert [plan.k(layer).rope_shift(layer) is None for layer in range(3)] == [True, False, True]
    with pytest.raises(InputError, match="lr3 is of keys, and no layer of this model has any; take --kv bf16"):
        make_calibration((None, None)).format(3)


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "it", FILE)
    return tmp_path / "it"


@pytest.mark.parametrize("file", [FILE, HYBRID], ids=["every layer", "one of three"])
def test_what_is_written_comes_back_to_the_bit(tmp_path, file):
    save(tmp_path / "it", file)
    loaded_file = load(tmp_path / "it")
    assert replace(loaded_file, calibration=file.calibration) == file
    assert loaded_file.calibration.digest == file.calibration.digest
    assert loaded_file.calibration.bases.keys() == file.calibration.bases.keys()
    for layer, ours in file.calibration.bases.items():
        theirs = loaded_file.calibration.bases[layer]
        assert all(torch.equal(getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(Basis))


def test_the_context_is_kept_and_longer_sequences_are_refused(path):
    load(path).spec.plan(2).require_context(10**9)
    save(path, replace(FILE, calibration=make_calibration(SYNTHETIC.k, 4096)))
    spec = load(path).spec
    assert (spec.plan(2).context, replace(spec, kv="k=lr3,v=tq4").plan(2).context) == (None, 4096)
    replace(spec, kv="k=lr2,v=tq4").plan(2).require_context(4096)
    words = r"holds for sequences of up to 4,096 tokens, and this one may have 4,097; learn it from windows of 4,097"
    with pytest.raises(InputError, match=words):
        replace(spec, kv="k=lr3,v=tq3").plan(2).require_context(4097)


def test_the_digest_tells_one_number_from_another():
    first, second = SYNTHETIC.k
    other = replace(second, mean=second.mean + 1e-3)
    digests = {make_calibration(layers).digest for layers in ((first, second), (second, first), (first, other))}
    assert len(digests | {FILE.calibration.digest}) == 3


def _nan(tensors):
    tensors["layers.1.k.forward"][1, 3, 5] = torch.nan


def _float_matrix(tensors):
    tensors["layers.0.k.back"] = tensors["layers.0.k.back"].float()


BAD_FILES = {
    "context": ({"context": "-5"}, None, "its context is not a number of tokens"),
    "nan": ({}, _nan, "layers.1.k.forward is not finite"),
    "lacks": ({}, lambda tensors: tensors.pop("layers.1.k.weights"), "it lacks layers.1.k.weights"),
    "dtype": ({}, _float_matrix, "layers.0.k.back is torch.float32"),
    "heads": ({"model": json.dumps({**SHAPE.as_json(), "num_kv_heads": 3})}, None, r"not torch.float32 \[3, 32\]"),
    "layers": ({"model": json.dumps({**SHAPE.as_json(), "num_layers": 3})}, None, "it lacks layers.2.k.mean"),
    "model": ({"model": "[]"}, None, "its model is not described by num_layers"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_what_does_not_fit_together_is_one_line(path, case):
    """Its SHA-256 is right, and what it says is not."""
    words, change, reason = BAD_FILES[case]
    metadata, tensors = artifact.read(path, CALIBRATION)
    if change:
        change(tensors)
    artifact.write(path, CALIBRATION, metadata | words, tensors)
    with pytest.raises(InputError, match=f"^{path} is no calibration: .*{reason}"):
        load(path)


def test_what_is_not_finite_is_never_written(tmp_path):
    bad = replace(SYNTHETIC.k[0], mean=SYNTHETIC.k[0].mean * torch.inf)
    with pytest.raises(ValueError, match=r"layers\.0\.k\.mean is not finite"):
        save(tmp_path / "it", replace(FILE, calibration=make_calibration((bad, SYNTHETIC.k[1]))))


# -- A plan in its calibration's file -------------------------------------------------------------------------------------
def test_a_plan_and_its_calibration_are_one_file(tmp_path):
    spec = replace(FILE.spec, kv="k=lr3,v=tq3", layers={1: "k=tq4,v=tq3"}, tail=8, sink=2)
    plan_file.save(tmp_path / "plan.safetensors", spec.plan(2), SHAPE, {}, FILE)
    loaded_plan = plan_file.load(tmp_path / "plan.safetensors")
    assert loaded_plan.plan(2, SHAPE).describe() == "k=lr3,v=tq3; layer 1: k=tq4,v=tq3; tail 8; sink 2"
    assert (loaded_plan.made_for, loaded_plan.weights) == (SHAPE, FILE.fingerprint)
    assert loaded_plan.calibration.digest == FILE.calibration.digest
    with pytest.raises(InputError, match="lr3 needs the coordinates"):
        plan_file.loads(plan_file.dumps(spec.plan(2), SHAPE), "text")
