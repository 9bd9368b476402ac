"""A decoder layer, the embedding and the head with a packed cache as ONNX scopes, for prefill, decode and any span of layers.

New tokens are a rectangle of B sequences and Q tokens, padded at the right with any token. The cache is read and not written:
a graph returns the codes and scales of the new tokens.

Rounding points: those of `tq_ops.reference`, but probabilities stay in FP32. In FP16 each projection's result is FP16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from onnx import TensorProto

from haarkv.models.qwen3_14b.onnx.attention import TURNS, AttentionScopes
from haarkv.models.weights import layer_tensors
from haarkv.tq_ops.onnx.block_products import CodedWeight, product, rows
from haarkv.tq_ops.onnx.graph import Graph

DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
FIELDS = ("k_codes", "k_scale", "v_codes", "v_scale")
"""What a layer stores of all tokens, in order."""
WINDOW_FIELDS = ("k_kept", "v_kept")
"""What it also stores where tokens stay in BF16."""
EMBEDDING_FIELD, HEAD_FIELD = "embedding", "head"
PROJECTIONS = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))

_FLOAT = TensorProto.FLOAT
_STRETCHES = ("stretches", "slots_end", "fill")
_ATTENDED_BY = ("k_rotation", "k_mean", "k_rows", "v_rotation", "kept_index", "kept_stored")


@dataclass(frozen=True)
class Qwen3Scopes(AttentionScopes):
    """The scopes of a model's graphs; `layer_blocks` are the `blocks` of one layer, by field."""

    layer_blocks: Mapping[str, CodedWeight] = field(default_factory=dict)

    def for_layer(self, layer: int) -> Self:
        """Of one layer."""
        if not self.blocks:
            return self
        tensors = layer_tensors(self.config, layer)
        return replace(
            self, layer_blocks={f: self.blocks[tensor.name] for f, tensor in tensors.items() if tensor.name in self.blocks}
        )

    @property
    def element(self) -> int:
        """Element type of weights and hidden states."""
        return DTYPES[self.dtype]

    @property
    def suffix(self) -> str:
        """For the names of functions that depend on how K and V are stored."""
        return f"_{self.k.name}_{self.v.name}" + (f"_turned_{self.rope_pairs}" if self.rope_pairs else "")

    @property
    def weights_suffix(self) -> str:
        """For functions that depend on how weights are stored: each type, with its fields if there are several."""
        by_name: dict[str, list[str]] = {}
        for projection, weight in self.layer_blocks.items():
            by_name.setdefault(weight.codes.name, []).append(projection.removesuffix("_proj"))
        if len(by_name) == 1 and len(self.layer_blocks) == len(PROJECTIONS):
            return "".join(f"_{name}" for name in by_name)
        return "".join(f"_{name}_of_{'_'.join(fields)}" for name, fields in by_name.items())

    # -- Pieces --------------------------------------------------------------------------------------------------------
    def _widen(self, g: Graph, name: str, x: str) -> str:
        return x if self.element == _FLOAT else g.node(name, "Cast", x, to=_FLOAT)

    def _round(self, g: Graph, name: str, x: str) -> str:
        return x if self.element == _FLOAT else g.node(name, "Cast", x, to=self.element)

    def _linear(self, g: Graph, name: str, x: str, w: Mapping[str, str], field: str) -> str:
        """`x @ weight.T`: [N, in] of the model's dtype -> [N, out] fp32, of `field.weight` or its parts in `w`.

        BF16 operands are widened to FP32. An FP16 product is the provider's. Numbers of blocks are not rounded to either.
        """
        if coded_weight := self.layer_blocks.get(field):
            parts = {part: w[f"{field}.weight.{part}"] for part in coded_weight.types}
            return product(g, name, self._widen(g, f"{name}_x", x), coded_weight, parts)
        weight = w[f"{field}.weight"]
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
        return [self._turn(g, x, cos, sin, "Sub", "Add", self.config.heads.head_dim // 2)]

    def silu_mul(self, g: Graph, gate: str, up: str) -> list[str]:
        """`silu(gate) * up`, fp32."""
        return [g.node("product", "Mul", g.node("silu", "Mul", gate, g.node("sigmoid", "Sigmoid", gate)), up)]

    # -- A layer -------------------------------------------------------------------------------------------------------
    def layer(
        self, g: Graph, hidden: str, block_table: str, visible: str, stored: str, cos: str, sin: str, q_shape: str,
        kv_shape: str, **w: str,
    ) -> list[str]:  # fmt: skip
        """One decoder layer: hidden [B*Q, hidden] -> the same, and new K and V as stored.

        Args:
            w: weights, what `stored` names, `FIELDS`, `WINDOW_FIELDS` with `kept_index` and `kept_stored`, and for keys in
                stretches `stretch` and what `by_stretches` takes.
        """
        x = self._norm(g, "input_norm", hidden, w["input_norm.weight"])
        q, k, v = (
            g.node(side, "Reshape", self._project(g, side, x, w), shape)
            for side, shape in (("q", q_shape), ("k", kv_shape), ("v", kv_shape))
        )
        q, k = (
            g.call(f"{side}_rope", "RoPE", self.rope, x=self._head_norm(g, side, vectors, w), cos=cos, sin=sin)[0]
            for side, vectors in (("q", q), ("k", k))
        )
        q = self._widen(g, "q_fp32", self._round(g, "q_rounded", q))
        token_turns = self.turns_of_tokens(g, w) if self.rope_pairs else {}
        stored_k = self._turned_back(g, k, token_turns)
        new = dict(zip(FIELDS, (*self._store(g, "k", stored_k, w), *self._store(g, "v", v, w)), strict=True))
        for side, vectors in (("k", k), ("v", v)) if "k_kept" in w else ():
            new[f"{side}_kept"] = g.node(f"new_{side}_kept", "Cast", vectors, to=TensorProto.BFLOAT16)
        attention_out, = g.call(
            "attention", f"Attention{self.suffix}", self.attention, q=q, block_table=block_table, visible=visible,
            stored=stored, **{name: w[name] for name in new}, **{f"new_{name}": value for name, value in new.items()},
            **{word: w[word] for word in _ATTENDED_BY if word in w}, **token_turns,
            **{word: w[word] for word in (*TURNS, *_STRETCHES) if self.rope_pairs},
        )  # fmt: skip
        hidden = self._residual(
            g, "attended", hidden, self._linear(g, "o_proj", self._round(g, "o", attention_out), w, "o_proj")
        )

        x = self._norm(g, "post_norm", hidden, w["post_norm.weight"])
        gate, up = (self._linear(g, field, x, w, field) for field in ("gate_proj", "up_proj"))
        mlp_product = self._round(g, "product", g.call("swiglu", "SwiGLU", self.silu_mul, gate=gate, up=up)[0])
        hidden = self._residual(g, "out", hidden, self._linear(g, "down_proj", mlp_product, w, "down_proj"))
        return [hidden, *new.values()]

    def _turned_back(self, g: Graph, k: str, token_turns: Mapping[str, str]) -> str:
        if not self.rope_pairs:
            return k
        cos, sin = (token_turns[f"token_{word}"] for word in TURNS)
        return g.call("k_turned", f"TurnBack_{self.rope_pairs}", self.turn_back, x=k, cos=cos, sin=sin)[0]

    def _store(self, g: Graph, side: str, x: str, w: Mapping[str, str]) -> list[str]:
        scope, words = (
            (self.quantize_learned, ("mean", "forward", "weights"))
            if self.has_learned(side)
            else (self.quantize, ("rotation",))
        )
        by = {word: w[f"{side}_{word}"] for word in words}
        return g.call(f"{side}_quantize", f"Quantize_{self.name(side)}", partial(scope, side=side), x=x, **by)

    def _project(self, g: Graph, side: str, x: str, w: Mapping[str, str]) -> str:
        y, bias = self._linear(g, f"{side}_proj", x, w, f"{side}_proj"), w.get(f"{side}_bias.weight")
        return y if bias is None else g.node(f"{side}_biased", "Add", y, self._widen(g, f"{side}_bias_fp32", bias))

    def _head_norm(self, g: Graph, side: str, x: str, w: Mapping[str, str]) -> str:
        weight = w.get(f"{side}_norm.weight")
        return x if weight is None else g.call(f"{side}_norm", "RMSNorm", self.rms_norm, x=x, weight=weight)[0]

    def _norm(self, g: Graph, name: str, hidden: str, weight: str) -> str:
        x = self._widen(g, f"{name}_x", hidden)
        return self._round(g, f"{name}_rounded", g.call(name, "RMSNorm", self.rms_norm, x=x, weight=weight)[0])

    def _residual(self, g: Graph, name: str, hidden: str, update: str) -> str:
        total = g.node(f"{name}_sum", "Add", self._widen(g, f"{name}_hidden", hidden), update)
        return self._round(g, f"{name}_rounded", total)

    def head(self, g: Graph, hidden: str, norm: str, w: Mapping[str, str]) -> None:
        """Logits [B, vocab] fp32 of hidden states [B, hidden]; the matrix in `w` is field `HEAD_FIELD`."""
        x = self._norm(g, "final_norm", hidden, norm)
        self._linear(g, "logits", x, w, HEAD_FIELD)

    def embed_rows(self, g: Graph, ids: str, w: Mapping[str, str]) -> str:
        """Rows [N, hidden] of the embedding, field `EMBEDDING_FIELD` of `w`, in the model's dtype."""
        coded_weight = self.layer_blocks.get(EMBEDDING_FIELD)
        if coded_weight is None:
            return g.node("embedded", "Gather", w[f"{EMBEDDING_FIELD}.weight"], ids)
        parts = {part: w[f"{EMBEDDING_FIELD}.weight.{part}"] for part in coded_weight.types}
        return self._round(g, "embedded_rounded", rows(g, "embedded", ids, coded_weight, parts))
