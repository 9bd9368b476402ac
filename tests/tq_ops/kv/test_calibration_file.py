"""Calibration files: what comes back, what is refused, and a plan that lives in one."""

import json
from dataclasses import fields, replace

import pytest
import torch
from bases import calibration
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from haarkv.codebooks.learned import Basis
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, calibration_of, dumps, loads
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.safetensors_header import digest_of, metadata_of

MADE_UP = calibration(layers=2, heads=2, dim=32)
SHAPE = ModelShape.uniform(2, 2, 32, 64, 257)
FILE = CalibrationFile(calibration_of(MADE_UP.k), SHAPE, "0123456789abcdef", {"tokens": 5})
CONTENT = dumps(FILE)


def changed(change=lambda tensors: None, metadata=None):
    """The bytes of the file with other tensors or metadata, and a SHA-256 that fits them."""
    tensors, words = load_tensors(CONTENT), metadata_of(CONTENT) | (metadata or {})
    change(tensors)
    words.pop("sha256")
    return save_tensors(tensors, words | {"sha256": digest_of(tensors, words)})


def test_what_is_written_comes_back_to_the_bit():
    back = loads(CONTENT, "it")
    assert (back.shape, back.fingerprint, back.learned, back.plan) == (SHAPE, FILE.fingerprint, {"tokens": 5}, "")
    assert back.calibration.digest == FILE.calibration.digest
    for ours, theirs in zip(FILE.calibration.k, back.calibration.k, strict=True):
        assert all(torch.equal(getattr(ours, of.name), getattr(theirs, of.name)) for of in fields(Basis))
    assert metadata_of(dumps(back)) == metadata_of(CONTENT)


def test_the_context_is_kept_and_longer_sequences_are_refused():
    of = calibration_of(MADE_UP.k, 4096)
    spec = loads(dumps(replace(FILE, calibration=of)), "it").spec
    assert (spec.plan(2).context, replace(spec, kv="k=lr3,v=tq4").plan(2).context) == (None, 4096)
    replace(spec, kv="k=lr2,v=tq4").plan(2).require_context(4096)
    words = r"holds for sequences of up to 4,096 tokens, and this one may have 4,097; learn it from windows of 4,097"
    with pytest.raises(InputError, match=words):
        replace(spec, kv="k=lr3,v=tq3").plan(2).require_context(4097)
    loads(CONTENT, "it").spec.plan(2).require_context(10**9)


def test_the_digest_tells_one_number_from_another():
    first, second = MADE_UP.k
    other = replace(second, mean=second.mean + 1e-3)
    digests = {calibration_of(layers).digest for layers in ((first, second), (second, first), (first, other))}
    assert len(digests | {FILE.calibration.digest}) == 3


def test_a_truncated_file_and_a_flipped_bit_are_refused():
    flipped = [bytearray(CONTENT) for _ in range(len(CONTENT) - 1, 0, -4001)]
    for number, damaged in enumerate(flipped):
        damaged[len(CONTENT) - 1 - 4001 * number] ^= 4
    for damaged in (*flipped, *(CONTENT[:end] for end in (0, 5, 8, 40, 2000, len(CONTENT) // 2, len(CONTENT) - 1))):
        with pytest.raises(InputError, match=r"^it is no calibration: .*; `tq calibrate` writes one$"):
            loads(bytes(damaged), "it")


def _nan(tensors):
    tensors["layers.1.k.forward"][1, 3, 5] = torch.nan


def _float_matrix(tensors):
    tensors["layers.0.k.back"] = tensors["layers.0.k.back"].float()


REFUSED = {
    "context": (changed(metadata={"context": "-5"}), "its context is not a number of tokens"),
    "nan": (changed(_nan), "layers.1.k.forward is not finite"),
    "lacks": (changed(lambda tensors: tensors.pop("layers.1.k.weights")), "it lacks layers.1.k.weights"),
    "dtype": (changed(_float_matrix), "layers.0.k.back is torch.float32"),
    "heads": (changed(metadata={"model": json.dumps({**SHAPE.as_json(), "num_kv_heads": 3})}), r"not torch.float32 \[3, 32\]"),
    "layers": (changed(metadata={"model": json.dumps({**SHAPE.as_json(), "num_layers": 3})}), "it lacks layers.2.k.mean"),
    "version": (changed(metadata={"haarkv_calibration": "2"}), "its version is 2, not 4"),
    "model": (changed(metadata={"model": "[]"}), "its model is not described by num_layers"),
    "words": (save_tensors({"a": torch.zeros(1)}), "it lacks context, fingerprint, haarkv_calibration"),
    "text": (b"{}", "truncated or no safetensors file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_calibration_is_one_line(case):
    content, words = REFUSED[case]
    with pytest.raises(InputError, match=words) as caught:
        loads(content, "it")
    assert str(caught.value).startswith("it is no calibration: ")


def test_what_is_not_finite_is_never_written():
    bad = replace(MADE_UP.k[0], mean=MADE_UP.k[0].mean * torch.inf)
    with pytest.raises(ValueError, match=r"layers\.0\.k\.mean is not finite"):
        dumps(replace(FILE, calibration=calibration_of((bad, MADE_UP.k[1]))))


# -- A plan in its calibration's file -------------------------------------------------------------------------------------
def test_a_plan_and_its_calibration_are_one_file(tmp_path):
    spec = replace(FILE.spec, kv="k=lr3,v=tq3", layers={1: "k=tq4,v=tq3"}, tail=8, sink=2)
    text = plan_file.dumps(spec.plan(2), SHAPE)
    (tmp_path / "plan.safetensors").write_bytes(dumps(replace(FILE, plan=text)))
    back = plan_file.load(tmp_path / "plan.safetensors")
    assert back.plan(2, SHAPE).describe() == "k=lr3,v=tq3; layer 1: k=tq4,v=tq3; tail 8; sink 2"
    assert (back.made_for, back.weights) == (SHAPE, FILE.fingerprint)
    assert back.calibration.digest == FILE.calibration.digest
    with pytest.raises(InputError, match="lr3 needs the coordinates"):
        plan_file.loads(text, "text")
