"""Keys in stretches in graphs: stored turned back to where their stretch begins, met by queries turned back as far.

Only graphs of texts longer than a stretch do so (`GraphSpec.stretched`). Slots of a sequence lie in the order of its
positions: stretches of past keys, filled up with zeros, are one more axis of the product with queries. New keys are few, and
lie in stretches that differ by sequence: they are restored and turned forth instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from haarkv.models.qwen3_14b.onnx.levels import LevelScopes
from haarkv.tq_ops.formats.stretches import STRETCH, Turns
from haarkv.tq_ops.onnx.graph import Graph, TensorType

TURNS = ("turn_cos", "turn_sin")
"""Tables of a layer, by the numbers of stretches."""


@dataclass(frozen=True)
class StretchScopes(LevelScopes):
    """The scopes that turn keys and queries.

    Args:
        turned: pairs of numbers of a key that RoPE turns; 0 of a layer, or a graph, that stores keys as they are.
    """

    turned: int = 0

    def stored_by(self, layer: int) -> dict[str, tuple[str, TensorType]]:
        found = super().stored_by(layer)
        if turns := self._turns(layer):
            shape = self._table(turns, torch.device("cpu"))[0].shape
            found |= {word: (f"layers.{layer}.{word}", TensorType(TensorProto.FLOAT, tuple(shape))) for word in TURNS}
        return found

    def stored_values(self, layer: int, device: torch.device) -> dict[str, Tensor]:
        found = super().stored_values(layer, device)
        if turns := self._turns(layer):
            found |= {f"layers.{layer}.{word}": of for word, of in zip(TURNS, self._table(turns, device), strict=True)}
        return found

    def turn_back(self, g: Graph, x: str, cos: str, sin: str) -> list[str]:
        """[.., D] fp32, whose first numbers are turned back; cos and sin [.., R/2]."""
        return [self._turn(g, x, cos, sin, "Add", "Sub")]

    def turn_forth(self, g: Graph, x: str, cos: str, sin: str) -> list[str]:
        """The inverse of `turn_back`."""
        return [self._turn(g, x, cos, sin, "Sub", "Add")]

    def _turn(self, g: Graph, x: str, cos: str, sin: str, for_low: str, for_high: str) -> str:
        half = self.turned
        rest = self.config.heads.head_dim - 2 * half
        low, high, *others = self._cut(g, "parts", x, [half, half, rest] if rest else [half, half])
        new_low = g.node("low", for_low, g.node("low_cos", "Mul", low, cos), g.node("high_sin", "Mul", high, sin))
        new_high = g.node("high", for_high, g.node("high_cos", "Mul", high, cos), g.node("low_sin", "Mul", low, sin))
        if others:  # queries have gained an axis
            lead = g.node("lead", "Shape", new_low, end=-1)
            unturned = g.node("unturned_shape", "Concat", lead, g.integers([rest]), axis=0)
            others = [g.node("unturned", "Expand", others[0], unturned)]
        return g.node("turned", "Concat", new_low, new_high, *others, axis=-1)

    def turns_of_tokens(self, g: Graph, w: Mapping[str, str]) -> dict[str, str]:
        """cos and sin [B, Q, 1, R/2] of the stretches of new tokens, `w` holding `TURNS` and `stretch` [B, Q]."""
        rows = {word: g.node(f"token_{word}_rows", "Gather", w[word], w["stretch"]) for word in TURNS}
        return {f"token_{word}": g.reshape(f"token_{word}", of, [0, 0, 1, -1]) for word, of in rows.items()}

    def by_stretches(self, g: Graph, q: str, k: str, k_scale: str, scale: str, by: Mapping[str, str]) -> str:
        """Scores [B, Hkv, R, S + Q] fp32 of keys of a text of several stretches, what queries make of the mean included.

        Args:
            q: [B, Hkv, R, D].
            k, k_scale: centroids [B, Hkv, S + Q, D] and scales [B, Hkv, 1, S + Q] of all tokens.
            scale: of the logits.
            by: `stretches` [n] of the past, `slots_end` [1], their slots S, and `fill` [1], slots that n whole stretches have
                more than there are tokens, all int64; `TURNS`, and the same of new tokens as `token_…`; `k_mean`, `k_rows`.
        """
        dim = self.config.heads.head_dim
        mean = g.reshape("k_mean_column", by["k_mean"], [0, -1, 1])
        cos, sin = (
            g.reshape(f"{word}_each", g.node(f"{word}_rows", "Gather", by[word], by["stretches"]), [-1, 1, self.turned])
            for word in TURNS
        )
        each = g.node("q_one_stretch", "Unsqueeze", q, g.integers([2]))
        (turned,) = g.call("q_turned", f"TurnBack_{self.turned}", self.turn_back, x=each, cos=cos, sin=sin)
        shape = g.node("q_turned_shape", "Shape", turned)
        rows = g.reshape("q_turned_rows", turned, [0, 0, -1, dim])
        as_stored = g.node("q_rotated", "MatMul", rows, g.node("k_rows_t", "Transpose", by["k_rows"], perm=[0, 2, 1]))
        of_mean = g.node("q_of_mean", "Mul", g.node("q_by_mean", "MatMul", rows, mean), scale)
        lead = g.node("q_turned_lead", "Slice", shape, g.integers([0]), g.integers([4]))
        of_mean = g.node(
            "q_of_mean_each", "Reshape", of_mean, g.node("of_mean_shape", "Concat", lead, g.integers([1]), axis=0)
        )

        k_factor = g.node("k_factor", "Mul", k_scale, scale)
        k_each = self._in_stretches(g, "k_each", k, by["fill"], axis=2)
        factor_each = self._in_stretches(g, "k_factor_each", k_factor, by["fill"], axis=3)
        q_each = g.node("q_each", "Reshape", as_stored, shape)
        qk = g.node("qk", "MatMul", q_each, g.node("k_transposed", "Transpose", k_each, perm=[0, 1, 2, 4, 3]))
        # The mean's part is another number in each stretch, so softmax does not drop it.
        scores = g.node("scores_each", "Add", g.node("qk_scaled", "Mul", qk, factor_each), of_mean)
        filled = g.reshape("scores_filled", g.node("r_first", "Transpose", scores, perm=[0, 1, 3, 2, 4]), [0, 0, 0, -1])
        new = self._of_new(g, q, k, k_scale, scale, by)
        past = g.node("scores_past", "Slice", filled, g.integers([0]), by["slots_end"], g.integers([3]))
        return g.node("scores", "Concat", past, new, axis=3)

    def _in_stretches(self, g: Graph, name: str, x: str, fill: str, *, axis: int) -> str:
        """Of all tokens on an axis those of the past [.., n, .., STRETCH, ..], filled up with zeros; `fill` may cut off."""
        before, after = [0] * (4 + axis), [0] * (3 - axis)
        parts = [g.integers(before), fill, *([g.integers(after)] if after else [])]
        whole = g.node(f"{name}_filled", "Pad", x, g.node(f"{name}_pads", "Concat", *parts, axis=0))
        if axis == 2:
            return g.reshape(name, whole, [0, 0, -1, STRETCH, self.config.heads.head_dim])
        return g.reshape(name, whole, [0, 0, -1, 1, STRETCH])

    def _of_new(self, g: Graph, q: str, k: str, k_scale: str, scale: str, by: Mapping[str, str]) -> str:
        """Scores [B, Hkv, R, Q] of new keys, which are restored and turned forth."""
        end = g.integers([np.iinfo(np.int64).max])
        new = g.node("k_new", "Slice", k, by["slots_end"], end, g.integers([2]))
        scales = g.node("k_scale_new", "Slice", k_scale, by["slots_end"], end, g.integers([3]))
        sized = g.node("k_new_sized", "Mul", new, g.reshape("k_scale_new_column", scales, [0, 0, -1, 1]))
        mean = g.reshape("k_mean_row", by["k_mean"], [0, 1, -1])
        restored = g.node("k_new_restored", "Add", g.node("k_new_by_rows", "MatMul", sized, by["k_rows"]), mean)
        cos, sin = (g.reshape(f"{word}_new", by[f"token_{word}"], [0, 1, -1, self.turned]) for word in TURNS)
        (turned,) = g.call("k_new_turned", f"TurnForth_{self.turned}", self.turn_forth, x=restored, cos=cos, sin=sin)
        transposed = g.node("k_new_transposed", "Transpose", turned, perm=[0, 1, 3, 2])
        return g.node("scores_new", "Mul", g.node("qk_new", "MatMul", q, transposed), scale)

    def _turns(self, layer: int) -> Turns | None:
        coordinates = self.described("k").transform.coordinates
        return coordinates(layer).turns if self.turned and coordinates else None

    def _table(self, turns: Turns, device: torch.device) -> tuple[Tensor, Tensor]:
        return turns.table(-(-self.config.max_position_embeddings // STRETCH), device)
