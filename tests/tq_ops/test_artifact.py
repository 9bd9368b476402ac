"""Files of tensors of every kind: what comes back, is refused in one line, is packed, and is left by a killed process."""

import json
import random

import pytest
import torch
import zstandard
from kills import every_moment
from safetensors.torch import load_file, save_file

from haarkv.tq_ops import artifact
from haarkv.tq_ops.artifact import CACHE, CALIBRATION, KINDS, PLAN, SCORES, header, read, resume, write
from haarkv.tq_ops.errors import InputError

BLOCKS, SCALES = "layers.0.k.codes", "layers.11.v.scale"
TENSORS = {
    "layers.0.k.window": torch.arange(96).view(2, 3, 16).bfloat16(), "earlier.layers.0.k.codes": torch.ones(5),
    "ids": torch.arange(7), "none": torch.zeros(0, 4),
}  # fmt: skip


@pytest.fixture(params=[kind for kind in KINDS if kind is not PLAN], ids=lambda kind: kind.noun)
def kind(request):
    return request.param


def write_file(path, kind, tensors=TENSORS, **changes):
    write(path, kind, {"run": '"a\\nb"'} | changes, tensors)
    return path


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == x.dtype and torch.equal(one[name].view(torch.uint8), x.view(torch.uint8))
        for name, x in other.items()
    )


def test_what_is_written_comes_back(tmp_path, kind):
    metadata, tensors = read(write_file(tmp_path / "f", kind), kind)
    assert metadata == {kind.key: kind.versions[0], "run": '"a\\nb"'}
    assert same(tensors, TENSORS)
    assert header(tmp_path / "f", kind).items() > metadata.items()


def test_any_flipped_bit_or_missing_end_is_refused_in_one_line(tmp_path, kind):
    content, path = write_file(tmp_path / "f", kind).read_bytes(), tmp_path / "damaged"
    bit_flips = [(place, bit) for place in range(0, len(content), len(content) // 60) for bit in (1, 4)]
    for place, bit in bit_flips:
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        with pytest.raises(InputError, match=f"^{path} is no {kind.noun}: .*; {kind.remedy}$"):
            read(path, kind)
    for end in (0, 5, 8, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(InputError, match=f"^{path} is no {kind.noun}: it is truncated or no safetensors file; "):
            header(path, kind)


def test_another_kind_and_version_are_called_so(tmp_path, kind):
    other = SCORES if kind is CALIBRATION else CALIBRATION
    for changes, words in (
        ({kind.key: "0"}, f"its version is '0', not {' or '.join(kind.versions)}"),
        ({}, f"it is a {other.noun}, which {other.taker} takes"),
    ):
        with pytest.raises(InputError, match=words):
            header(write_file(tmp_path / "f", kind if changes else other, **changes), kind)
    save_file(TENSORS, tmp_path / "f")
    with pytest.raises(InputError, match=f"is no {kind.noun}: it lacks {kind.key}; "):
        header(tmp_path / "f", kind)
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match=f"^the {kind.noun} {path} cannot be read: "):
            read(path, kind)


def test_a_resume_file_goes_on_with_the_same_run_alone(tmp_path):
    path = tmp_path / "run"
    assert resume(path, SCORES, {}) is None
    write_file(path, SCORES, run='{"text": "a", "model": "b"}')
    assert same(resume(path, SCORES, {"model": "b", "text": "a"})[1], TENSORS)
    with pytest.raises(InputError, match="was begun with another model; begin a new one"):
        resume(path, SCORES, {"text": "a", "model": "c"})
    for run in ("[]", "{"):
        with pytest.raises(InputError, match="is no partial result: "):
            resume(write_file(path, SCORES, run=run), SCORES, {"text": "a"})


# -- Packed tensors ---------------------------------------------------------------------------------------------------------


def packed(path, tensors):
    write(path, CACHE, {}, tensors, compress=True)
    return json.loads(header(path, CACHE)["packed"])


def test_only_blocks_that_gain_are_packed(tmp_path):
    """Rows of zeros do, random codes do not; what is in the SHA-256 stays as it is."""
    draw = torch.Generator().manual_seed(0)
    tensors = {
        **TENSORS, BLOCKS: torch.randint(0, 256, (3, 1, 128, 32), dtype=torch.uint8, generator=draw),
        SCALES: torch.ones(3, 1, 128).half(), "zeros": torch.zeros(9999),
    }  # fmt: skip
    assert packed(tmp_path / "f", tensors) == {SCALES: {"dtype": "float16", "shape": [3, 1, 128]}}
    assert load_file(tmp_path / "f")[SCALES].numel() < 100
    metadata, again = read(tmp_path / "f", CACHE)
    assert metadata[CACHE.key] == "2"
    assert same(again, tensors)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_packing_keeps_every_bit(tmp_path, dtype):
    """Of any dtype, not-a-numbers too."""
    bits = torch.randint(0, 40, (4, 2, 128, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    bits[0, 0, :2] = 255
    assert packed(tmp_path / "f", {BLOCKS: bits.view(dtype)})
    assert same(read(tmp_path / "f", CACHE)[1], {BLOCKS: bits.view(dtype)})


BOMB = torch.frombuffer(bytearray(zstandard.compress(bytes(2**26))), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "tensor", "words"),
    [
        ({"shape": [3, 2**50]}, None, "would take .* GiB"),
        ({"shape": [3, 1, 64]}, None, "does not hold 384 bytes"),
        ({"shape": [3, -1, 128]}, None, "not described"),
        ({"shape": "3"}, None, "not described"),
        ({"dtype": "uint8"}, None, "does not hold 384 bytes"),
        ({"dtype": "int3"}, None, "not described"),
        ({}, BOMB, "does not hold 768 bytes"),
        ({}, BOMB.new_zeros(5), "cannot be unpacked"),
        ({}, torch.zeros(3, 1, 128), "is said to be packed"),
    ],
)
def test_nothing_is_unpacked_before_what_is_promised_is_checked(tmp_path, monkeypatch, changes, tensor, words):
    """Of a file as another program would write it, its SHA-256 taken anew."""
    path = tmp_path / "f"
    about = packed(path, {SCALES: torch.ones(3, 1, 128).half()})
    metadata, frames = header(path, CACHE), load_file(path)
    about[SCALES] |= changes
    del metadata["sha256"]
    write(path, CACHE, metadata | {"packed": json.dumps(about)}, frames if tensor is None else {SCALES: tensor})
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: pytest.fail("unpacked"))
    if words == "cannot be unpacked":
        monkeypatch.undo()
    with pytest.raises(InputError, match=words):
        read(path, CACHE)


# -- Killed processes -------------------------------------------------------------------------------------------------------


def test_a_write_killed_at_any_time_leaves_the_old_file_or_the_new(tmp_path, monkeypatch, kind):
    """Before each of its changes, and with half of the file written."""
    path, new = tmp_path / "f", {"x": torch.tensor([random.Random(1).random()])}
    content, save = write_file(path, kind).read_bytes(), artifact.save_file

    def half_written(tensors, half, metadata):
        half.write_bytes(content[: len(content) // 2])
        half.open().close()  # a moment to be killed at
        save(tensors, half, metadata)

    monkeypatch.setattr(artifact, "save_file", half_written)
    for _ in every_moment(lambda: write_file(path, kind, new)):
        assert any(same(read(path, kind)[1], tensors) for tensors in (TENSORS, new))
        write_file(path, kind)
    assert same(read(path, kind)[1], new)
    assert [file.name for file in tmp_path.iterdir()] == ["f"]
