"""Attention of graphs: over packed tokens, new tokens as stored, and tokens in BF16.

Q is rotated once, codes become centroids, scales are multiplied into scores and probabilities, and the output is rotated
back once. Tokens in BF16 have columns of scores behind the packed ones: a query sees each token in one of both.

In texts longer than a stretch (`GraphSpec.has_stretches`) queries are turned back as far as stored keys are: stretches of
past keys, filled up with zeros, are one more axis of the product. New keys are restored and turned forth instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto
from torch import Tensor

from haarkv.codebooks.learned import EIGHTHS
from haarkv.models.qwen3_14b.onnx.levels import CPU, LevelScopes
from haarkv.tq_ops.formats.packing import planes
from haarkv.tq_ops.formats.stretches import STRETCH, RopeShift
from haarkv.tq_ops.onnx.graph import Graph

TURNS = ("turn_cos", "turn_sin")
"""Tables of a layer, by stretch."""
_FLOAT, _INT32 = TensorProto.FLOAT, TensorProto.INT32


@dataclass(frozen=True)
class AttentionScopes(LevelScopes):
    """The scopes that read a cache; `rope_pairs` of a key are turned back by stretches, 0 where none are."""

    rope_pairs: int = 0

    def stored(self, layer: int) -> dict[str, tuple[str, Tensor]]:
        tensors = super().stored(layer)
        if turns := self._turns(layer):
            tables = turns.table(-(-self.config.max_position_embeddings // STRETCH), CPU)
            tensors |= {word: (f"layers.{layer}.{word}", table) for word, table in zip(TURNS, tables, strict=True)}
        return tensors

    def turn_back(self, g: Graph, x: str, cos: str, sin: str) -> list[str]:
        """[.., D] fp32, the first 2 * `rope_pairs` numbers turned back by cos and sin [.., rope_pairs]."""
        return [self._turn(g, x, cos, sin, "Add", "Sub", self.rope_pairs)]

    def turn_forth(self, g: Graph, x: str, cos: str, sin: str) -> list[str]:
        """The inverse of `turn_back`."""
        return [self._turn(g, x, cos, sin, "Sub", "Add", self.rope_pairs)]

    def _turn(self, g: Graph, x: str, cos: str, sin: str, for_low: str, for_high: str, half: int) -> str:
        rest = self.config.heads.head_dim - 2 * half
        low, high, *others = self._cut(g, "parts", x, [half, half, rest] if rest else [half, half])
        new_low = g.node("low", for_low, g.node("low_cos", "Mul", low, cos), g.node("high_sin", "Mul", high, sin))
        new_high = g.node("high", for_high, g.node("high_cos", "Mul", high, cos), g.node("low_sin", "Mul", low, sin))
        if others:  # queries have gained an axis
            lead = g.node("lead", "Shape", new_low, end=-1)
            unturned_shape = g.node("unturned_shape", "Concat", lead, g.integers([rest]), axis=0)
            others = [g.node("unturned", "Expand", others[0], unturned_shape)]
        return g.node("rotated", "Concat", new_low, new_high, *others, axis=-1)

    def turns_of_tokens(self, g: Graph, w: Mapping[str, str]) -> dict[str, str]:
        """cos and sin [B, Q, 1, rope_pairs] of new tokens, from `TURNS` and `stretch` [B, Q] of `w`."""
        rows = {word: g.node(f"token_{word}_rows", "Gather", w[word], w["stretch"]) for word in TURNS}
        return {f"token_{word}": g.reshape(f"token_{word}", row, [0, 0, 1, -1]) for word, row in rows.items()}

    def by_stretches(self, g: Graph, q: str, k: str, k_scale: str, scale: str, by: Mapping[str, str]) -> str:
        """Scores [B, Hkv, R, S + Q] fp32 over several stretches, products with the mean included.

        Args:
            q: [B, Hkv, R, D].
            k, k_scale: centroids [B, Hkv, S + Q, D] and scales [B, Hkv, 1, S + Q] of all tokens.
            by: int64 `stretches` [n] of the past, `slots_end` [1], their slots S, and `fill` [1], slots of n whole stretches
                less all tokens; `TURNS`, and those of new tokens as `token_…`; `k_mean`, `k_rows`.
        """
        dim = self.config.heads.head_dim
        mean = g.reshape("k_mean_column", by["k_mean"], [0, -1, 1])
        cos, sin = (
            g.reshape(f"{word}_each", g.node(f"{word}_rows", "Gather", by[word], by["stretches"]), [-1, 1, self.rope_pairs])
            for word in TURNS
        )
        each = g.node("q_one_stretch", "Unsqueeze", q, g.integers([2]))
        (turned_q,) = g.call("q_turned", f"TurnBack_{self.rope_pairs}", self.turn_back, x=each, cos=cos, sin=sin)
        shape = g.node("q_turned_shape", "Shape", turned_q)
        rows = g.reshape("q_turned_rows", turned_q, [0, 0, -1, dim])
        as_stored = g.node("q_rotated", "MatMul", rows, g.node("k_rows_t", "Transpose", by["k_rows"], perm=[0, 2, 1]))
        mean_scores = g.node("q_of_mean", "Mul", g.node("q_by_mean", "MatMul", rows, mean), scale)
        lead = g.node("q_turned_lead", "Slice", shape, g.integers([0]), g.integers([4]))
        mean_scores = g.node(
            "q_of_mean_each", "Reshape", mean_scores, g.node("of_mean_shape", "Concat", lead, g.integers([1]), axis=0)
        )

        k_factor = g.node("k_factor", "Mul", k_scale, scale)
        k_each = self._in_stretches(g, "k_each", k, by["fill"], axis=2)
        factor_each = self._in_stretches(g, "k_factor_each", k_factor, by["fill"], axis=3)
        q_each = g.node("q_each", "Reshape", as_stored, shape)
        qk = g.node("qk", "MatMul", q_each, g.node("k_transposed", "Transpose", k_each, perm=[0, 1, 2, 4, 3]))
        # The mean's part is another number in each stretch, so softmax does not drop it.
        scores = g.node("scores_each", "Add", g.node("qk_scaled", "Mul", qk, factor_each), mean_scores)
        flat_scores = g.reshape("scores_filled", g.node("r_first", "Transpose", scores, perm=[0, 1, 3, 2, 4]), [0, 0, 0, -1])
        new = self._new_scores(g, q, k, k_scale, scale, by)
        past = g.node("scores_past", "Slice", flat_scores, g.integers([0]), by["slots_end"], g.integers([3]))
        return g.node("scores", "Concat", past, new, axis=3)

    def _in_stretches(self, g: Graph, name: str, x: str, fill: str, *, axis: int) -> str:
        """Past tokens of an axis as [.., n, .., STRETCH, ..], filled up with zeros; a negative `fill` cuts off."""
        before, after = [0] * (4 + axis), [0] * (3 - axis)
        parts = [g.integers(before), fill, *([g.integers(after)] if after else [])]
        whole = g.node(f"{name}_filled", "Pad", x, g.node(f"{name}_pads", "Concat", *parts, axis=0))
        if axis == 2:
            return g.reshape(name, whole, [0, 0, -1, STRETCH, self.config.heads.head_dim])
        return g.reshape(name, whole, [0, 0, -1, 1, STRETCH])

    def _new_scores(self, g: Graph, q: str, k: str, k_scale: str, scale: str, by: Mapping[str, str]) -> str:
        """Scores [B, Hkv, R, Q] of new keys, restored and turned forth."""
        end = g.integers([np.iinfo(np.int64).max])
        new = g.node("k_new", "Slice", k, by["slots_end"], end, g.integers([2]))
        scales = g.node("k_scale_new", "Slice", k_scale, by["slots_end"], end, g.integers([3]))
        scaled_keys = g.node("k_new_sized", "Mul", new, g.reshape("k_scale_new_column", scales, [0, 0, -1, 1]))
        mean = g.reshape("k_mean_row", by["k_mean"], [0, 1, -1])
        restored_keys = g.node("k_new_restored", "Add", g.node("k_new_by_rows", "MatMul", scaled_keys, by["k_rows"]), mean)
        cos, sin = (g.reshape(f"{word}_new", by[f"token_{word}"], [0, 1, -1, self.rope_pairs]) for word in TURNS)
        (turned_keys,) = g.call(
            "k_new_turned", f"TurnForth_{self.rope_pairs}", self.turn_forth, x=restored_keys, cos=cos, sin=sin
        )
        keys_t = g.node("k_new_transposed", "Transpose", turned_keys, perm=[0, 1, 3, 2])
        return g.node("scores_new", "Mul", g.node("qk_new", "MatMul", q, keys_t), scale)

    def _turns(self, layer: int) -> RopeShift | None:
        coordinates = self.description("k").transform.coordinates
        return coordinates(layer).rope_shift if self.rope_pairs and coordinates else None

    # -- Attention -------------------------------------------------------------------------------------------------------
    def attention(self, g: Graph, q: str, block_table: str, visible: str, stored: str, **by: str) -> list[str]:
        """q [B, Q, Hq, D] fp32 -> [B*Q, Hq*D] fp32.

        Args:
            visible: [B, 1, G*Q, packed and kept columns] bool, what each query sees.
            stored: [B, 1, 1, S + Q] bool, packed columns that hold a token.
            by: `FIELDS`, those of new tokens as `new_…`, matrices; `k_kept`, `v_kept`, `kept_index`, `kept_stored` in BF16.
        """
        heads, dim = self.config.heads.num_kv_heads, self.config.heads.head_dim
        group = self.config.heads.num_heads // heads
        q_split = g.reshape("q_groups", q, [0, 0, heads, group, dim])
        q_rows = g.reshape("q_rows", g.node("q_heads_first", "Transpose", q_split, perm=[0, 2, 3, 1, 4]), [0, 0, -1, dim])

        k = self._centroids(g, "k", by["k_codes"], by["new_k_codes"], block_table)
        k_scale = self._scales(g, "k", by["k_scale"], by["new_k_scale"], block_table)
        scale = g.constant("softmax_scale", np.array(self.config.attentions[0].scale, np.float32))
        score = self.by_stretches if self.rope_pairs else self._scores
        scores = score(g, q_rows, k, k_scale, scale, by)
        if "k_kept" in by:
            scores = self._add_window_scores(g, scores, q_rows, scale, by)
        masked = g.node("masked", "Where", visible, scores, g.scalar(-np.inf))
        p = g.node("softmax", "Softmax", masked, axis=-1)

        v = self._centroids(g, "v", by["v_codes"], by["new_v_codes"], block_table)
        # Memory behind a sequence's end may hold anything: a probability of 0 does not silence a NaN.
        v_scales = self._scales(g, "v", by["v_scale"], by["new_v_scale"], block_table)
        v_factor = g.node("v_factor", "Where", stored, v_scales, g.scalar(0))
        exact = ""
        if "v_kept" in by:
            p, exact = self._window_output(g, p, v, by)
        pv = g.node("pv", "MatMul", g.node("p_scaled", "Mul", p, v_factor), v)
        ordered_out = self._in_bytes_order(g, "pv_halves", "v", pv, inverse=True)
        out = self._rotate(g, "unrotated", ordered_out, by["v_rotation"], inverse=True)
        out = g.node("out_with_kept", "Add", out, exact) if exact else out
        split = g.reshape("out_groups", out, [0, 0, group, -1, dim])
        return [g.reshape("out", g.node("tokens_first", "Transpose", split, perm=[0, 3, 1, 2, 4]), [-1, heads * group * dim])]

    def _scores(self, g: Graph, q: str, k: str, k_scale: str, scale: str, by: Mapping[str, str]) -> str:
        """Scores [B, Hkv, R, S + Q] fp32 of packed keys, without the mean of learned keys, which softmax drops."""
        if self.has_learned("k"):
            as_stored = g.node("q_rotated", "MatMul", q, g.node("k_rows_t", "Transpose", by["k_rows"], perm=[0, 2, 1]))
        else:
            as_stored = self._rotate(g, "q_rotated", q, by["k_rotation"])
        q_paired = self._in_bytes_order(g, "q_paired", "k", as_stored)
        k_factor = g.node("k_factor", "Mul", k_scale, scale)
        qk = g.node("qk", "MatMul", q_paired, g.node("k_transposed", "Transpose", k, perm=[0, 1, 3, 2]))
        return g.node("scores", "Mul", qk, k_factor)

    # -- Tokens in BF16 ------------------------------------------------------------------------------------------------
    def _add_window_scores(self, g: Graph, scores: str, q: str, scale: str, by: Mapping[str, str]) -> str:
        """Scores [B, Hkv, R, S + Q] with those of keys in BF16 behind them."""
        if self.has_learned("k") and not self.rope_pairs:
            # Softmax drops the product with the mean only where all keys are packed.
            mean = g.reshape("k_mean_column", by["k_mean"], [0, -1, 1])
            mean_scores = g.node("q_of_mean", "Mul", g.node("q_by_mean", "MatMul", q, mean), scale)
            scores = g.node("scores_with_mean", "Add", scores, mean_scores)
        k = g.node("k_exact_t", "Transpose", self._window_vectors(g, "k", by), perm=[0, 1, 3, 2])
        exact = g.node("exact_scores", "Mul", g.node("exact_qk", "MatMul", q, k), scale)
        return g.node("all_scores", "Concat", scores, exact, axis=3)

    def _window_output(self, g: Graph, p: str, v: str, by: Mapping[str, str]) -> tuple[str, str]:
        """Probabilities of packed tokens, and the output [B, Hkv, R, D] of tokens in BF16."""
        exact = g.node("v_held", "Where", by["kept_stored"], self._window_vectors(g, "v", by), g.scalar(0))
        counts = [
            g.node(f"{name}_count", "Shape", vectors, start=2, end=3) for name, vectors in (("packed", v), ("exact", exact))
        ]
        packed, others = g.nodes("p", "Split", [p, g.node("counts", "Concat", *counts, axis=0)], 2, axis=-1)
        return packed, g.node("exact_pv", "MatMul", others, exact)

    def _window_vectors(self, g: Graph, side: str, by: Mapping[str, str]) -> str:
        """Vectors [B, Hkv, kept + Q, D] fp32: those of `kept_index`, and the new ones."""
        past = g.node(f"{side}_kept_past", "Gather", by[f"{side}_kept"], by["kept_index"])
        new = g.node(f"{side}_kept_new", "Transpose", by[f"new_{side}_kept"], perm=[0, 2, 1, 3])
        return g.node(f"{side}_exact", "Cast", g.node(f"{side}_kept_both", "Concat", past, new, axis=2), to=_FLOAT)

    # -- Packed tokens -------------------------------------------------------------------------------------------------
    def _centroids(self, g: Graph, side: str, codes: str, new_codes: str, block_table: str) -> str:
        """Rotated centroids [B, Hkv, S + Q, D] of all tokens, in the order of `_in_bytes_order`."""
        description, name = self.description(side), self.name(side)
        past = self._by_sequence(g, f"past_{side}_codes", codes, block_table, [0, 0, -1, self.code_bytes(side)])
        new = g.node(f"new_{side}_codes_heads_first", "Transpose", new_codes, perm=[0, 2, 1, 3])
        if self._parts_of_a_byte(side):
            c, byte, bits = np.array(description.centroids, np.float32), np.arange(256), description.bits
            byte_centroids = np.stack([c[(byte >> shift) & (2**bits - 1)] for shift in range(0, 8, bits)], axis=-1)
            table = g.constant(f"centroids_of_byte_{name}", byte_centroids)
            index = g.node(f"{side}_index", "Cast", g.node(f"{side}_bytes", "Concat", past, new, axis=2), to=_INT32)
            parts = g.node(f"{side}_pairs", "Gather", table, index)
            return g.reshape(f"{side}_unpacked", parts, [0, 0, -1, description.head_dim])
        both = g.node(f"{side}_bytes", "Concat", past, new, axis=2)
        if description.columns:
            return self._cubic(g, f"{side}_unpacked", side, self._column_levels(g, side, both))
        level = g.node(f"{side}_level", "Cast", self._plane_levels(g, side, both), to=_INT32)
        return g.node(f"{side}_unpacked", "Gather", self._centroid_table(g, side), level)

    def _parts_of_a_byte(self, side: str) -> int:
        """Levels in a byte where a byte holds whole ones, so that a table restores it; else 0."""
        description = self.description(side)
        return 0 if description.columns or len(planes(description.bits)) > 1 else 8 // description.bits

    def _in_bytes_order(self, g: Graph, name: str, side: str, x: str, *, inverse: bool = False) -> str:
        """Rows [B, Hkv, R, D] with the n levels of each byte together: coordinates j, j + D/n and so on; or the inverse."""
        parts, count = self._parts_of_a_byte(side), self.description(side).head_dim
        if parts < 2:
            return x
        split = [count // parts, parts] if inverse else [parts, count // parts]
        rows = g.reshape(f"{name}_split", x, [0, 0, -1, *split])
        return g.reshape(name, g.node(f"{name}_swapped", "Transpose", rows, perm=[0, 1, 2, 4, 3]), [0, 0, -1, count])

    def _plane_levels(self, g: Graph, side: str, codes: str) -> str:
        """Levels [.., D] uint8 from two planes of their bits."""
        description = self.description(side)
        widths = planes(description.bits)
        cut = self._cut(g, f"{side}_plane", codes, [description.head_dim * width // 8 for width in widths])
        bit_planes = []
        for width, plane in zip(widths, cut, strict=True):
            name = f"{side}_plane_of_{width}"
            parts = [self._bits(g, f"{name}_at_{at}", plane, at, width, np.uint8) for at in range(0, 8, width)]
            bit_planes.append(g.node(name, "Concat", *parts, axis=-1))
        low, high = bit_planes
        shifted_high = g.node(f"{side}_plane_raised", "BitShift", high, g.scalar(widths[0], np.uint8), direction="LEFT")
        return g.node(f"{side}_level_bits", "BitwiseOr", low, shifted_high)

    def _column_levels(self, g: Graph, side: str, codes: str) -> str:
        """Levels [.., D] uint32 from columns of units."""
        description = self.description(side)
        count, columns = description.head_dim // EIGHTHS, description.columns
        cut = self._cut(g, f"{side}_column", codes, [count * column.nbytes for column in columns])
        eighths: dict[int, str] = {}
        for number, (column, octets) in enumerate(zip(columns, cut, strict=True)):
            unit = self._column_units(g, f"{side}_unit_{number}", octets, count, column.nbytes)
            for part in column.parts:
                name = f"{side}_eighth_{part.eighth}"
                eighths[part.eighth] = self._bits(g, name, unit, part.shift, part.bits, np.uint32)
        return g.node(f"{side}_level", "Concat", *(eighths[eighth] for eighth in range(EIGHTHS)), axis=-1)

    def _column_units(self, g: Graph, name: str, octets: str, count: int, nbytes: int) -> str:
        """A column's little-endian bytes as units [.., count] uint32."""
        if nbytes == 1:
            return g.node(name, "Cast", octets, to=TensorProto.UINT32)
        pairs = g.reshape(f"{name}_pairs", octets, [0, 0, -1, count, nbytes])
        octet = [g.node(f"{name}_octet_{i}", "Gather", pairs, g.scalar(i, np.int64), axis=4) for i in range(nbytes)]
        low, high = (g.node(f"{name}_byte_{i}", "Cast", one_byte, to=TensorProto.UINT32) for i, one_byte in enumerate(octet))
        shifted_high = g.node(f"{name}_raised", "BitShift", high, g.scalar(8, np.uint32), direction="LEFT")
        return g.node(name, "BitwiseOr", low, shifted_high)

    def _bits(self, g: Graph, name: str, x: str, shift: int, width: int, dtype: type[np.generic]) -> str:
        """`width` bits of unsigned integers, from bit `shift` on."""
        down = g.node(f"{name}_down", "BitShift", x, g.scalar(shift, dtype), direction="RIGHT") if shift else x
        return g.node(name, "BitwiseAnd", down, g.scalar(2**width - 1, dtype))

    def _scales(self, g: Graph, side: str, scale: str, new_scale: str, block_table: str) -> str:
        """Scales [B, Hkv, 1, S + Q] fp32 of all tokens."""
        past = self._by_sequence(g, f"past_{side}_scale", scale, block_table, [0, 0, -1])
        new = g.node(f"new_{side}_scale_heads_first", "Transpose", new_scale, perm=[0, 2, 1])
        both = g.node(f"{side}_scale_both", "Cast", g.node(f"{side}_scale_fp16", "Concat", past, new, axis=2), to=_FLOAT)
        return g.reshape(f"{side}_scale_row", both, [0, 0, 1, -1])

    def _by_sequence(self, g: Graph, name: str, field: str, block_table: str, shape: Sequence[int]) -> str:
        """A field of the cache [blocks, Hkv, block, ..] by sequence: [B, Hkv, S, ..]."""
        blocks = g.node(f"{name}_blocks", "Gather", field, block_table)
        trailing = [4] if len(shape) == 4 else []
        return g.reshape(name, g.node(f"{name}_heads_first", "Transpose", blocks, perm=[0, 2, 1, 3, *trailing]), shape)
