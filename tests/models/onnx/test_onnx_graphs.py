"""ONNX graphs: that they check, how they are named, what their cache takes, and that no history is ever rotated back."""

from functools import partial

import numpy as np
import pytest
import torch
from levels import compare_stored

pytest.importorskip("onnxruntime", reason="needs the onnx extra")

import onnx
import onnxruntime as ort
from onnx import TensorProto, checker, shape_inference
from onnx.inliner import inline_local_functions
from small_models import SMALL as CONFIG
from small_models import resize_config, small_model

from haarkv.codebooks import haar_rotation
from haarkv.models.qwen3_14b.onnx.model import NEWEST_OPSET, OLDEST_OPSET, GraphSpec, build, stored_values, weight_values
from haarkv.models.qwen3_14b.onnx.scopes import Qwen3Scopes
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.onnx.graph import Graph, TensorType

NUMBERS = {"batch": 2, "tokens": 3, "columns": 4, "blocks": 9, "block_size": 128}
WHOLE = range(CONFIG.num_layers)


# -- Small models as graphs, and one run of them over inputs at random --------------------------------------------------------
def build_graph(
    config=CONFIG, dtype="float32", scopes=None, span=None, embed=True, head=True, opset=23, **plan
) -> onnx.ModelProto:
    """A model whose weights are inputs; whole unless a span is given."""
    span = range(config.num_layers) if span is None else span
    return build(scopes or Qwen3Scopes(config, dtype), GraphSpec(span, embed, head, opset, **plan))


def graph_weights(model) -> dict[str, np.ndarray]:
    """FP32 weights as a graph of `tq4` takes them."""
    whole = GraphSpec(range(model.config.num_layers), embed=True, head=True, opset=23)
    kv_values = stored_values(Qwen3Scopes(model.config), whole)
    return {name: tensor.numpy() for name, tensor in (*weight_values(model), *kv_values.items())}


def open_graph(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level, options.enable_mem_reuse = 1, 3, False
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def random_feed(session: ort.InferenceSession, weights, sizes: dict[str, int], past_lens) -> dict[str, np.ndarray]:
    """The weights, and all other inputs at random: tokens, and a cache whose every byte and scale is valid."""
    rng = np.random.default_rng(0)
    feed = {}
    for value in session.get_inputs():
        shape = [sizes.get(size, size) for size in value.shape]
        if value.name == "input_ids":
            feed[value.name] = rng.integers(0, CONFIG.vocab_size, shape)
        elif value.name == "hidden":
            feed[value.name] = rng.standard_normal(shape).astype(np.float16 if "16" in value.type else np.float32)
        elif value.name == "past_lens":
            feed[value.name] = np.array(past_lens, np.int32)
        elif value.name == "block_table":
            feed[value.name] = rng.permutation(sizes["blocks"])[: np.prod(shape)].reshape(shape).astype(np.int32)
        elif value.name == "last_rows":
            feed[value.name] = (np.arange(1, shape[0] + 1) * sizes["tokens"] - 1).astype(np.int32)
        elif value.name.endswith("codes"):
            feed[value.name] = rng.integers(0, 256, shape, dtype=np.uint8)
        elif value.name.endswith("scale"):
            feed[value.name] = rng.uniform(0.5, 2.0, shape).astype(np.float16)
        else:
            feed[value.name] = weights[value.name]
    return feed


def run(model: onnx.ModelProto, weights, sizes: dict[str, int], past_lens) -> dict[str, np.ndarray]:
    """Every output of a graph by name."""
    session = open_graph(model)
    feed = random_feed(session, weights, sizes, past_lens)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


# -- Graphs ---------------------------------------------------------------------------------------------------------------
def require_sound(model):
    checker.check_model(model, full_check=True)
    shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("opset", [OLDEST_OPSET, 23, NEWEST_OPSET])
def test_prefill_and_decode_pass_the_checker_and_shape_inference(dtype, opset):
    for one_token in (False, True):
        require_sound(build_graph(dtype=dtype, opset=opset, one_token=one_token))


def test_graphs_of_every_format_and_of_tokens_in_bf16_pass_them_too():
    synthetic = calibration(CONFIG.num_layers, CONFIG.heads.num_kv_heads, CONFIG.heads.head_dim)
    for layers in ({0: "k=lr2,v=tq2", 1: "k=lr3,v=tq3"}, {0: "k=lr4,v=tq5", 1: "k=lr5,v=tq6"}):
        plan = KVSpec("k=tq8,v=tq4", layers=layers, calibration=synthetic).plan(CONFIG.num_layers)
        for has_stretches in (False, True):
            require_sound(build_graph(formats=plan.layers, kept=(3, 2), has_stretches=has_stretches))


def test_two_constants_of_one_name_are_an_error():
    def scope(g, x):
        for value in (1.0, 2.0):
            x = g.node(f"plus_{value}", "Add", x, g.constant("number", np.array(value, np.float32)))
        return [x]

    with pytest.raises(ValueError, match="two constants are called number"):
        Graph(23).call("twice", "Twice", scope, x="x")


# -- The cache -----------------------------------------------------------------------------------------------------------
def rotated_back(model):
    """Names of float values as large as the un-packed history that a product with a rotation has gone into, by a run.

    Codes are integers: what was chosen in the rotated domain is followed no further. Also the number of values so large.
    """
    model = inline_local_functions(model)
    # NumPy has no BF16; the numbers of such a cast are as many as those of the cast back, which follows it.
    bf16 = [node for node in model.graph.node if any(a.i == TensorProto.BFLOAT16 for a in node.attribute if a.name == "to")]
    unseen = {value.name for value in model.graph.output} | {name for node in bf16 for name in node.output}
    outputs = [name for node in model.graph.node for name in node.output if name not in unseen]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    values = run(model, graph_weights(small_model(CONFIG)), NUMBERS | {"tokens": 1}, [200, 9])
    history = 2 * CONFIG.heads.num_kv_heads * 4 * 128 * CONFIG.heads.head_dim
    rotated_names, large = set(), []
    for node in model.graph.node:
        for name in node.output:
            is_float = name not in values or values[name].dtype.kind == "f"
            if is_float and any(i in rotated_names or i.endswith(".rotation") for i in node.input):
                rotated_names.add(name)
            if is_float and name in values and values[name].size >= history:
                large.append(name)
    return [name for name in large if name in rotated_names], len(large)


def test_no_node_of_decode_holds_a_history_that_was_rotated_back():
    wrong, large = rotated_back(build_graph(one_token=True))
    assert wrong == []
    assert large >= 2 * len(WHOLE)  # centroids of K and of V are that large, in the rotated domain


def test_rotating_k_back_would_be_seen():
    class Careless(Qwen3Scopes):
        def _centroids(self, g, side, codes, new_codes, block_table):
            rotated = super()._centroids(g, side, codes, new_codes, block_table)
            return self._rotate(g, f"{side}_own_domain", rotated, f"{side}_rotation", inverse=True)

    wrong, _ = rotated_back(build_graph(scopes=Careless(CONFIG), one_token=True))
    assert sum("k_own_domain" in name for name in wrong) >= len(WHOLE)


def test_memory_behind_the_end_may_hold_anything():
    session = open_graph(build_graph())
    feed = random_feed(session, graph_weights(small_model(CONFIG)), NUMBERS, [130, 5])
    clean = session.run(None, feed)
    for name in [name for name in feed if name.endswith("scale")]:
        table = feed["block_table"]
        dirty = feed[name].copy()
        dirty[table[0, 1], :, 2:], dirty[table[0, 2:]] = np.nan, np.nan
        dirty[table[1, 0], :, 5:], dirty[table[1, 1:]] = np.inf, np.nan
        feed[name] = dirty
    for before, after in zip(clean, session.run(None, feed), strict=True):
        np.testing.assert_array_equal(before, after)


# -- Quantize ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_quantize_stores_what_the_format_stores(head_dim):
    """Ordinary, tiny, huge and zero vectors."""
    config = resize_config(CONFIG, head_dim=head_dim, num_kv_heads=2)
    g = Graph(23)
    codes, scale = g.call("q", "Quantize_tq4", partial(Qwen3Scopes(config).quantize, side="k"), x="x", rotation="rotation")
    x = torch.randn(24, 5, 2, head_dim, generator=torch.Generator().manual_seed(1))
    x *= torch.tensor([1.0, 1e-4, 60.0, 1e-30, 1e30, 1e-38, 3e4, 1e6]).repeat(3).view(24, 1, 1, 1)
    x[3, 0], x[4, 1, 0], x[4, 1, 0, 3] = 0.0, 0.0, 1e-42
    shape = (24, 5, 2)
    inputs = {"x": TensorType(1, (*shape, head_dim)), "rotation": TensorType(1, (head_dim, head_dim))}
    outputs = {codes: TensorType(TensorProto.UINT8, (*shape, head_dim // 2)), scale: TensorType(TensorProto.FLOAT16, shape)}
    session = open_graph(g.model("quantize", inputs, outputs, None))
    feed = {"x": x.numpy(), "rotation": haar_rotation(7, head_dim).float().numpy()}
    ours = dict(zip(("codes", "scale"), map(torch.from_numpy, session.run(None, feed)), strict=True))
    tq4 = formats.get("tq4")
    theirs = tq4.quantize(x, 7)
    different = tq4.levels(ours) != tq4.levels(theirs)
    assert compare_stored(tq4, 7, theirs, ours, x, 1e-6)[0].unexplained == 0
    assert different.float().mean() < 1e-4
    same = ~different.any(-1)
    # Lengths are summed in another order: the scale may fall to the other FP16 neighbour.
    ulps = (ours["scale"].view(torch.int16).int() - theirs["scale"].view(torch.int16).int()).abs()[same]
    assert ulps.max() <= 1
    assert (ulps == 0).float().mean() > 0.99
    assert (ours["scale"][3, 0] == 0).all()
    assert (ours["scale"][4] == 65504).sum() == 9


# -- Other dtypes --------------------------------------------------------------------------------------------------------
def test_a_layer_in_fp16_comes_close_to_fp32():
    weights, layer = graph_weights(small_model(CONFIG)), {"span": range(1, 2), "embed": False, "head": False}
    exact = run(build_graph(**layer), weights, NUMBERS, [200, 9])["hidden_out"]
    model = build_graph(dtype="float16", **layer)
    element = {value.name: value.type for value in open_graph(model).get_inputs()}
    narrow = {n: w.astype(np.float16) if element.get(n) == "tensor(float16)" else w for n, w in weights.items()}
    hidden = run(model, narrow, NUMBERS, [200, 9])["hidden_out"]
    error = np.linalg.norm(hidden - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    # A level of a new token that falls to the other side of a boundary makes the largest; most tokens have none.
    assert 0 < np.median(error) < 2.0**-8
    assert error.max() < 2.0**-4
