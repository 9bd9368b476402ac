"""How graphs pack K and V into levels: behind a rotation, or keys behind learned coordinates; K and V may differ.

Widths, tables and columns are a format's `Description`; matrices are weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from haarkv.codebooks import cubic
from haarkv.codebooks.learned import EIGHTHS
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.learned import GAINS
from haarkv.tq_ops.formats.packing import eighth_widths, planes
from haarkv.tq_ops.formats.rotated import Description
from haarkv.tq_ops.onnx import FORMAT
from haarkv.tq_ops.onnx.block_products import CodedWeight
from haarkv.tq_ops.onnx.graph import Graph

_FLOAT, _INT32 = TensorProto.FLOAT, TensorProto.INT32
CPU = torch.device("cpu")
# Vectors with larger or smaller coordinates are first multiplied by a power of two, which is exact: squares stay in FP32.
_LARGE, _SMALL, _LIFT = 2.0**40, 2.0**-40, 2.0**96
_COORDINATES = ("mean", "forward", "rows", "weights")


def graph_name(kv_format: KVFormat, head_dim: int) -> str:
    """The name of a format's functions and tables: K and V in one format may have different scale rules, so it says which."""
    description = kv_format.description(head_dim)
    return f"{kv_format.name}_along" if description and description.along else kv_format.name


@dataclass(frozen=True)
class LevelScopes:
    """The scopes that know bits.

    Attributes:
        dtype: of weights and hidden states, a key of `scopes.DTYPES`.
        k, v: how K and V are stored.
        blocks: weights in codes of four bits, by their Hugging Face names.
    """

    config: ModelConfig
    dtype: str = "float32"
    k: KVFormat = FORMAT
    v: KVFormat = FORMAT
    blocks: Mapping[str, CodedWeight] = field(default_factory=dict)

    def name(self, side: str) -> str:
        """The format of a side, "k" or "v", in a graph."""
        return graph_name(self.k if side == "k" else self.v, self.config.heads.head_dim)

    def description(self, side: str) -> Description:
        """The format of a side."""
        description = (self.k if side == "k" else self.v).description(self.config.heads.head_dim)
        assert description is not None, "only formats of levels have graphs"
        return description

    def code_bytes(self, side: str) -> int:
        """Bytes of a vector's codes."""
        description = self.description(side)
        return description.head_dim * description.bits // 8

    def has_learned(self, side: str) -> bool:
        """Whether a side has learned coordinates in place of a rotation."""
        return self.description(side).transform.coordinates is not None

    def stored(self, layer: int) -> dict[str, tuple[str, Tensor]]:
        """Rotations and coordinates of K and V in a layer, fp32: a scope's word -> name and tensor."""
        rotations = {self.description(side).transform for side in "kv" if not self.has_learned(side)}
        tensors: dict[str, tuple[str, Tensor]] = {}
        for side in "kv":
            transform = self.description(side).transform
            if transform.coordinates:
                coordinates = transform.coordinates(layer).to(CPU)
                for word in _COORDINATES:
                    name = f"{side}_{word}"
                    tensors[name] = f"layers.{layer}.{name}", getattr(coordinates, word).contiguous()
            else:
                word, rotation = f"{side}_rotation", transform.on(layer, self.config.heads.head_dim, CPU)
                tensors[word] = f"layers.{layer}.{word if len(rotations) > 1 else 'rotation'}", rotation
        return tensors

    # -- From vectors to codes -----------------------------------------------------------------------------------------
    def quantize(self, g: Graph, x: str, rotation: str, *, side: str) -> list[str]:
        """K or V behind a rotation: [B, Q, Hkv, D] fp32 -> codes [B, Q, Hkv, bytes] uint8, scale [B, Q, Hkv] fp16.

        A vector that is not finite gets a scale of NaN.
        """
        description = self.description(side)
        unit, norm, lift = self._unit(g, x)
        y = self._rotate(g, "rotated", self._bf16(g, unit), rotation)
        level = self._level(g, y, side, np.array(description.boundaries, np.float32))
        centroid = g.node("chosen", "Gather", self._centroid_table(g, side), level)
        if description.along:
            inner_product = g.reduce("along", "ReduceSum", g.node("along_each", "Mul", centroid, y))
            some = g.node("is_along", "Greater", inner_product, g.scalar(0.0))
            length = g.node("along_or_1", "Where", some, inner_product, g.scalar(1.0))
        else:
            square = g.reduce("chosen_square", "ReduceSum", g.node("square", "Mul", centroid, centroid))
            length = g.node("chosen_norm", "Sqrt", square)
        return [self._packed(g, level, side), self._scale(g, norm, g.node("norm_of_x", "Div", norm, lift), length)]

    def quantize_learned(self, g: Graph, x: str, mean: str, forward: str, weights: str, *, side: str) -> list[str]:
        """The same behind learned coordinates, at the best of the sizes `GAINS`."""
        heads, dim = self.config.heads.num_kv_heads, self.config.heads.head_dim
        unit, norm, lift = self._unit(g, g.node("shifted", "Sub", x, mean))
        rows = g.reshape("unit_rows", self._bf16(g, unit), [0, 0, heads, 1, dim])
        y = g.reshape("y", g.node("y_rows", "MatMul", rows, forward), [0, 0, heads, dim])
        square = g.node("y_square", "Mul", y, y)
        rho = g.node("rho", "Sqrt", g.reduce("mean_square", "ReduceMean", square))
        length = g.node("length", "Sqrt", g.reduce("length_square", "ReduceSum", g.node("weighted", "Mul", square, weights)))
        some = g.node("is_off_the_mean", "Greater", rho, g.scalar(0.0))
        t = g.node("t", "Div", y, g.node("rho_or_1", "Where", some, rho, g.scalar(1.0)))
        best: list[str] = []
        for number, gain in enumerate(GAINS):
            candidate = g.call(
                f"gain_{number}", f"Gain_{self.name(side)}", lambda inner, **by: self.at_gain(inner, **by, side=side),
                t=t, gain=g.scalar(gain), weights=weights,
            )  # fmt: skip
            if best:
                nearer = g.node(f"nearer_{number}", "Greater", candidate[2], best[2])
                words = ("levels", "kept", "fit")
                best = [
                    g.node(f"{word}_{number}", "Where", nearer, new, old)
                    for word, new, old in zip(words, candidate, best, strict=True)
                ]
            else:
                best = list(candidate)
        length_of_x = g.node("length_of_x", "Mul", g.node("norm_of_x", "Div", norm, lift), length)
        return [self._packed(g, best[0], side), self._scale(g, norm, length_of_x, g.node("kept_length", "Sqrt", best[1]))]

    def at_gain(self, g: Graph, t: str, gain: str, weights: str, *, side: str) -> list[str]:
        """Levels [B, Q, Hkv, D] int32 of coordinates at a size, the weighted square of their values, and how these fit."""
        widths = eighth_widths(self.description(side).columns)
        tables = np.full((EIGHTHS, 2 ** max(widths) - 1), np.inf, np.float32)
        for table, bits in zip(tables, widths, strict=True):
            table[: 2**bits - 1] = cubic.boundaries(bits).numpy()
        level = self._level(g, g.node("sized", "Mul", t, gain), side, tables)
        values = self._cubic(g, "restored", side, level)
        weighted_values = g.node("restored_weighted", "Mul", values, weights)
        inner_product = g.reduce("along", "ReduceSum", g.node("along_each", "Mul", weighted_values, t))
        square = g.reduce("kept", "ReduceSum", g.node("kept_each", "Mul", weighted_values, values))
        return [level, square, g.node("fit", "Div", g.node("along_squared", "Mul", inner_product, inner_product), square)]

    def _unit(self, g: Graph, x: str) -> tuple[str, str, str]:
        """x / norm and norm, both of `x * lift`; lift is a power of two, 1 for ordinary vectors."""
        largest = g.reduce("largest", "ReduceMax", g.node("magnitude", "Abs", x))
        small = g.node("is_small", "Less", largest, g.scalar(_SMALL))
        small_lift = g.node("raise", "Where", small, g.scalar(_LIFT), g.scalar(1.0))
        large = g.node("is_large", "Greater", largest, g.scalar(_LARGE))
        lift = g.node("lift_by", "Where", large, g.scalar(1 / _LIFT), small_lift)
        lifted_x = g.node("lifted", "Mul", x, lift)
        norm = g.node("norm", "Sqrt", g.reduce("sum_square", "ReduceSum", g.node("lifted_square", "Mul", lifted_x, lifted_x)))
        some = g.node("is_some", "Greater", norm, g.scalar(0.0))
        divisor = g.node("divisor", "Where", some, norm, g.scalar(1.0))
        return g.node("unit", "Div", lifted_x, divisor), norm, lift

    def _bf16(self, g: Graph, unit: str) -> str:
        """Numbers of at most 1, rounded to BF16 and kept in FP32."""
        return g.node("rounded", "Cast", g.node("bf16", "Cast", unit, to=TensorProto.BFLOAT16), to=_FLOAT)

    def _rotate(self, g: Graph, name: str, x: str, rotation: str, *, inverse: bool = False) -> str:
        """`x @ rotation`, or `x @ rotation.T` on the way back: [.., D] fp32."""
        matrix = g.node(f"{name}_by", "Transpose", rotation, perm=[1, 0]) if inverse else rotation
        return g.node(name, "MatMul", x, matrix)

    def _level(self, g: Graph, y: str, side: str, boundaries: np.ndarray) -> str:
        """Number of boundaries that each coordinate reaches, int32: one comparison a bit, the highest first.

        `boundaries`: [2**bits - 1], or such a row for each of equal parts of a vector.
        """
        name, most, dim = self.name(side), boundaries.shape[-1], self.config.heads.head_dim
        rows = np.repeat(np.arange(len(boundaries)), dim // len(boundaries)) if boundaries.ndim > 1 else None
        table = g.constant(f"boundaries_{name}", boundaries.reshape(-1))
        top = (most + 1) // 2
        middle = boundaries[top - 1] if rows is None else boundaries[rows, top - 1]
        reaches = g.node(f"reaches_{top}", "GreaterOrEqual", y, g.constant(f"middle_{name}", middle))
        level = g.node(f"bit_{top}", "Where", reaches, g.scalar(top, np.int32), g.scalar(0, np.int32))
        for step in (2**bit for bit in reversed(range(top.bit_length() - 1))):
            before = np.array(step - 1 if rows is None else rows * most + step - 1, np.int32)
            edge_at = g.node(f"next_{step}", "Add", level, g.constant(f"before_{step}_{name}", before))
            reaches = g.node(f"reaches_{step}", "GreaterOrEqual", y, g.node(f"edge_{step}", "Gather", table, edge_at))
            level = g.node(
                f"bit_{step}", "Where", reaches, g.node(f"with_{step}", "Add", level, g.scalar(step, np.int32)), level
            )
        return level

    def _scale(self, g: Graph, norm: str, length_of_x: str, length: str) -> str:
        """fp16 [B, Q, Hkv]: length_of_x / length, at most FP16's largest; NaN where the norm is not finite."""
        scale = g.node("scale_fp32", "Div", length_of_x, length)
        largest = g.scalar(float(np.finfo(np.float16).max))
        finite_scale = g.node("saturated", "Where", g.node("is_too_large", "Greater", scale, largest), largest, scale)
        finite = g.node("is_finite", "Less", norm, g.scalar(np.inf))
        scale_or_nan = g.node("marked", "Where", finite, finite_scale, g.scalar(np.nan))
        narrow = g.node("scale_fp16", "Cast", scale_or_nan, to=TensorProto.FLOAT16)
        return g.reshape("scale", narrow, [0, 0, self.config.heads.num_kv_heads])

    def _centroid_table(self, g: Graph, side: str) -> str:
        return g.constant(f"centroids_{self.name(side)}", np.array(self.description(side).centroids, np.float32))

    def _cubic(self, g: Graph, name: str, side: str, level: str) -> str:
        """Values of levels [.., D] in columns, fp32: `h * (2a + 8b * h**2)` with h = level - (2**bits - 1) / 2."""
        widths = np.repeat(eighth_widths(self.description(side).columns), self.config.heads.head_dim // EIGHTHS)
        numbers = {
            "zero": (2.0**widths - 1) / 2, "first": [2 * cubic.FACTORS[bits][0] for bits in widths],
            "third": [8 * cubic.FACTORS[bits][1] for bits in widths],
        }  # fmt: skip
        constants = {
            word: g.constant(f"{word}_{self.name(side)}", np.array(value, np.float32)) for word, value in numbers.items()
        }
        half = g.node(f"{name}_half", "Sub", g.node(f"{name}_fp32", "Cast", level, to=_FLOAT), constants["zero"])
        third = g.node(f"{name}_third", "Mul", g.node(f"{name}_square", "Mul", half, half), constants["third"])
        return g.node(name, "Mul", half, g.node(f"{name}_factor", "Add", third, constants["first"]))

    # -- Levels in bytes -----------------------------------------------------------------------------------------------
    def _packed(self, g: Graph, level: str, side: str) -> str:
        """Levels [B, Q, Hkv, D] int32 -> codes [B, Q, Hkv, bytes], as `pack_columns` or `pack_planes`."""
        description = self.description(side)
        octets = self._columns(g, level, description) if description.columns else self._planes(g, level, description)
        byte = octets[0] if len(octets) == 1 else g.node("byte", "Concat", *octets, axis=-1)
        return g.node("codes", "Cast", byte, to=TensorProto.UINT8)

    def _planes(self, g: Graph, level: str, description: Description) -> list[str]:
        low, *others = planes(description.bits)
        parts = [level]
        if others:
            parts = [
                g.node("low_plane", "BitwiseAnd", level, g.scalar(2**low - 1, np.int32)),
                g.node("high_plane", "Div", level, g.scalar(2**low, np.int32)),
            ]
        octets = []
        for width, plane in zip((low, *others), parts, strict=True):
            count = 8 // width
            cut = self._cut(g, f"parts_{width}", plane, [description.head_dim // count] * count)
            octets.append(self._together(g, f"byte_{width}", cut, range(0, 8, width)))
        return octets

    def _columns(self, g: Graph, level: str, description: Description) -> list[str]:
        eighths = self._cut(g, "eighth", level, [description.head_dim // EIGHTHS] * EIGHTHS)
        octets = []
        for number, column in enumerate(description.columns):
            parts = [eighths[part.eighth] for part in column.parts]
            unit = self._together(g, f"unit_{number}", parts, [part.shift for part in column.parts])
            if column.nbytes == 2:
                by_itself = g.reshape(f"unit_{number}_column", unit, [0, 0, 0, -1, 1])
                low = g.node(f"unit_{number}_low", "BitwiseAnd", by_itself, g.scalar(255, np.int32))
                high = g.node(f"unit_{number}_high", "Div", by_itself, g.scalar(256, np.int32))
                both = g.node(f"unit_{number}_both", "Concat", low, high, axis=-1)
                unit = g.reshape(f"unit_{number}_bytes", both, [0, 0, 0, -1])
            octets.append(unit)
        return octets

    def _cut(self, g: Graph, name: str, x: str, counts: Sequence[int]) -> list[str]:
        """The last axis in parts."""
        return [x] if len(counts) == 1 else g.nodes(name, "Split", [x, g.integers(counts)], len(counts), axis=-1)

    def _together(self, g: Graph, name: str, parts: Sequence[str], shifts: Sequence[int]) -> str:
        """int32 parts in the bits of one number, the first in the lowest."""
        total = parts[0]
        for part, shift in zip(parts[1:], shifts[1:], strict=True):
            shifted_part = g.node(f"{name}_at_{shift}", "Mul", part, g.scalar(2**shift, np.int32))
            total = g.node(f"{name}_to_{shift}", "Add", total, shifted_part)
        return total
