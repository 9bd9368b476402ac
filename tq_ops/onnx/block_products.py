"""Graphs that multiply with weights in codes (`block_codes`), or look rows of them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from haarkv.tq_ops.onnx.block_codes import MIDDLE, Codes
from haarkv.tq_ops.onnx.graph import CONTRIB_DOMAIN, Graph, TensorType

_FLOAT = TensorProto.FLOAT
_FP32 = 1  # `accuracy_level`: x stays FP32


@dataclass(frozen=True)
class CodedWeight:
    """A weight [outputs, inputs] outside a graph."""

    codes: Codes
    outputs: int
    inputs: int

    @property
    def types(self) -> dict[str, TensorType]:
        parts = self.codes.parts(self.outputs, self.inputs)
        return {name: TensorType(_element(dtype), shape) for name, (dtype, shape) in parts.items()}


def product(g: Graph, name: str, x: str, weight: CodedWeight, parts: Mapping[str, str]) -> str:
    """`x @ weight.T`: [N, inputs] fp32 -> [N, outputs] fp32, neither rounded; `parts` names the weight's tensors."""
    codes, groups = weight.codes, weight.inputs // weight.codes.group
    if codes.columns:
        x = g.node(f"{name}_x_columns", "Mul", x, parts["columns"])

    def part(word: str, node_name: str, zero: int) -> str:
        inputs = [x, parts[word], parts["scale"]]
        if zero != MIDDLE:
            shape = g.integers([weight.outputs, -(-groups // 2)])
            inputs.append(g.node(f"{node_name}_zero", "ConstantOfShape", shape, value=_zero()))
        return g.node(
            node_name, "MatMulNBits", *inputs, domain=CONTRIB_DOMAIN, K=weight.inputs, N=weight.outputs, bits=4,
            block_size=codes.group, accuracy_level=_FP32,
        )  # fmt: skip

    y = part("lower", f"{name}_lower" if codes.upper or codes.minimum else name, codes.zero)
    if codes.upper:
        upper = g.node(f"{name}_upper_16", "Mul", part("upper", f"{name}_upper", MIDDLE), g.scalar(16.0))
        y = g.node(f"{name}_levels" if codes.minimum else name, "Add", y, upper)
    if codes.minimum:
        by_group = g.reshape(f"{name}_x_groups", x, [-1, groups, codes.group])
        sums = g.node(f"{name}_x_sums", "ReduceSum", by_group, g.integers([-1]), keepdims=0)
        y = g.node(name, "Gemm", sums, parts["minimum"], y, transB=1)
    return y


def rows(g: Graph, name: str, index: str, weight: CodedWeight, parts: Mapping[str, str]) -> str:
    """Rows [N, inputs] fp32, by index [N] int64, of a weight without scales of columns.

    They are gguf's bits or, where there are minima, FP32's neighbours.
    """
    codes = weight.codes

    def gather_rows(word: str) -> str:
        return g.node(f"{name}_{word}", "Gather", parts[word], index)

    def level(word: str, zero: int) -> str:
        octet, sixteen = g.reshape(f"{name}_{word}_octet", gather_rows(word), [0, 0, 0, 1]), g.scalar(16, np.uint8)
        first, second = (g.node(f"{name}_{word}_{op.lower()}", op, octet, sixteen) for op in ("Mod", "Div"))
        both = g.node(f"{name}_{word}_nibbles", "Concat", first, second, axis=-1)
        each = g.reshape(f"{name}_{word}_codes", both, [0, 0, codes.group])
        return g.node(f"{name}_{word}_level", "Sub", g.node(f"{name}_{word}_fp32", "Cast", each, to=_FLOAT), g.scalar(zero))

    whole = level("lower", codes.zero)
    if codes.upper:
        upper = g.node(f"{name}_upper_16", "Mul", level("upper", MIDDLE), g.scalar(16.0))
        whole = g.node(f"{name}_level", "Add", whole, upper)

    def group_column(word: str) -> str:
        return g.reshape(f"{name}_{word}_column", gather_rows(word), [0, 0, 1])

    numbers = g.node(f"{name}_numbers", "Mul", whole, group_column("scale"))
    if codes.minimum:
        numbers = g.node(f"{name}_above", "Add", numbers, group_column("minimum"))
    return g.reshape(name, numbers, [-1, weight.inputs])


def _element(dtype: object) -> int:
    return TensorProto.UINT8 if str(dtype) == "torch.uint8" else _FLOAT


def _zero() -> object:
    return helper.make_tensor("zero", TensorProto.UINT8, [1], [0])
