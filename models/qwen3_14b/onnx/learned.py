"""The scopes of a layer whose K and V are learned nibbles: a basis for each KV head in place of one rotation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from haarkv.codebooks.learned import STAGES, refinements
from haarkv.models.qwen3_14b.onnx.scopes import Qwen3Scopes
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.learned import GAINS
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.onnx.graph import Graph, TensorType
from haarkv.tq_ops.onnx.reads import READS

_FLOAT, _INT64 = TensorProto.FLOAT, TensorProto.INT64
_QUANTIZED_BY = ("mean", "forward", "shares", "weights", "owned", "places")
_ATTENDED_BY = (("k", "rows"), ("v", "rows"), ("v", "mean"))


def coordinate_name(layer: int, side: str, word: str) -> str:
    """Name of the weight that holds a part of a layer's learned coordinates."""
    return f"layers.{layer}.{side}_{word}"


def learned_levels(plan: KVPlan, span: range, head_dim: int) -> tuple[tuple[int, int], ...]:
    """Nibbles of K and V in each layer of a span; empty of a plan without learned formats."""
    described = [[kv_format.description(head_dim) for kv_format in plan.layers[layer]] for layer in span]
    if not any(side and side.transform.coordinates for pair in described for side in pair):
        return ()
    return tuple((k.levels, v.levels) for k, v in described if k and v)


def mixed(plan: KVPlan, head_dim: int) -> str | None:
    """Why there are no graphs of a plan that has learned nibbles in some places and `tq4` in others; None of any other."""
    described = [kv_format.description(head_dim) for pair in plan.layers for kv_format in pair]
    learned = {bool(side and side.transform.coordinates) for side in described}
    return "its graphs take learned nibbles at every place or at none" if len(learned) > 1 else None


def coordinate_values(layer: int, side: str, kv_format: KVFormat, head_dim: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that the graphs want of one layer and side."""
    described = kv_format.description(head_dim)
    assert described is not None, "unsupported() lets learned formats pass alone"
    assert described.transform.coordinates is not None, "unsupported() lets learned formats pass alone"
    coordinates = described.transform.coordinates(layer)
    heads, width = coordinates.owners.shape[0], STAGES * head_dim
    owned = torch.zeros(heads, width).scatter_(1, coordinates.owners, 1.0)
    values = {
        **{name: getattr(coordinates, name) for name in ("mean", "forward", "shares", "weights", "rows")},
        "owned": owned.view(heads, STAGES, head_dim).transpose(0, 1).contiguous(),
        "places": (coordinates.owners + width * torch.arange(heads).unsqueeze(1)).flatten(),
    }  # fmt: skip
    for word, tensor in values.items():
        yield coordinate_name(layer, side, word), tensor


@dataclass(frozen=True)
class LearnedScopes(Qwen3Scopes):
    """The scopes of one layer.

    Args:
        k_levels, v_levels: nibbles of a vector of K and of V.
    """

    k_levels: int = 0
    v_levels: int = 0

    @property
    def suffix(self) -> str:
        return f"_lr{self.k_levels}_lr{self.v_levels}"

    def levels(self, side: str) -> int:
        return self.k_levels if side == "k" else self.v_levels

    def stored_by(self, layer: int) -> dict[str, tuple[str, TensorType]]:
        heads, dim = self.config.heads.num_kv_heads, self.config.heads.head_dim
        found: dict[str, tuple[str, TensorType]] = {}
        for side in ("k", "v"):
            count = self.levels(side)
            types = {
                "mean": TensorType(_FLOAT, (heads, dim)),
                "forward": TensorType(_FLOAT, (heads, dim, dim)),
                "shares": TensorType(_FLOAT, (heads, dim)),
                "weights": TensorType(_FLOAT, (heads, dim)),
                "rows": TensorType(_FLOAT, (heads, count, dim)),
                "owned": TensorType(_FLOAT, (STAGES, heads, dim)),
                "places": TensorType(_INT64, (heads * count,)),
            }
            found |= {f"{side}_{word}": (coordinate_name(layer, side, word), of) for word, of in types.items()}
        return found

    def quantize_learned(
        self, g: Graph, x: str, mean: str, forward: str, shares: str, weights: str, owned: str, places: str, *, count: int
    ) -> list[str]:
        """Store K or V: [B, Q, Hkv, D] fp32 -> codes [B, Q, Hkv, count/2] uint8, scale [B, Q, Hkv] fp16.

        A vector that is not finite gets a scale of NaN, since a graph cannot refuse.
        """
        heads, dim = self.config.heads.num_kv_heads, self.config.heads.head_dim
        unit, norm, lift = self._unit(g, g.node("shifted", "Sub", x, mean))
        rows = g.reshape("unit_rows", self._bf16(g, unit), [0, 0, heads, 1, dim])
        y = g.reshape("y", g.node("y_rows", "MatMul", rows, forward), [0, 0, heads, dim])
        rho, length = self._length(g, "rho", y, shares), self._length(g, "length", y, weights)
        some = g.node("is_off_the_mean", "Greater", rho, g.scalar(0.0))
        sized = g.node("sized", "Div", y, g.node("rho_or_1", "Where", some, rho, g.scalar(1.0)))
        levels, kept, fit = self._tried(g, 0, sized, weights, owned, places, count)
        for number in range(1, len(GAINS)):
            other_levels, other_kept, other = self._tried(g, number, sized, weights, owned, places, count)
            nearer = g.node(f"nearer_{number}", "Greater", other, fit)
            levels = g.node(f"levels_{number}", "Where", nearer, other_levels, levels)
            kept = g.node(f"kept_{number}", "Where", nearer, other_kept, kept)
            fit = g.node(f"fit_{number}", "Max", fit, other)
        length_of_x = g.node("length_of_x", "Mul", g.node("norm_of_x", "Div", norm, lift), length)
        return [self._packed(g, levels, count), self._scale(g, norm, length_of_x, g.node("kept_length", "Sqrt", kept))]

    def _tried(self, g: Graph, number: int, y: str, weights: str, owned: str, places: str, count: int) -> list[str]:
        """Levels [B, Q, Hkv, N], and what a gain keeps and how well it fits, [B, Q, Hkv, 1]."""
        by = {"gain": g.scalar(GAINS[number]), "weights": weights, "owned": owned, "places": places}
        return list(g.call(f"gain_{number}", f"Gain_lr{count}", self.at_gain, y=y, **by))

    def at_gain(self, g: Graph, y: str, gain: str, weights: str, owned: str, places: str) -> list[str]:
        """Levels of coordinates [B, Q, Hkv, D] at a size, the weighted square of what they restore, and how near that lies."""
        left, levels, restored = g.node("left", "Mul", y, gain), [], ""
        for stage, step in enumerate(refinements()):
            value = left if stage == 0 else g.node(f"value_{stage}", "Div", left, g.scalar(step))
            level, centroid = g.call(f"stage_{stage}", "Level", self.level_and_centroid, y=value)
            counted = g.node(f"counted_{stage}", "Mul", centroid, self._stage(g, owned, stage))
            restores = counted if stage == 0 else g.node(f"restores_{stage}", "Mul", counted, g.scalar(step))
            restored = restores if stage == 0 else g.node(f"restored_{stage}", "Add", restored, restores)
            left = g.node(f"left_{stage}", "Sub", left, restores)
            levels.append(level)
        weighted = g.node("restored_weighted", "Mul", restored, weights)
        along = g.reduce("along", "ReduceSum", g.node("along_each", "Mul", weighted, y))
        kept = g.reduce("kept", "ReduceSum", g.node("kept_each", "Mul", weighted, restored))
        fit = g.node("fit", "Div", g.node("along_squared", "Mul", along, along), kept)
        flat = g.reshape("levels_flat", g.node("levels", "Concat", *levels, axis=-1), [0, 0, -1])
        heads = self.config.heads.num_kv_heads
        return [g.reshape("levels_owned", g.node("gathered", "Gather", flat, places, axis=2), [0, 0, heads, -1]), kept, fit]

    def level_and_centroid(self, g: Graph, y: str) -> list[str]:
        """Levels of coordinates [B, Q, Hkv, D], int32, and their centroids."""
        tables = READS.built_in(self.config.heads.head_dim)
        level = self._level(g, y, np.array(tables.boundaries, np.float32))
        return [level, g.node("centroid", "Gather", g.constant("centroids", np.array(tables.centroids, np.float32)), level)]

    def _stage(self, g: Graph, owned: str, stage: int) -> str:
        """Which coordinates own a nibble of a stage: [Hkv, D], 1 or 0."""
        return g.node(f"owned_{stage}", "Gather", owned, g.scalar(stage, np.int64))

    def _length(self, g: Graph, name: str, y: str, weights: str) -> str:
        """`sqrt(sum(weights * y**2))`, [B, Q, Hkv, 1]."""
        weighted = g.node(f"{name}_weighted", "Mul", g.node(f"{name}_square", "Mul", y, y), weights)
        return g.node(name, "Sqrt", g.reduce(f"{name}_sum", "ReduceSum", weighted))

    def _stored(self, g: Graph, side: str, x: str, w: Mapping[str, str]) -> list[str]:
        count = self.levels(side)

        def scope(inner: Graph, **inputs: str) -> list[str]:
            return self.quantize_learned(inner, **inputs, count=count)

        by = {word: w[f"{side}_{word}"] for word in _QUANTIZED_BY}
        return g.call(f"{side}_quantize", f"Quantize_lr{count}", scope, x=x, **by)

    def _attended_by(self, w: Mapping[str, str]) -> dict[str, str]:
        return {f"{side}_{word}": w[f"{side}_{word}"] for side, word in _ATTENDED_BY}

    def _into_stored(self, g: Graph, q: str, by: Mapping[str, str]) -> str:
        # What q makes of the mean is the same for every key, and softmax drops it.
        return g.node("q_rotated", "MatMul", q, g.node("k_rows_t", "Transpose", by["k_rows"], perm=[0, 2, 1]))

    def _from_stored(self, g: Graph, out: str, by: Mapping[str, str]) -> str:
        # Probabilities add up to 1, so that the mean is added once.
        mean = g.reshape("v_mean_row", by["v_mean"], [0, 1, -1])
        return g.node("with_mean", "Add", g.node("unrotated", "MatMul", out, by["v_rows"]), mean)
