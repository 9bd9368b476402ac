"""Activations of 8 bits where they meet quantised weights: asked for, said, and refused where no kernel rounds."""

import pytest
from checkpoints import write_checkpoint
from gguf_files import byte_vocabulary, convert
from refusals import assert_refused

import tq
from haarkv.tq_ops.weight import Blocks
from tq.cli import main


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return convert(
        write_checkpoint(folder / "m", config={"head_dim": 64, "vocab_size": 263}),
        folder / "m.gguf",
        "Q8_0",
        vocabulary=byte_vocabulary(),
    )


def test_a_session_says_it_and_its_weights_have_it(file):
    plain, eight_bit = (tq.load(file, kv="tq4", executor="cpu", activation_bits=bits) for bits in (16, 8))
    assert "8 bits" in eight_bit.executor.description
    assert "8 bits" not in plain.executor.description
    blocks = [weight for _, weight in eight_bit.executor.weights.named_tensors() if isinstance(weight, Blocks)]
    assert {weight.x_bits for weight in blocks} == {8}
    tied = [session.executor.weights.lm_head is session.executor.weights.embedding for session in (plain, eight_bit)]
    assert tied[0] == tied[1]
    assert plain.weights == eight_bit.weights  # a cache file and a choice of caches hold for both
    with pytest.raises(tq.InputError, match="16 or 8 bits"):
        tq.load(file, kv="tq4", executor="cpu", activation_bits=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "tiny"), ("tiny has no quantised weights",)),
        (("--executor", "reference"), ("activations of 8 bits are cpu's", "reference")),
        (("--executor", "onnx"), ("activations of 8 bits are cpu's", "onnx")),
        (("--activation-bits", "4"), ("--activation-bits",)),
    ],
)
@pytest.mark.parametrize("command", ["generate", "validate"])
def test_where_nobody_rounds_it_is_one_line(command, file, capsys, options, words):
    code = main([command, "--model", str(file), "--activation-bits", "8", "--kv", "tq4", "--prompt", "abc", *options])
    assert_refused((code, *capsys.readouterr()), *words)
