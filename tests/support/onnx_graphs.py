"""What the tests of the ONNX graphs share: small models as graphs, and one run of them over inputs at random."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("onnx", reason="needs the onnx extra")
pytest.importorskip("onnxruntime", reason="needs the onnx extra")

import onnx
import onnxruntime as ort
from onnx import TensorProto, checker, helper, shape_inference
from small_models import SMALL, small_model

from haarkv.models.qwen3_14b.onnx.model import GraphSpec, build, stored_values, weight_values
from haarkv.models.qwen3_14b.onnx.scopes import Qwen3Scopes

CONFIG = SMALL
WHOLE = range(CONFIG.num_layers)


def build_graph(
    config=CONFIG, dtype="float32", scopes=None, span=None, embed=True, head=True, opset=23, **plan
) -> onnx.ModelProto:
    """A model whose weights are inputs; whole unless a span is given."""
    span = range(config.num_layers) if span is None else span
    return build(scopes or Qwen3Scopes(config, dtype), GraphSpec(span, embed, head, opset, **plan))


def graph_weights(model) -> dict[str, np.ndarray]:
    """FP32 weights as a graph of `tq4` takes them."""
    whole = GraphSpec(range(model.config.num_layers), embed=True, head=True, opset=23)
    kv_values = stored_values(Qwen3Scopes(model.config), whole, torch.device("cpu"))
    return {name: tensor.numpy() for name, tensor in (*weight_values(model), *kv_values.items())}


def open_graph(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level, options.enable_mem_reuse = 1, 3, False
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def random_feed(session: ort.InferenceSession, sizes: dict[str, int], past_lens, seed=0) -> dict[str, np.ndarray]:
    """Inputs at random, but for weights: tokens, and a cache whose every byte and scale is valid."""
    rng = np.random.default_rng(seed)
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
    return feed


def run(
    model: onnx.ModelProto, weights: dict[str, np.ndarray], sizes: dict[str, int], past_lens, seed=0
) -> dict[str, np.ndarray]:
    """Every output of a graph by name."""
    session = open_graph(model)
    input_names = {value.name for value in session.get_inputs()}
    feed = random_feed(session, sizes, past_lens, seed) | {
        name: value for name, value in weights.items() if name in input_names
    }
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


__all__ = [
    "CONFIG",
    "WHOLE",
    "GraphSpec",
    "Qwen3Scopes",
    "TensorProto",
    "build",
    "build_graph",
    "checker",
    "graph_weights",
    "helper",
    "onnx",
    "open_graph",
    "ort",
    "random_feed",
    "run",
    "shape_inference",
    "small_model",
]  # fmt: skip
