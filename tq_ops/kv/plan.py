"""A KV plan: the format of K and V in every layer, and which tokens also stay in BF16. A cache is built from it.

>>> plan = KVSpec("k=tq8,v=tq4", tail=64, sink=4, skip_layers=(0, -1)).plan(num_layers=40)
>>> plan.k(0).name, plan.k(1).name, plan.tail(plan.k(1))
('bf16', 'tq8', 64)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration, KVFormat
from haarkv.tq_ops.formats.base import stored_bytes
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, RING_CHUNK, WINDOW_ROOM, KVShape, Shapes, each

_MOST_LISTED = 3
"""Up to this number of different layers, a summary lists the layers' indices."""
BF16_BYTES = 2
"""Bytes of one number in BF16."""


@dataclass(frozen=True)
class KVPlan:
    """How a cache stores K and V.

    Attributes:
        layers: formats of K and V, by layer.
        recent: length R of the BF16 tail, including the query's token; None for the shortest tail that each format needs.
        sink: number of first tokens that stay in BF16; a sliding window hides them from later queries.
        context: length of the longest sequence for which the learned coordinates are valid; None for any length.
    """

    layers: tuple[tuple[KVFormat, KVFormat], ...]
    recent: int | None = None
    sink: int = 0
    context: int | None = None

    def __post_init__(self) -> None:
        for kv_format in self.formats:
            self.tail(kv_format)

    def k(self, layer: int) -> KVFormat:
        """K's format in a layer."""
        return self.layers[layer][0]

    def v(self, layer: int) -> KVFormat:
        """V's format in a layer."""
        return self.layers[layer][1]

    @property
    def formats(self) -> tuple[KVFormat, ...]:
        """Every format in use, in layer order."""
        return tuple(dict.fromkeys(f for pair in self.layers for f in pair))

    def tail(self, kv_format: KVFormat) -> int:
        """R: the number of newest tokens that a query reads in BF16, its own token included.

        Raises:
            InputError: R is too small for a group of tokens to fill.
        """
        least = kv_format.group_tokens - 1
        if self.recent is None:
            return least
        if self.recent < least:
            raise InputError(
                f"{kv_format.name} quantizes {kv_format.group_tokens} tokens together and needs tail={least} or more, "
                f"not {self.recent}"
            )
        return self.recent

    def has_window(self, kv_format: KVFormat) -> bool:
        """Whether K or V in this format also has a residual window."""
        return kv_format.lossy and self.tail(kv_format) + self.sink > 0

    @property
    def by_stretches(self) -> bool:
        """Whether any layer stores keys by stretches."""
        return any(k.rope_shift(layer) is not None for layer, (k, _) in enumerate(self.layers))

    @property
    def has_windows(self) -> bool:
        """Whether any layer has a residual window."""
        return any(self.has_window(kv_format) for kv_format in self.formats)

    def ring_tokens(self, kv_format: KVFormat, room: int = WINDOW_ROOM) -> int:
        """Tokens in the ring of K's or V's residual window: R + `room`; 0 without a tail."""
        tail = self.tail(kv_format)
        return tail + room if tail and kv_format.lossy else 0

    def ring_chunk(self, most: int = RING_CHUNK, chunk: int = BLOCK_SIZE) -> int:
        """The most new tokens of a sequence that a sliding-window layer stores at once: `most`; with a tail up to `chunk`."""
        return min(most, chunk) if any(map(self.ring_tokens, self.formats)) else most

    def _by_layer(self, shapes: Shapes) -> Iterator[tuple[KVShape, tuple[KVFormat, KVFormat]]]:
        """Shape and formats of each layer with K and V."""
        for shape, pair in zip(each(shapes, len(self.layers)), self.layers, strict=True):
            if shape is not None:
                yield shape, pair

    def bytes_per_token(self, shapes: Shapes) -> float:
        """Bytes of one more token in the layers without a sliding window; with scales, without residual windows."""
        return sum(
            shape.num_kv_heads * sum(kv_format.bytes_per_vector(shape.head_dim) for kv_format in pair)
            for shape, pair in self._by_layer(shapes)
            if shape.window is None
        )

    def require_context(self, tokens: int) -> None:
        """Refuse sequences longer than `context`."""
        if self.context is not None and tokens > self.context:
            raise InputError(
                f"the calibration holds for sequences of up to {self.context:,} tokens, and this one may have {tokens:,}; "
                f"learn it from windows of {tokens:,}"
            )

    def require_layout(self, shapes: Shapes, block_size: int = BLOCK_SIZE) -> None:
        """Refuse a head_dim, block size or number of KV heads that a format cannot hold."""
        for kv_format, shape in dict.fromkeys((f, shape) for shape, pair in self._by_layer(shapes) for f in pair):
            stored_bytes(kv_format.fields(shape.head_dim))
            if block_size % kv_format.group_tokens:
                group = kv_format.group_tokens
                raise InputError(f"{kv_format.name} quantizes {group} tokens together, which blocks of {block_size} cut apart")
            description = kv_format.description(shape.head_dim)
            heads = description.transform.heads if description else None
            if heads not in (None, shape.num_kv_heads):
                raise InputError(f"{kv_format.name} was learned of {heads} KV heads, and this model has {shape.num_kv_heads}")

    def describe(self) -> str:
        """The whole plan in one line: `tq4`, or `tq4; layers 0, 3: bf16; tail 64; sink 4`."""
        names = [formats.describe(*pair) for pair in self.layers]
        counts = Counter(names).most_common()
        parts = [counts[0][0]]
        for name, _ in counts[1:]:
            at = ", ".join(str(layer) for layer, other in enumerate(names) if other == name)
            parts.append(f"layer{'s' * (', ' in at)} {at}: {name}")
        return "; ".join([*parts, *self._window_parts()])

    def summary(self) -> str:
        """For people: `describe` if few layers differ; else the number of layers for each format."""
        if len({formats.describe(*pair) for pair in self.layers}) <= _MOST_LISTED:
            return self.describe()
        sides = (Counter(f.name for f in side) for side in zip(*self.layers, strict=True))
        parts = [
            f"{side}: " + ", ".join(f"{counts[name]} {name}" for name in sorted(counts))
            for side, counts in zip("kv", sides, strict=True)
        ]
        return "; ".join([*parts, *self._window_parts()])

    def _window_parts(self) -> list[str]:
        return [f"tail {self.recent}"] * (self.recent is not None) + [f"sink {self.sink}"] * bool(self.sink)


@dataclass(frozen=True)
class KVSpec:
    """The request for a KV plan; `plan` turns it into one when the number of layers is known.

    Attributes:
        kv: format of every layer that `skip_layers` and `layers` do not name: `NAME` or `k=NAME,v=NAME`.
        tail: number of newest tokens in BF16; None for the fewest that a format needs.
        sink: number of first tokens in BF16.
        skip_layers: layers in `bf16`; negative numbers count from the end.
        layers: layer -> format, if it differs from `kv`.
        made_for: model shape for which a plan was measured; it fits no other. None for any.
        calibration: learned coordinates for `lr2` to `lr5`.
        weights: fingerprint of the weights from which `calibration` was learned; "" for any.
    """

    kv: str = "tq4"
    tail: int | None = None
    sink: int = 0
    skip_layers: Sequence[int] = ()
    layers: Mapping[int, str] = field(default_factory=dict)
    made_for: ModelShape | None = None
    calibration: Calibration | None = None
    weights: str = ""

    def require_weights(self, fingerprint: str) -> None:
        """Refuse weights with another fingerprint than `weights`."""
        if self.weights and self.weights != fingerprint:
            raise InputError(
                f"the calibration was learned from other weights (fingerprint {self.weights}; this model's is {fingerprint}); "
                "run `tq calibrate` on this model"
            )

    def __post_init__(self) -> None:
        if self.sink < 0 or (self.tail is not None and self.tail < 0):
            raise InputError(f"tail and sink count tokens and cannot be negative; they are {self.tail} and {self.sink}")

    def heads(self, part: slice) -> KVSpec:
        """The same request for some KV heads: the part of one rank."""
        return replace(self, calibration=self.calibration.heads(part)) if self.calibration else self

    def plan(self, num_layers: int, shape: ModelShape | None = None) -> KVPlan:
        """The plan for a model of `num_layers` layers.

        Raises:
            InputError: an unknown format, a layer that does not exist or is named twice, a tail that is too short, or a model
                with another shape than `made_for`.
        """
        if self.made_for and shape:
            what, by = ("calibration", "calibrate") if self.calibration else ("plan", "plan")
            self.made_for.require_same(shape, f"the {what}", f"run `tq {by}` on this model")
        spec_by_layer: dict[int, str] = {}
        for layer, spec in (*((layer, "bf16") for layer in self.skip_layers), *self.layers.items()):
            if not -num_layers <= layer < num_layers:
                raise InputError(f"there is no layer {layer}; the model has {num_layers}, counted from 0")
            if layer % num_layers in spec_by_layer:
                raise InputError(f"layer {layer % num_layers} is named twice in skip_layers and plan")
            spec_by_layer[layer % num_layers] = spec
        if self.calibration and len(self.calibration.k) != num_layers:
            raise InputError(f"the calibration is of {len(self.calibration.k)} layers, and this model has {num_layers}")
        specs = [spec_by_layer.get(layer, self.kv) for layer in range(num_layers)]
        pairs = tuple(formats.parse(spec, self.calibration) for spec in specs)
        calibration = self.calibration if any(map(formats.needs_calibration, specs)) else None
        return KVPlan(pairs, self.tail, self.sink, calibration.context if calibration else None)
