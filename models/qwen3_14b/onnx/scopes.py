"""Qwen3 with a packed `tq4` cache as ONNX graphs: prefill, decode, and any span of layers, out of the same scopes.

Norms of Q's and K's heads are optional and so are biases, so that the Llama family has graphs too.

New tokens come as a rectangle of B sequences and Q tokens, padded at the right; padding is any token, and what comes out for
it is not used. The cache is read and never written: a graph returns the codes and scales of the new tokens, and its host puts
them where it wants them.

Attention runs in the rotated domain: Q is rotated once, a byte of codes becomes its two centroids, the scales are multiplied
into scores and probabilities, and the output is rotated back once. New tokens are attended to as they are stored.
Rounding points: those of `tq_ops.reference`, but probabilities stay in FP32. In FP16 each projection's result is FP16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from onnx import TensorProto

from haarkv.models.config import ModelConfig
from haarkv.tq_ops.onnx.graph import Graph, TensorType
from haarkv.tq_ops.onnx.reads import READS

DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

_FLOAT, _INT32 = TensorProto.FLOAT, TensorProto.INT32
# Vectors with larger or smaller coordinates are first multiplied by a power of two, which is exact: squares stay in FP32.
_LARGE, _SMALL, _LIFT = 2.0**40, 2.0**-40, 2.0**96


def rotation_name(layer: int) -> str:
    """Name of the weight that holds a layer's rotation."""
    return f"layers.{layer}.rotation"


@dataclass(frozen=True)
class Qwen3Scopes:
    """The scopes of a model's graphs.

    Args:
        config: shapes.
        dtype: of weights and hidden states, a key of `DTYPES`.
    """

    config: ModelConfig
    dtype: str = "float32"

    codes_out: ClassVar[int] = TensorProto.UINT8
    """Element type of new codes."""
    centroid_type: ClassVar[type[np.generic]] = np.float32
    """In which centroids meet Q and probabilities."""

    @property
    def element(self) -> int:
        """Element type of weights and hidden states."""
        return DTYPES[self.dtype]

    @property
    def suffix(self) -> str:
        """Of the names of functions that depend on how K and V are stored."""
        return ""

    def levels(self, side: str) -> int:
        """N, levels of a vector of K ("k") or V ("v")."""
        return self.config.heads.head_dim

    def stored_by(self, layer: int) -> dict[str, tuple[str, TensorType]]:
        """What K and V of a layer are stored by and no checkpoint holds: a scope's word for it -> name and type."""
        dim = self.config.heads.head_dim
        return {"rotation": (rotation_name(layer), TensorType(_FLOAT, (dim, dim)))}

    # -- Pieces --------------------------------------------------------------------------------------------------------
    def _widen(self, g: Graph, name: str, x: str) -> str:
        """The same numbers in FP32; nothing to do in an FP32 model."""
        return x if self.element == _FLOAT else g.node(name, "Cast", x, to=_FLOAT)

    def _round(self, g: Graph, name: str, x: str) -> str:
        """Rounded to the model's dtype."""
        return x if self.element == _FLOAT else g.node(name, "Cast", x, to=self.element)

    def _linear(self, g: Graph, name: str, x: str, weight: str) -> str:
        """`x @ weight.T`: [N, in] of the model's dtype -> [N, out] fp32.

        BF16 operands are widened, which is what products and sums in FP32 mean, and what providers without a BF16 product
        can run. FP16 is left to the provider, whose product is FP16.
        """
        if self.dtype == "bfloat16":
            x, weight = g.node(f"{name}_x", "Cast", x, to=_FLOAT), g.node(f"{name}_weight", "Cast", weight, to=_FLOAT)
        if self.dtype == "float16":
            return g.node(name, "Cast", g.node(f"{name}_fp16", "Gemm", x, weight, transB=1), to=_FLOAT)
        return g.node(name, "Gemm", x, weight, transB=1)

    def rms_norm(self, g: Graph, x: str, weight: str) -> list[str]:
        """`x * rsqrt(mean(x**2) + eps) * weight` over the last axis: fp32 [..., N] -> fp32."""
        mean = g.reduce("mean_square", "ReduceMean", g.node("square", "Mul", x, x))
        eps = g.scalar(self.config.final_norm.eps)
        root = g.node("root", "Sqrt", g.node("mean_square_eps", "Add", mean, eps))
        unit = g.node("unit", "Div", x, root)
        return [g.node("scaled", "Mul", unit, self._widen(g, "weight_fp32", weight))]

    def rope(self, g: Graph, x: str, cos: str, sin: str) -> list[str]:
        """Half-split rotary embedding: [B, Q, H, D] fp32; cos and sin [B, Q, 1, D/2]."""
        half = self.config.heads.head_dim // 2
        low, high = g.nodes("halves", "Split", [x, g.integers([half, half])], 2, axis=-1)
        new_low = g.node("low", "Sub", g.node("low_cos", "Mul", low, cos), g.node("high_sin", "Mul", high, sin))
        new_high = g.node("high", "Add", g.node("high_cos", "Mul", high, cos), g.node("low_sin", "Mul", low, sin))
        return [g.node("rotated", "Concat", new_low, new_high, axis=-1)]

    def silu_mul(self, g: Graph, gate: str, up: str) -> list[str]:
        """`silu(gate) * up`, fp32."""
        return [g.node("product", "Mul", g.node("silu", "Mul", gate, g.node("sigmoid", "Sigmoid", gate)), up)]

    # -- Quantize ------------------------------------------------------------------------------------------------------
    def quantize(self, g: Graph, x: str, rotation: str) -> list[str]:
        """Store K or V as `tq4`: [B, Q, Hkv, D] fp32 -> codes [B, Q, Hkv, D/2] uint8, scale [B, Q, Hkv] fp16.

        A vector that is not finite gets a scale of NaN, since a graph cannot refuse.
        """
        dim = self.config.heads.head_dim
        tables = READS.built_in(dim)
        unit, norm, lift = self._unit(g, x)
        y = self._rotated(g, "rotated", self._bf16(g, unit), rotation, self.config.heads.num_kv_heads)
        level = self._level(g, y, np.array(tables.boundaries, np.float32))
        centroids = g.constant("centroids", np.array(tables.centroids, np.float32))
        chosen = g.node("chosen", "Gather", centroids, level)
        length = g.node("chosen_norm", "Sqrt", g.reduce("chosen_square", "ReduceSum", g.node("square", "Mul", chosen, chosen)))
        return [self._packed(g, level, dim), self._scale(g, norm, g.node("norm_of_x", "Div", norm, lift), length)]

    def _packed(self, g: Graph, level: str, count: int) -> str:
        """Levels [B, Q, Hkv, count] int32 -> codes [B, Q, Hkv, count / 2]."""
        low, high = g.nodes("level_halves", "Split", [level, g.integers([count // 2] * 2)], 2, axis=-1)
        shifted = g.node("high_nibble", "Mul", high, g.scalar(16, np.int32))
        return self._codes(g, g.node("byte", "Add", low, shifted))

    def _scale(self, g: Graph, norm: str, length_of_x: str, length: str) -> str:
        """fp16 [B, Q, Hkv]: length_of_x / length, at most FP16's largest; NaN where the norm is not finite."""
        scale = g.node("scale_fp32", "Div", length_of_x, length)
        largest = g.scalar(float(np.finfo(np.float16).max))
        saturated = g.node("saturated", "Where", g.node("is_too_large", "Greater", scale, largest), largest, scale)
        finite = g.node("is_finite", "Less", norm, g.scalar(np.inf))
        marked = g.node("marked", "Where", finite, saturated, g.scalar(np.nan))
        narrow = g.node("scale_fp16", "Cast", marked, to=TensorProto.FLOAT16)
        return g.reshape("scale", narrow, [0, 0, self.config.heads.num_kv_heads])

    def _codes(self, g: Graph, byte: str) -> str:
        """int32 0 … 255 as stored."""
        return g.node("codes", "Cast", byte, to=TensorProto.UINT8)

    def _rotated(self, g: Graph, name: str, x: str, rotation: str, heads: int, *, back: bool = False) -> str:
        """`x @ rotation`, or `x @ rotation.T` on the way back: [.., D] fp32."""
        matrix = g.node(f"{name}_by", "Transpose", rotation, perm=[1, 0]) if back else rotation
        return g.node(name, "MatMul", x, matrix)

    def _unit(self, g: Graph, x: str) -> tuple[str, str, str]:
        """x / norm and norm, both of `x * lift`; lift is a power of two, and 1 of all ordinary vectors."""
        largest = g.reduce("largest", "ReduceMax", g.node("magnitude", "Abs", x))
        small = g.node("is_small", "Less", largest, g.scalar(_SMALL))
        raised = g.node("raise", "Where", small, g.scalar(_LIFT), g.scalar(1.0))
        large = g.node("is_large", "Greater", largest, g.scalar(_LARGE))
        lift = g.node("lift_by", "Where", large, g.scalar(1 / _LIFT), raised)
        lifted = g.node("lifted", "Mul", x, lift)
        norm = g.node("norm", "Sqrt", g.reduce("sum_square", "ReduceSum", g.node("lifted_square", "Mul", lifted, lifted)))
        some = g.node("is_some", "Greater", norm, g.scalar(0.0))
        divisor = g.node("divisor", "Where", some, norm, g.scalar(1.0))
        return g.node("unit", "Div", lifted, divisor), norm, lift

    def _bf16(self, g: Graph, unit: str) -> str:
        """Numbers of at most 1, rounded to BF16 and kept in FP32."""
        return g.node("rounded", "Cast", g.node("bf16", "Cast", unit, to=TensorProto.BFLOAT16), to=_FLOAT)

    def _level(self, g: Graph, y: str, boundaries: np.ndarray) -> str:
        """Number of boundaries that each coordinate reaches, int32: one comparison a bit, the highest first."""
        table = g.constant("boundaries", boundaries)
        top = (len(boundaries) + 1) // 2
        reached = g.node(f"reaches_{top}", "GreaterOrEqual", y, g.constant("middle", boundaries[top - 1]))
        level = g.node(f"bit_{top}", "Where", reached, g.scalar(top, np.int32), g.scalar(0, np.int32))
        for step in (2**bit for bit in reversed(range(top.bit_length() - 1))):
            edge = g.node(f"edge_{step}", "Gather", table, g.node(f"next_{step}", "Add", level, g.scalar(step - 1, np.int32)))
            reached = g.node(f"reaches_{step}", "GreaterOrEqual", y, edge)
            level = g.node(
                f"bit_{step}", "Where", reached, g.node(f"with_{step}", "Add", level, g.scalar(step, np.int32)), level
            )
        return level

    # -- Attention -----------------------------------------------------------------------------------------------------
    def attention(
        self, g: Graph, q: str, k_codes: str, k_scale: str, v_codes: str, v_scale: str,
        new_k_codes: str, new_k_scale: str, new_v_codes: str, new_v_scale: str,
        block_table: str, visible: str, stored: str, **by: str,
    ) -> list[str]:  # fmt: skip
        """Attention over what is stored and the new tokens, as stored: q [B, Q, Hq, D] fp32 -> [B*Q, Hq*D] fp32."""
        heads, dim = self.config.heads.num_kv_heads, self.config.heads.head_dim
        group = self.config.heads.num_heads // heads
        q_split = g.reshape("q_groups", q, [0, 0, heads, group, dim])
        q_rows = g.reshape("q_rows", g.node("q_heads_first", "Transpose", q_split, perm=[0, 2, 3, 1, 4]), [0, 0, -1, dim])
        k_levels, v_levels = self.levels("k"), self.levels("v")
        q_rotated = self._into_stored(g, q_rows, by)
        q_paired = self._swap_last_two(g, "q_paired", q_rotated, [0, 0, -1, 2, k_levels // 2], k_levels)

        k = self._centroids(g, "k", k_codes, new_k_codes, block_table)
        scale = g.constant("softmax_scale", np.array(self.config.attentions[0].scale, np.float32))
        k_factor = g.node("k_factor", "Mul", self._scales(g, "k", k_scale, new_k_scale, block_table), scale)
        qk = self._product(g, "qk", q_paired, g.node("k_transposed", "Transpose", k, perm=[0, 1, 3, 2]))
        scores = g.node("scores", "Mul", qk, k_factor)
        masked = g.node("masked", "Where", visible, scores, g.scalar(-np.inf))
        p = g.node("softmax", "Softmax", masked, axis=-1)

        v = self._centroids(g, "v", v_codes, new_v_codes, block_table)
        # Memory behind a sequence's end may hold anything: a probability of 0 does not silence a NaN.
        v_factor = g.node(
            "v_factor", "Where", stored, self._scales(g, "v", v_scale, new_v_scale, block_table),
            g.scalar(0),
        )  # fmt: skip
        pv = self._product(g, "pv", g.node("p_scaled", "Mul", p, v_factor), v)
        unpaired = self._swap_last_two(g, "pv_halves", pv, [0, 0, -1, v_levels // 2, 2], v_levels)
        out = self._from_stored(g, unpaired, by)
        split = g.reshape("out_groups", out, [0, 0, group, -1, dim])
        return [g.reshape("out", g.node("tokens_first", "Transpose", split, perm=[0, 3, 1, 2, 4]), [-1, heads * group * dim])]

    def _into_stored(self, g: Graph, q: str, by: Mapping[str, str]) -> str:
        """Queries [B, Hkv, R, D] as stored keys are met: [B, Hkv, R, N]."""
        return self._rotated(g, "q_rotated", q, by["rotation"], self.config.heads.num_kv_heads)

    def _from_stored(self, g: Graph, out: str, by: Mapping[str, str]) -> str:
        """Sums of stored values [B, Hkv, R, N] back in the model's domain: [B, Hkv, R, D]."""
        return self._rotated(g, "unrotated", out, by["rotation"], self.config.heads.num_kv_heads, back=True)

    def _swap_last_two(self, g: Graph, name: str, x: str, split: Sequence[int], count: int) -> str:
        """Rows [B, H, R, count] seen as [.., m, n], transposed and flattened: halves become pairs, or pairs halves."""
        swapped = g.node(f"{name}_swapped", "Transpose", g.reshape(f"{name}_split", x, split), perm=[0, 1, 2, 4, 3])
        return g.reshape(name, swapped, [0, 0, -1, count])

    def _centroids(self, g: Graph, side: str, codes: str, new_codes: str, block_table: str) -> str:
        """Centroids [B, Hkv, S + Q, N] fp32 of all tokens, in the rotated domain, as their bytes have them.

        Levels 2j and 2j + 1 are the low and the high nibble of byte j, so j and j + N/2 of the vector.
        """
        dim, count = self.config.heads.head_dim, self.levels(side)
        past = self._by_sequence(g, f"past_{side}_codes", codes, block_table, [0, 0, -1, count // 2])
        new = g.node(f"new_{side}_codes_heads_first", "Transpose", new_codes, perm=[0, 2, 1, 3])
        c, byte = np.array(READS.built_in(dim).centroids, np.float32), np.arange(256)
        table = g.constant("centroids_of_byte", np.stack([c[byte & 15], c[byte >> 4]], axis=-1).astype(self.centroid_type))
        pairs = g.node(f"{side}_pairs", "Gather", table, self._indices(g, side, past, new))
        return g.reshape(f"{side}_unpacked", pairs, [0, 0, -1, count])

    def _indices(self, g: Graph, side: str, past: str, new: str) -> str:
        """Bytes [B, Hkv, S + Q, N/2] of past and new tokens as int32."""
        return g.node(f"{side}_index", "Cast", g.node(f"{side}_bytes", "Concat", past, new, axis=2), to=_INT32)

    def _product(self, g: Graph, name: str, a: str, b: str) -> str:
        """Products of Q and K, of probabilities and V."""
        return g.node(name, "MatMul", a, b)

    def _scales(self, g: Graph, side: str, scale: str, new_scale: str, block_table: str) -> str:
        """Scales [B, Hkv, 1, S + Q] fp32 of all tokens."""
        past = self._by_sequence(g, f"past_{side}_scale", scale, block_table, [0, 0, -1])
        new = g.node(f"new_{side}_scale_heads_first", "Transpose", new_scale, perm=[0, 2, 1])
        both = g.node(f"{side}_scale_both", "Cast", g.node(f"{side}_scale_fp16", "Concat", past, new, axis=2), to=_FLOAT)
        return g.reshape(f"{side}_scale_row", both, [0, 0, 1, -1])

    def _by_sequence(self, g: Graph, name: str, field: str, block_table: str, shape: Sequence[int]) -> str:
        """A field of the cache [blocks, Hkv, block, ..] by the blocks of each sequence: [B, Hkv, S, ..], packed."""
        blocks = g.node(f"{name}_blocks", "Gather", field, block_table)
        trailing = [4] if len(shape) == 4 else []
        return g.reshape(name, g.node(f"{name}_heads_first", "Transpose", blocks, perm=[0, 2, 1, 3, *trailing]), shape)

    # -- A layer -------------------------------------------------------------------------------------------------------
    def layer(
        self, g: Graph, hidden: str, k_codes: str, k_scale: str, v_codes: str, v_scale: str,
        block_table: str, visible: str, stored: str, cos: str, sin: str, q_shape: str, kv_shape: str, **w: str,
    ) -> list[str]:  # fmt: skip
        """One decoder layer: hidden [B*Q, hidden] -> the same, and codes and scales of the new tokens' K and V.

        Args:
            w: weights, and what `stored_by` names.
        """
        x = self._normed(g, "input_norm", hidden, w["input_norm.weight"])
        q, k, v = (
            g.node(side, "Reshape", self._projected(g, side, x, w), shape)
            for side, shape in (("q", q_shape), ("k", kv_shape), ("v", kv_shape))
        )
        q, k = (
            g.call(f"{side}_rope", "RoPE", self.rope, x=self._head_norm(g, side, of, w), cos=cos, sin=sin)[0]
            for side, of in (("q", q), ("k", k))
        )
        q = self._widen(g, "q_fp32", self._round(g, "q_rounded", q))
        new_k_codes, new_k_scale = self._stored(g, "k", k, w)
        new_v_codes, new_v_scale = self._stored(g, "v", v, w)
        attended, = g.call(
            "attention", f"Attention{self.suffix}", self.attention, q=q, k_codes=k_codes, k_scale=k_scale, v_codes=v_codes,
            v_scale=v_scale, new_k_codes=new_k_codes, new_k_scale=new_k_scale, new_v_codes=new_v_codes,
            new_v_scale=new_v_scale, block_table=block_table, visible=visible, stored=stored, **self._attended_by(w),
        )  # fmt: skip
        hidden = self._residual(
            g, "attended", hidden, self._linear(g, "o_proj", self._round(g, "o", attended), w["o_proj.weight"])
        )

        x = self._normed(g, "post_norm", hidden, w["post_norm.weight"])
        gate, up = self._linear(g, "gate_proj", x, w["gate_proj.weight"]), self._linear(g, "up_proj", x, w["up_proj.weight"])
        product = self._round(g, "product", g.call("swiglu", "SwiGLU", self.silu_mul, gate=gate, up=up)[0])
        hidden = self._residual(g, "out", hidden, self._linear(g, "down_proj", product, w["down_proj.weight"]))
        return [hidden, new_k_codes, new_k_scale, new_v_codes, new_v_scale]

    def _stored(self, g: Graph, side: str, x: str, w: Mapping[str, str]) -> list[str]:
        """Codes and scale of new K or V."""
        return g.call(f"{side}_quantize", "Quantize", self.quantize, x=x, rotation=w["rotation"])

    def _attended_by(self, w: Mapping[str, str]) -> dict[str, str]:
        """What attention needs of `stored_by`."""
        return {"rotation": w["rotation"]}

    def _projected(self, g: Graph, side: str, x: str, w: Mapping[str, str]) -> str:
        """Q, K or V as projected, with its bias where the family has one."""
        y, bias = self._linear(g, f"{side}_proj", x, w[f"{side}_proj.weight"]), w.get(f"{side}_bias.weight")
        return y if bias is None else g.node(f"{side}_biased", "Add", y, self._widen(g, f"{side}_bias_fp32", bias))

    def _head_norm(self, g: Graph, side: str, x: str, w: Mapping[str, str]) -> str:
        """Q or K, each head normed where the family does so."""
        weight = w.get(f"{side}_norm.weight")
        return x if weight is None else g.call(f"{side}_norm", "RMSNorm", self.rms_norm, x=x, weight=weight)[0]

    def _normed(self, g: Graph, name: str, hidden: str, weight: str) -> str:
        x = self._widen(g, f"{name}_x", hidden)
        return self._round(g, f"{name}_rounded", g.call(name, "RMSNorm", self.rms_norm, x=x, weight=weight)[0])

    def _residual(self, g: Graph, name: str, hidden: str, update: str) -> str:
        total = g.node(f"{name}_sum", "Add", self._widen(g, f"{name}_hidden", hidden), update)
        return self._round(g, f"{name}_rounded", total)

    def head(self, g: Graph, hidden: str, norm: str, weight: str) -> None:
        """Logits [B, vocab] fp32 of hidden states [B, hidden]."""
        x = self._normed(g, "final_norm", hidden, norm)
        self._linear(g, "logits", x, weight)
