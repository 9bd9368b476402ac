"""Graphs for Ascend's ATC: static shapes, no functions, and nothing but operators and types that its documentation lists.

What is listed stands in `onnx_atc_operators.json`, with the pages it was read from. Where the list lacks something that the
other graphs use, these do without: BF16 is rounded by FP32 arithmetic, rotations are two-dimensional products in FP32,
products of Q and K and of probabilities and V are FP16, and new codes come out as int8, the same bits as uint8.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from onnx import TensorProto

from haarkv.models.qwen3_14b.onnx.scopes import Qwen3Scopes
from haarkv.models.qwen3_14b.onnx.spec import GraphSpec, Sizes
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE
from haarkv.tq_ops.onnx.graph import Graph

ATC_OPSET = 15  # the newest that the documentation lists for every operator used
ATC_DTYPES = ("float16", "float32")
_FLOAT, _FLOAT16, _INT32 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32


@dataclass(frozen=True)
class Bucket:
    """The sizes of one compiled graph.

    Attributes:
        batch: sequences.
        tokens: new tokens a sequence; 1 of a decode step.
        context: tokens that may have been stored before, a multiple of the block size.
    """

    batch: int
    tokens: int
    context: int

    @property
    def name(self) -> str:
        """Of its files."""
        phase = "decode" if self.tokens == 1 else f"prefill_t{self.tokens}"
        return f"{phase}_b{self.batch}_c{self.context}"

    @property
    def sizes(self) -> Sizes:
        """A cache just large enough for all sequences."""
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

    def _rotated(self, g: Graph, name: str, x: str, rotation: str, heads: int, *, back: bool = False) -> str:
        dim = self.config.heads.head_dim
        product = g.node(f"{name}_rows", "Gemm", g.reshape(f"{name}_flat", x, [-1, dim]), rotation, transB=int(back))
        # [B, Q, Hkv, D] of new vectors, or the queries [B, Hkv, G * Q, D].
        second = self.tokens if name == "rotated" else heads
        return g.reshape(name, product, [self.batch, second, -1, dim])

    def _codes(self, g: Graph, byte: str) -> str:
        negative = g.node("is_negative", "GreaterOrEqual", byte, g.scalar(128, np.int32))
        signed = g.node("signed", "Where", negative, g.node("less_256", "Add", byte, g.scalar(-256, np.int32)), byte)
        return g.node("codes", "Cast", signed, to=TensorProto.INT8)

    def _indices(self, g: Graph, side: str, past: str, new: str) -> str:
        signed = g.node(f"new_{side}_signed", "Cast", new, to=_INT32)
        raised = g.node(f"new_{side}_plus_256", "Add", signed, g.scalar(256, np.int32))
        negative = g.node(f"new_{side}_is_negative", "Less", signed, g.scalar(0, np.int32))
        byte = g.node(f"new_{side}_byte", "Where", negative, raised, signed)
        return g.node(f"{side}_index", "Concat", g.node(f"past_{side}_index", "Cast", past, to=_INT32), byte, axis=2)

    def _product(self, g: Graph, name: str, a: str, b: str) -> str:
        narrow = g.node(f"{name}_fp16", "MatMul", g.node(f"{name}_left", "Cast", a, to=_FLOAT16), b)
        return g.node(name, "Cast", narrow, to=_FLOAT)


def atc_plan(bucket: Bucket, span: range, *, embed: bool, head: bool, metadata: tuple[tuple[str, str], ...]) -> GraphSpec:
    """What one bucket's graph holds."""
    return GraphSpec(span, embed, head, ATC_OPSET, bucket.sizes, functions=False, static=True, metadata=metadata)


def command_line(bucket: Bucket, shapes: dict[str, tuple[int | str, ...]]) -> str:
    """How ATC compiles one bucket's graph; the processor's name is the caller's `$SOC_VERSION`."""
    wanted = ";".join(f"{name}:{','.join(map(str, shape))}" for name, shape in shapes.items())
    return (
        f'atc --framework=5 --model={bucket.name}.onnx --output={bucket.name} --soc_version="$SOC_VERSION" '
        f"--input_format=ND --precision_mode=must_keep_origin_dtype --input_shape={shlex.quote(wanted)}"
    )
