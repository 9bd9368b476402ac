"""A folder with a model as ONNX graphs: prefill and decode, or ATC's buckets, and one file of weights.

Graphs for Ascend's ATC have static shapes, no functions, and only operators and types that its documentation lists
(`atc_operators.json`). So BF16 is rounded by FP32 arithmetic, rotations are two-dimensional products in FP32, products of Q
and K and of probabilities and V are FP16, and new codes come out as int8, the same bits as uint8.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from haarkv.models.catalog import find_model, open_source, stream_tensors
from haarkv.models.checkpoint import checked_tensors
from haarkv.models.config import ModelConfig
from haarkv.models.qwen3_14b.onnx.model import build
from haarkv.models.qwen3_14b.onnx.scopes import Qwen3Scopes
from haarkv.models.qwen3_14b.onnx.spec import (
    GraphSpec,
    Sizes,
    coded_values,
    require_opset,
    rope_values,
    stored_values,
    weight_offsets,
    weight_types,
)
from haarkv.models.rope import RopeTable
from haarkv.models.weights import checkpoint_shapes
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE
from haarkv.tq_ops.onnx import EXPORT_SUPPORT, FORMAT
from haarkv.tq_ops.onnx.block_codes import CODES
from haarkv.tq_ops.onnx.block_products import CodedWeight
from haarkv.tq_ops.onnx.graph import Graph, StoredWeights, TensorType
from haarkv.tq_ops.weight import Blocks, Weight

ATC_OPSET = 15  # the newest that the documentation lists for every operator used
ATC_DTYPES = ("float16", "float32")
_FLOAT, _FLOAT16, _INT32 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32


@dataclass(frozen=True)
class Bucket:
    """Sizes of one compiled graph: sequences, new tokens of each, and tokens stored before, a multiple of the block size."""

    batch: int
    tokens: int
    context: int

    @property
    def name(self) -> str:
        phase = "decode" if self.tokens == 1 else f"prefill_t{self.tokens}"
        return f"{phase}_b{self.batch}_c{self.context}"

    @property
    def sizes(self) -> Sizes:
        columns = self.context // BLOCK_SIZE
        return Sizes(self.batch, self.tokens, columns, self.batch * columns, BLOCK_SIZE)


BUCKETS = tuple(
    Bucket(batch, tokens, context) for context in (1024, 4096) for batch, tokens in ((1, 128), (1, 512), (1, 1), (8, 1))
)


@dataclass(frozen=True)
class AtcScopes(Qwen3Scopes):
    """The scopes in what ATC's documentation lists."""

    batch: int = 1
    tokens: int = 1

    codes_out: ClassVar[int] = TensorProto.INT8
    centroid_type: ClassVar[type[np.generic]] = np.float16

    def _bf16(self, g: Graph, unit: str) -> str:
        # Veltkamp's splitting: the upper 8 of 24 bits. It rounds to nearest, and a tie not always to even.
        spread = g.node("spread", "Mul", unit, g.scalar(2.0**16 + 1))
        return g.node("rounded", "Sub", spread, g.node("rest", "Sub", spread, unit))

    def _rotate(self, g: Graph, name: str, x: str, rotation: str, heads: int, *, inverse: bool = False) -> str:
        dim = self.config.heads.head_dim
        product = g.node(f"{name}_rows", "Gemm", g.reshape(f"{name}_flat", x, [-1, dim]), rotation, transB=int(inverse))
        # [B, Q, Hkv, D] of new vectors, or the queries [B, Hkv, G * Q, D].
        second = self.tokens if name == "rotated" else heads
        return g.reshape(name, product, [self.batch, second, -1, dim])

    def _codes(self, g: Graph, byte: str) -> str:
        negative = g.node("is_negative", "GreaterOrEqual", byte, g.scalar(128, np.int32))
        signed_byte = g.node("signed", "Where", negative, g.node("less_256", "Add", byte, g.scalar(-256, np.int32)), byte)
        return g.node("codes", "Cast", signed_byte, to=TensorProto.INT8)

    def _indices(self, g: Graph, side: str, past: str, new: str) -> str:
        signed_bytes = g.node(f"new_{side}_signed", "Cast", new, to=_INT32)
        plus_256 = g.node(f"new_{side}_plus_256", "Add", signed_bytes, g.scalar(256, np.int32))
        negative = g.node(f"new_{side}_is_negative", "Less", signed_bytes, g.scalar(0, np.int32))
        byte = g.node(f"new_{side}_byte", "Where", negative, plus_256, signed_bytes)
        return g.node(f"{side}_index", "Concat", g.node(f"past_{side}_index", "Cast", past, to=_INT32), byte, axis=2)

    def _product(self, g: Graph, name: str, a: str, b: str) -> str:
        narrow = g.node(f"{name}_fp16", "MatMul", g.node(f"{name}_left", "Cast", a, to=_FLOAT16), b)
        return g.node(name, "Cast", narrow, to=_FLOAT)


def atc_plan(bucket: Bucket, span: range, *, embed: bool, head: bool, metadata: tuple[tuple[str, str], ...]) -> GraphSpec:
    """The graph of one bucket."""
    return GraphSpec(span, embed, head, ATC_OPSET, bucket.sizes, functions=False, static=True, metadata=metadata)


def command_line(bucket: Bucket, shapes: dict[str, tuple[int | str, ...]]) -> str:
    """ATC's command line for one bucket."""
    input_shapes = ";".join(f"{name}:{','.join(map(str, shape))}" for name, shape in shapes.items())
    return (
        f'atc --framework=5 --model={bucket.name}.onnx --output={bucket.name} --soc_version="$SOC_VERSION" '
        f"--input_format=ND --precision_mode=must_keep_origin_dtype --input_shape={shlex.quote(input_shapes)}"
    )


ABOUT, WEIGHTS, COMMANDS = "export.json", "weights.bin", "atc.sh"
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_COPIED_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

Progress = Callable[[int, int], None]  # (weights written, weights in all)


@dataclass(frozen=True)
class Export:
    """What to export.

    Attributes:
        model: `tiny`, a folder in Hugging Face format, or `random:SIZE`.
        span: layers; the first brings the embedding, the last the head.
        dtype: of weights and hidden states.
        atc: for Ascend's ATC.
        version: of this project.
        restore: restore all weights in blocks of a GGUF file, as graphs for ATC do.
    """

    model: str
    config: ModelConfig
    span: range
    dtype: str
    opset: int
    atc: bool
    version: str
    restore: bool = False

    def __post_init__(self) -> None:
        if self.atc and self.dtype not in ATC_DTYPES:
            raise InputError(f"ATC's documentation lists no {self.dtype}; give --dtype {' or '.join(ATC_DTYPES)}")
        if self.atc and self.opset != ATC_OPSET:
            raise InputError(f"graphs for ATC are of opset {ATC_OPSET}, not {self.opset}; leave out --opset")
        require_opset(self.opset)

    @property
    def embed(self) -> bool:
        return self.span.start == 0

    @property
    def head(self) -> bool:
        return self.span.stop == self.config.num_layers

    @property
    def kept_types(self) -> tuple[str, ...]:
        """Types of blocks that graphs multiply with."""
        return () if self.restore or self.atc else tuple(CODES)

    @cached_property
    def blocks(self) -> dict[str, str]:
        """Type of the blocks of each weight that lies in some, by Hugging Face's name."""
        source = open_source(self.model)
        tensors = {} if source is None else checked_tensors(source, self.config)
        weight_names = weight_types(Qwen3Scopes(self.config), GraphSpec(self.span, self.embed, self.head, self.opset))
        return {name: kind for name in weight_names if name in tensors and (kind := tensors[name].blocks) is not None}

    def four_bit_weights(self) -> dict[str, CodedWeight]:
        shapes, blocks = checkpoint_shapes(self.config), self.blocks
        return {
            name: CodedWeight(CODES[kind], *shapes[name]) for name, kind in blocks.items() if kind in self.kept_types
        }  # fmt: skip

    def about(self) -> dict[str, str]:
        """Metadata of every graph."""
        types = sorted(set(self.blocks.values()) & set(self.kept_types))
        return {
            "haarkv.version": self.version,
            "haarkv.model": self.model,
            "haarkv.layers": f"{self.span.start}:{self.span.stop} of {self.config.num_layers}",
            "haarkv.dtype": self.dtype,
            "haarkv.kv_format": FORMAT.name,
            "haarkv.bytes_per_vector": f"{FORMAT.bytes_per_vector(self.config.heads.head_dim):g}",
            "haarkv.rotation_sha256": rotation_sha256(self.span, self.config.heads.head_dim),
            **({"haarkv.blocks": " ".join(types)} if types else {}),
        }


def rotation_sha256(span: range, head_dim: int) -> str:
    """SHA-256 of the rotations of some layers: their BF16 bits, little-endian, row by row, layer after layer."""
    digest, transform = hashlib.sha256(), EXPORT_SUPPORT.built_in(head_dim).transform
    for layer in span:
        digest.update(transform.matrix(layer, head_dim).view(torch.uint16).numpy().astype("<u2").tobytes())
    return digest.hexdigest()


def write_export(folder: Path, export: Export, progress: Progress | None = None) -> list[str]:
    """Write everything into an empty folder, with one weight at a time in memory. Returns names of the graphs' files.

    Raises:
        InputError: a checkpoint that cannot be read, or a weight that is not finite in this dtype.
    """
    scopes = Qwen3Scopes(export.config, export.dtype, blocks=export.four_bit_weights())
    whole = GraphSpec(export.span, export.embed, export.head, export.opset)
    types = weight_types(scopes, whole)
    weight_file = StoredWeights(WEIGHTS, weight_offsets(types))
    rope = RopeTable(export.config.common.attention.rope, export.config.max_position_embeddings)
    weights = stream_tensors(export.model, export.config, TORCH_DTYPES[export.dtype], export.kept_types)
    tensors = chain(
        chain.from_iterable(_weight_tensors(name, weight) for name, weight in weights), rope_values(rope),
        stored_values(scopes, whole, rope.device).items(),
    )  # fmt: skip
    _write_weights(folder / WEIGHTS, export.dtype, tensors, types, weight_file, progress)
    graphs = dict(_atc_graphs(export, weight_file, folder) if export.atc else _graphs(export, scopes, weight_file))
    for name, model in graphs.items():
        (folder / name).write_bytes(model.SerializeToString())
        onnx.checker.check_model(str(folder / name), full_check=True)
    source = find_model(export.model)
    for name in _COPIED_FILES if source is not None else ():
        if (source / name).is_file():  # type: ignore[operator]
            shutil.copyfile(source / name, folder / name)  # type: ignore[operator]
    about = {
        **export.about(),
        "opset": export.opset,
        "weights": WEIGHTS,
        "graphs": list(graphs),
        "files": sorted(path.name for path in folder.iterdir()),
        "config": _sizes(export.config),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return list(graphs)


def _weight_tensors(name: str, weight: Weight) -> Iterator[tuple[str, Tensor]]:
    return coded_values(name, weight) if isinstance(weight, Blocks) else iter([(name, weight)])


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """What a program that runs the graphs needs of the config."""
    return {
        "model_type": config.model_type, "num_layers": config.num_layers, **config.heads._asdict(),
        "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "tied": config.tied,
        "max_position_embeddings": config.max_position_embeddings, "eos_token_ids": config.eos_token_ids,
    }  # fmt: skip


def _graphs(export: Export, scopes: Qwen3Scopes, weight_file: StoredWeights) -> Iterator[tuple[str, onnx.ModelProto]]:
    about = tuple(export.about().items())
    for phase, sizes in (("prefill", Sizes()), ("decode", Sizes(tokens=1))):
        plan = GraphSpec(export.span, export.embed, export.head, export.opset, sizes, metadata=about)
        yield f"{phase}.onnx", build(scopes, plan, weight_file)


def _atc_graphs(export: Export, weight_file: StoredWeights, folder: Path) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Every bucket's graph; writes the script that compiles them."""
    lines = ["#!/bin/sh", "set -eu", ': "${SOC_VERSION:?set it to the processor, as Ascend910B1}"', 'cd "$(dirname "$0")"']
    for bucket in BUCKETS:
        scopes = AtcScopes(export.config, export.dtype, batch=bucket.batch, tokens=bucket.tokens)
        plan = atc_plan(bucket, export.span, embed=export.embed, head=export.head, metadata=tuple(export.about().items()))
        model = build(scopes, plan, weight_file)
        shapes = {
            value.name: tuple(size.dim_value for size in value.type.tensor_type.shape.dim) for value in model.graph.input
        }
        lines.append(command_line(bucket, shapes))
        yield f"{bucket.name}.onnx", model
    (folder / COMMANDS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_weights(
    path: Path, dtype: str, tensors: Iterable[tuple[str, Tensor]], types: dict[str, TensorType], weight_file: StoredWeights,
    progress: Progress | None,
) -> None:  # fmt: skip
    done = 0
    with path.open("wb") as file:
        for name, tensor in tensors:
            if name not in types:
                continue
            if not all(torch.isfinite(edge) for edge in tensor.aminmax()):
                raise InputError(f"the weight {name} is not finite in {dtype}; give another --dtype or fetch it again")
            file.seek(weight_file.offsets[name])
            file.write(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data)
            done += 1
            if progress:
                progress(done, len(types))
    if done != len(types):
        raise ValueError(f"{len(types) - done} weights were not written")
