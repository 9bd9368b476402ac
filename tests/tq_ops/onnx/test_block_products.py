"""Products with weights in GGUF blocks as ONNX Runtime computes them, and rows of them; gguf says what the numbers are."""

import numpy as np
import pytest
import torch
from block_weights import TYPES, block_minima, random_blocks

pytest.importorskip("onnx", reason="needs the onnx extra")
pytest.importorskip("onnxruntime", reason="needs the onnx extra")

import onnxruntime as ort
from onnx import TensorProto

from haarkv.models.gguf_file import block_type_named
from haarkv.tq_ops.block_levels import unpack_levels
from haarkv.tq_ops.onnx.block_codes import CODES, in_codes, weight_codes
from haarkv.tq_ops.onnx.block_products import CodedWeight, product, rows
from haarkv.tq_ops.onnx.graph import Graph, StoredWeights, TensorType
from haarkv.tq_ops.weight import Blocks, dense

ERROR = 1e-6
"""Of a product, as a share of the sum of its terms' sizes: FP32 sums of 512 numbers. Measured 3e-7."""
WIDE = ("Q4_K", "Q5_K", "Q6_K")


def run(weight, values, array, scope, out):
    """What a graph of one scope makes of its input; weights are constants, as for the kernels."""
    coded_weight, g = CodedWeight(weight_codes(weight), *weight.shape), Graph(23)
    parts = {part: g.weight(part, tensor_type) for part, tensor_type in coded_weight.types.items()}

    def body(inner, x, **parts):
        return [scope(inner, "y", x, coded_weight, parts)]

    g.node("out", "Identity", g.call("call", "Scope", body, x="x", **parts)[0])
    inputs = {"x": TensorType(TensorProto.INT64 if array.dtype == np.int64 else TensorProto.FLOAT, array.shape)}
    stored_weights = StoredWeights("made", dict.fromkeys(parts, 0))
    model = g.model("m", inputs, {"out": TensorType(TensorProto.FLOAT, out)}, {}, stored_weights)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    shared_weights = {part: ort.OrtValue.ortvalue_from_numpy(values[part].numpy()) for part in parts}
    options.add_external_initializers(list(shared_weights), list(shared_weights.values()))
    return torch.from_numpy(ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": array})[0])


def product_error(weight, values, x):
    numbers = dense(weight).double()
    exact, sizes = x.double() @ numbers.T, x.double().abs() @ numbers.abs().T
    y = run(weight, values, x.numpy(), product, (len(x), len(weight)))
    return float(((y - exact).abs() / sizes).max())


def random_x(tokens, inputs):
    return torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", TYPES)
def test_levels_are_the_numbers_of_the_file_to_the_bit(kind):
    weight = random_blocks(kind, 7, 512)
    levels = unpack_levels(weight.data.view(7, -1, weight.type.nbytes), kind)
    assert torch.equal(levels.numbers().view(torch.int32), dense(weight).view(torch.int32))
    assert set(CODES) == set(TYPES)


def test_every_exponent_of_mxfp4_is_read():
    data = torch.cat([torch.arange(255, dtype=torch.uint8)[:, None], torch.full((255, 16), 0x72, dtype=torch.uint8)], 1)
    weight = Blocks(data, block_type_named("MXFP4"), torch.float32)
    assert torch.equal(unpack_levels(data[:, None], "MXFP4").numbers(), dense(weight))


@pytest.mark.parametrize("kind", TYPES)
def test_a_product_of_a_token_and_of_many_is_that_of_the_restored_weights_but_for_fp32_sums(kind):
    """Rows that fill no tile, and an odd number of blocks where the type allows; powers of two scale rows and columns."""
    for inputs in (512, 256 if kind in WIDE else 96):
        plain = random_blocks(kind, 37, inputs)
        generator = torch.Generator().manual_seed(2)
        powers = [2.0 ** torch.randint(-3, 4, (count,), generator=generator) for count in (37, inputs)]
        for weight in (plain, plain * powers[0].unsqueeze(1) * powers[1]):
            for tokens in (1, 21):
                assert product_error(weight, in_codes(weight), random_x(tokens, inputs)) < ERROR


@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_those_that_gguf_restores(kind):
    """To the bit; numbers with a minimum are rounded at another place."""
    weight, index = random_blocks(kind, 9, 512), np.array([3, 0, 8, 3])
    output, right = run(weight, in_codes(weight), index, rows, (4, 512)), dense(weight)[index]
    if CODES[kind].minimum:
        assert (output - right).abs().max() <= 2.0**-23 * block_minima(weight).abs().max()
    else:
        assert torch.equal(output, right)


def neighbours(values, part):
    """The first two groups of every row change places."""
    values[part][:, :2] = values[part][:, :2].flip(1)


def one_more(values, part):
    """A zero point off by one: every code of the part is one more, where it can be."""
    low, high = values[part] & 15, values[part] >> 4
    values[part] = (low + 1).clamp(max=15) | (high + 1).clamp(max=15) << 4


FAULTS = {
    "a scale": lambda v: neighbours(v, "scale"), "a minimum": lambda v: neighbours(v, "minimum"),
    "a block": lambda v: neighbours(v, "lower"), "a block of upper bits": lambda v: neighbours(v, "upper"),
    "the zero point": lambda v: one_more(v, "lower"), "the zero point of upper bits": lambda v: one_more(v, "upper"),
}  # fmt: skip
HAVE = {"a minimum": "minimum", "a block of upper bits": "upper", "the zero point of upper bits": "upper"}
CASES = [(kind, fault) for kind in TYPES for fault in FAULTS if HAVE.get(fault, "lower") in CODES[kind].parts(1, 512)]


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_what_lies_elsewhere_than_it_should_is_seen(kind, fault):
    weight = random_blocks(kind, 37, 512)
    values = in_codes(weight)
    FAULTS[fault](values)
    assert product_error(weight, values, random_x(3, 512)) > 1000 * ERROR
