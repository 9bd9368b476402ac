"""How a cache lies before a program: fields of K and V, as which numbers, and places of tokens in BF16. No PyPTO here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops import formats
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.stretches import MOST_POSITIONS, STRETCH, RopeShift
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.kernel_support import KernelSupport, unsupported_format
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.residual_window import ResidualWindow
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, WINDOW_CHUNK
from haarkv.tq_ops.npu.learned import TRIES, Layout, domain_tensors, learned_coordinates, learned_layout
from haarkv.tq_ops.npu.program import HEAD_DIM, Argument

FORMAT = formats.get("tq4")
READS = KernelSupport(
    "its programs", head_dims=(64, HEAD_DIM, 256), only=FORMAT, also=(formats.PUBLISHED, formats.get("bf16")),
    bf16_tokens=True, windows=True, learned=True,
)  # fmt: skip
"""What the programs read: a few formats, whose tables are built into them, and learned keys."""


@dataclass(frozen=True)
class StoredField:
    """A field of a format as a program sees it: the cache's own bytes as a matrix [n, width].

    `dtype`: another of the same size where PyPTO's interpreter misreads the field's own. `width`: one vector, or of scales as
    many as lie in a row of logits, or one.
    """

    field: str
    dtype: torch.dtype
    width: int

    def view(self, fields: dict[str, Tensor]) -> Tensor:
        """A layer's field [blocks, Hkv, 128, …] as [n, width], the same memory."""
        return fields[self.field].view(self.dtype).view(-1, self.width)

    @property
    def unread(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Of an `Argument` in its place."""
        return self.dtype, (1, self.width)


@dataclass(frozen=True)
class Side:
    """K or V of one format in a program; those of a layer may differ.

    Attributes:
        vectors, scales: the fields that hold a vector, and one number a vector; None without scales.
        most_heads: KV heads of one iteration of decode, at most, by the cost model.
        width: numbers of a vector as the cube meets it.
        layout: how levels of learned coordinates lie; None for a fixed format.
    """

    name: str
    vectors: StoredField
    scales: StoredField | None
    most_heads: int
    width: int
    layout: Layout | None = None
    head_dim: int = HEAD_DIM

    @property
    def scale_row(self) -> StoredField:
        """Its scales, or the row that stands for them in a program's signature."""
        return self.scales or _NO_SCALES

    def arguments(self, prefix: str) -> tuple[Argument, Argument]:
        """Its two arguments of a program, such as `k_codes` and `k_scale`."""
        scale = Argument(f"{prefix}_scale", self.scales is not None, None if self.scales else _NO_SCALES.unread)
        return Argument(f"{prefix}_{self.vectors.field}", output=True), scale

    def tensors(self, prefix: str, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those arguments, of a layer's fields [blocks, Hkv, 128, …]: the very memory."""
        pairs = zip(self.arguments(prefix), (self.vectors, self.scales), strict=True)
        return {argument.name: field.view(fields) for argument, field in pairs if field}

    @property
    def domain(self) -> tuple[StoredField, ...]:
        """Learned coordinates in a program, `tq_ops.npu.learned.domain_tensors`, and the turns of stretches."""
        dim = self.head_dim
        return (
            StoredField("forward", torch.bfloat16, dim), StoredField("numbers", torch.float32, TRIES * dim),
            StoredField("places", torch.float16, self.layout.nbytes(dim) if self.layout else dim),
            StoredField("rows", torch.float32, dim), StoredField("turns", torch.float32, dim),
        )  # fmt: skip

    def domain_arguments(self) -> tuple[Argument, ...]:
        """Those arguments, such as `k_forward`."""
        return tuple(Argument(f"k_{entry.field}", unread=entry.unread) for entry in self.domain)

    def domain_tensors(self, kv_format: KVFormat, layer: int, device: torch.device) -> dict[str, Tensor]:
        """What a layer's format has of them; the same tensors each time."""
        if (turns := key_turns(kv_format, layer, self.head_dim)) is None:
            return {}
        tensors = domain_tensors(kv_format, self.head_dim, layer, device) | {"turns": turn_table(turns, device)}
        return {f"k_{name}": tensor for name, tensor in tensors.items()}


_NO_SCALES = StoredField("no_scale", torch.float16, BLOCK_SIZE)


def fixed_sides(head_dim: int) -> dict[str, Side]:
    """Every side of a fixed format that programs read, by the name of its format."""
    codes, levels = (StoredField("codes", torch.int8, width) for width in (head_dim // 2, head_dim))
    scale, norm = StoredField("scale", torch.float16, BLOCK_SIZE), StoredField("norm", torch.float32, 1)
    data = StoredField("data", torch.bfloat16, head_dim)
    rows = ((FORMAT.name, codes, scale, 8), (formats.PUBLISHED.name, levels, norm, 4), ("bf16", data, None, 2))
    return {name: Side(name, vectors, scales, heads, head_dim, head_dim=head_dim) for name, vectors, scales, heads in rows}


TQ4, PUBLISHED, BF16 = fixed_sides(HEAD_DIM).values()


def layer_sides(plan: KVPlan, layer: int, head_dim: int = HEAD_DIM) -> tuple[Side, Side]:
    """A layer's K and V."""
    return format_side(plan.k(layer), layer, head_dim), format_side(plan.v(layer), layer, head_dim)


def format_side(kv_format: KVFormat, layer: int = 0, head_dim: int = HEAD_DIM) -> Side:
    """The side that stores a format in a layer; ValueError if no program reads it (`unsupported` says so before)."""
    if unsupported_format(READS, kv_format, head_dim) is not None:
        raise ValueError(f"no program reads {kv_format.name}")
    if not learned_coordinates(kv_format, head_dim, layer):
        return fixed_sides(head_dim)[kv_format.name if kv_format in READS.also else FORMAT.name]
    layout = learned_layout(kv_format, head_dim)
    codes = StoredField("codes", torch.int8, layout.nbytes(head_dim))
    scales = StoredField("scale", torch.float16, BLOCK_SIZE)
    return Side(kv_format.name, codes, scales, 8, layout.width(head_dim), layout, head_dim)


# -- Keys by stretches ----------------------------------------------------------------------------------------------------


def key_turns(kv_format: KVFormat, layer: int, head_dim: int) -> RopeShift | None:
    """How learned keys turn by stretches: by angles of 0 where it is not known; None of a fixed format."""
    if learned_coordinates(kv_format, head_dim, layer) is None:
        return None
    return kv_format.rope_shift(layer) or RopeShift((0.0,) * (head_dim // 2))


@cache
def turn_table(turns: RopeShift, device: torch.device) -> Tensor:
    """[every stretch, D] fp32, cos and then sin of the angles at which stretches begin; the same tensor each time."""
    return torch.cat(turns.table(MOST_POSITIONS // STRETCH, device), 1).contiguous()


def turns_of_tokens(turns: RopeShift, positions: Tensor) -> Tensor:
    """The rows [T, D] of that table by which keys at positions [T] are turned back."""
    return turn_table(turns, positions.device)[positions // STRETCH]


# -- Tokens in BF16 ---------------------------------------------------------------------------------------------------------

HIDDEN = -1e30
"""Added to a logit that no query may see."""
_ONE_TILE, _LINE = 256, 16
MOST_PLACES, MOST_SINKS = 2048, 256
"""Places that one step of attention takes, and sinks, which its first step of packed keys hides."""


@dataclass(frozen=True)
class WindowShape:
    """K and V of a layer that stay in BF16, as in `ResidualWindow`.

    `tail`, `sink`: newest and first tokens that a query sees in BF16; `ring`: newest tokens there is room for; `seen`: the
    newest tokens that a query sees at all, itself among them, None for all.
    """

    tail: int
    sink: int
    ring: int
    seen: int | None = None

    @property
    def window(self) -> int:
        """Places of one head of a sequence."""
        return self.sink + self.ring

    @property
    def span(self) -> int:
        """Places as the cube takes them: whole lines, or whole tiles of 256."""
        whole = _LINE if self.window <= _ONE_TILE else _ONE_TILE
        return -(-self.window // whole) * whole

    @property
    def tile(self) -> int:
        """Places of one tile of the cube; divides the span."""
        return min(self.span, _ONE_TILE)


def window_shape(plan: KVPlan, layer: int, chunk: int = WINDOW_CHUNK, window: int | None = None) -> WindowShape | None:
    """What a layer keeps in BF16, None where nothing; `chunk` is the cache's, `window` the layer's."""
    k_format = plan.k(layer)
    if not plan.has_window(k_format):
        return None
    return WindowShape(plan.tail(k_format), plan.sink, plan.ring_tokens(k_format, chunk), window)


@dataclass(frozen=True)
class Keeping:
    """What a batch's tokens see and leave in BF16.

    Attributes:
        begin: [T] int64, the row of a token's sequence and its first head among all rows of places.
        seen: [T, span] fp32, 0 at places that a token's query sees and `HIDDEN` at all others.
        token, place: int64, pairs of which token goes to which place of its sequence.
    """

    begin: Tensor
    seen: Tensor
    token: Tensor
    place: Tensor


def keeping(residual: ResidualWindow, shape: WindowShape, batch: Batch) -> Keeping:
    """The `Keeping` of a layer's K or V, which are alike."""
    positions, device = batch.positions, batch.positions.device
    heads, window = residual.vectors.shape[1:3]
    recent = positions.unsqueeze(1) - torch.arange(shape.tail, device=device)
    first = torch.arange(shape.sink, device=device).expand(len(positions), -1)
    oldest = (positions.unsqueeze(1) + 1 - shape.seen).clamp(min=0) if shape.seen else 0
    visible = torch.cat([recent >= oldest, (first <= positions.unsqueeze(1)) & (first >= oldest)], 1)
    places = torch.cat([residual.places(recent.clamp(min=0)), first], 1)
    mask = torch.full((len(positions), shape.span + 1), HIDDEN, device=device)
    # Places that are not seen go to a column behind the last.
    mask.scatter_(1, places.masked_fill(~visible, shape.span), 0.0)
    tokens = torch.arange(len(positions), device=device)
    sinks = (positions < shape.sink).nonzero().flatten()
    in_ring = tokens if shape.ring else tokens[:0]
    return Keeping(
        begin=batch.of_tokens(batch.rows) * (heads * window),
        seen=mask[:, : shape.span],
        token=torch.cat([in_ring, sinks]),
        place=torch.cat([residual.in_ring(positions[in_ring]), positions[sinks]]),
    )
