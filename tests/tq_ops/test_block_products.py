"""Products with weights in GGUF blocks, and rows of them: Triton's kernels and ONNX Runtime beside the file's numbers.

Triton's run on a GPU or in its interpreter, where the contract of op tables has no blocks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from at_length import MORE_CUDA, rest
from block_weights import TYPES, block_minima, random_blocks
from cuda_caches import DEVICE

from haarkv.models.gguf_file import block_type_named
from haarkv.tq_ops.block_levels import unpack_levels
from haarkv.tq_ops.cuda.block_planes import PLANES, by_planes, placed
from haarkv.tq_ops.onnx.block_codes import CODES, in_codes, weight_codes
from haarkv.tq_ops.weight import Blocks, dense, weight_numbers

ERRORS = {"cuda": 5e-7, "onnx": 1e-6}
"""Of a product, as a share of the sum of its terms' sizes. Measured: 2.8e-7 and 3.2e-7."""
WIDE = ("Q4_K", "Q5_K", "Q6_K")
"""In blocks of 256."""
KINDS = [*(("cuda", kind) for kind in PLANES), *(("onnx", kind) for kind in CODES)]


def triton_ops():
    pytest.importorskip("triton", "3.6", reason="needs the cuda extra")
    from haarkv.tq_ops.cuda import ops

    return ops


def run_scope(weight, array, name, out):
    """What a graph of one scope of `block_products` makes of its input; weights are constants, as for the kernels."""
    pytest.importorskip("onnx", reason="needs the onnx extra")
    ort = pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    from onnx import TensorProto

    from haarkv.tq_ops.onnx import block_products
    from haarkv.tq_ops.onnx.graph import Graph, StoredWeights, TensorType

    values, g = in_codes(weight), Graph(23)
    coded_weight = block_products.CodedWeight(weight_codes(weight), *weight.shape)
    parts = {part: g.weight(part, tensor_type) for part, tensor_type in coded_weight.types.items()}

    def body(inner, x, **parts):
        return [getattr(block_products, name)(inner, "y", x, coded_weight, parts)]

    g.node("out", "Identity", g.call("call", "Scope", body, x="x", **parts)[0])
    inputs = {"x": TensorType(TensorProto.INT64 if array.dtype == np.int64 else TensorProto.FLOAT, array.shape)}
    stored_weights = StoredWeights("made", dict.fromkeys(parts, 0))
    model = g.model("m", inputs, {"out": TensorType(TensorProto.FLOAT, out)}, stored_weights)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    shared_weights = {part: ort.OrtValue.ortvalue_from_numpy(values[part].numpy()) for part in parts}
    options.add_external_initializers(list(shared_weights), list(shared_weights.values()))
    return torch.from_numpy(ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": array})[0])


def product(backend, weight, x):
    if backend == "onnx":
        return run_scope(weight, x.float().numpy(), "product", (len(x), len(weight)))
    return triton_ops().linear(x.to(DEVICE), placed(weight, DEVICE)).cpu()


def powers(count, seed):
    return 2.0 ** torch.randint(-3, 4, (count,), generator=torch.Generator().manual_seed(seed))


# The rest runs with `make test-cuda-long`.
@pytest.mark.parametrize(
    ("backend", "kind", "tokens"),
    rest(MORE_CUDA, ((*one, n) for one in KINDS for n in (3, 1, 40)), lambda _, case: case[0] == "onnx" or case[2] == 3),
)
def test_a_product_is_that_of_the_restored_weights_but_for_fp32_sums(backend, kind, tokens):
    """Of rows and tokens that fill no tile, and an odd number of blocks; powers of two scale rows and columns exactly."""
    for inputs in (512, 256 if kind in WIDE else 96):
        plain, x = random_blocks(kind, 37, inputs), torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(1))
        for weight, part in ((plain, x.bfloat16()), (plain * powers(37, 2).unsqueeze(1) * powers(inputs, 3), x)):
            numbers, y = weight_numbers(weight).double(), product(backend, weight, part)
            exact, sizes = part.double() @ numbers.T, part.double().abs() @ numbers.abs().T
            assert y.dtype == torch.float32
            assert ((y - exact).abs() <= ERRORS[backend] * sizes).all()


@pytest.mark.parametrize("kind", PLANES)
def test_rows_in_planes_have_the_bits_that_the_file_restores(kind):
    """Several of 8 blocks are restored at a time."""
    triton_ops()
    index = torch.tensor([11, 0, 3, 3])
    for inputs in (512, 256) if kind in WIDE else (512, 96, 32):
        plain = random_blocks(kind, 12, inputs)
        for weight in (plain, plain * powers(12, 2).unsqueeze(1) * powers(inputs, 3)):
            planes = by_planes(weight, DEVICE)
            assert planes.shape == weight.shape
            assert planes.nbytes <= weight.nbytes * 148 / 144
            for dtype in (torch.float32, torch.bfloat16):
                ours = planes.rows(index.to(DEVICE), dtype).cpu()
                assert ours.dtype == dtype
                assert torch.equal(ours.float(), weight.rows(index, dtype).float())


@pytest.mark.parametrize("kind", CODES)
def test_rows_in_codes_are_those_that_the_file_restores(kind):
    """To the bit; numbers with a minimum are rounded at another place."""
    weight, index = random_blocks(kind, 9, 512), torch.tensor([3, 0, 8, 3])
    output, right = run_scope(weight, index.numpy(), "rows", (4, 512)), dense(weight)[index]
    if CODES[kind].minimum:
        assert (output - right).abs().max() <= 2.0**-23 * block_minima(weight).abs().max()
    else:
        assert torch.equal(output, right)


def test_every_exponent_of_mxfp4_is_read():
    data = torch.cat([torch.arange(255, dtype=torch.uint8)[:, None], torch.full((255, 16), 0x72, dtype=torch.uint8)], 1)
    weight = Blocks(data, block_type_named("MXFP4"), torch.float32)
    assert torch.equal(unpack_levels(data[:, None], "MXFP4").numbers(), dense(weight))


def test_other_types_are_restored_on_their_way():
    assert set(CODES) == set(TYPES)
    weight = placed(random_blocks("IQ4_NL", 4, 64), DEVICE)
    assert not isinstance(weight, Blocks)
    assert weight.device.type == DEVICE.type
