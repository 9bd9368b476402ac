"""A stored sequence as a file, with a SHA-256 of each of its blocks.

    tensors   those of `StoredSequence.tensors`; those of its `earlier` as `earlier.NAME`, never packed; `token_ids` [n] I64;
              `sha256` [blocks, 32] U8, of each block of all layers
    metadata  haarkv_cache: "1", or "2" where tensors are packed; length; origin: what made it, as JSON; note: any text;
              earlier: its length, if there is one

`origin` holds the model's shape, declaration and fingerprint, the plan, and a digest of rotations, tables and learned
coordinates. A sequence continues only where all of that is the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haarkv.tq_ops import artifact, formats
from haarkv.tq_ops.artifact import CACHE
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.plan_file import read_layers
from haarkv.tq_ops.kv.recurrent import MOST_VERSIONS, StateShape
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, Shapes, blocks_for, each
from haarkv.tq_ops.kv.stored import StoredSequence, in_blocks

_EARLIER = "earlier."


@dataclass(frozen=True)
class Origin:
    """What a stored sequence belongs to.

    Attributes:
        weights: fingerprint; if channels are balanced, a dash and which.
        layers: formats of each layer.
        tail: tokens in BF16; None for the fewest that the formats need.
        sink: first tokens in BF16.
        tables: digest of rotations, centroids and learned coordinates.
        made_by: executor and dtype, for people: rounding differs, and a sequence continues all the same.
    """

    shape: ModelShape
    weights: str
    layers: tuple[str, ...]
    tail: int | None
    sink: int
    tables: str
    made_by: str = ""

    def require_same(self, other: Origin, name: str) -> None:
        """Refuse to continue file `name` under another origin; an InputError names the difference."""
        self.shape.require_same(other.shape, name, "prefill again")
        if self.weights.partition("-")[0] != other.weights.partition("-")[0]:
            raise InputError(
                f"{name} was made with other weights (fingerprint {self.weights}; this model's is {other.weights}); "
                "prefill again"
            )
        differing = [layer for layer, pair in enumerate(self.layers) if pair != other.layers[layer]]
        if differing:
            layer = differing[0]
            raise InputError(
                f"{name} stores layer {layer} in {self.layers[layer]}, and this run in {other.layers[layer]}; name the cache "
                "that it was made with"
            )
        if (self.tail, self.sink) != (other.tail, other.sink):
            raise InputError(
                f"{name} keeps tail {self.tail or 0} and sink {self.sink} in BF16, and this run tail {other.tail or 0} and "
                f"sink {other.sink}; give it --kv-tail and --kv-sink of the file"
            )
        if self.tables != other.tables:
            raise InputError(f"{name} was made with other rotations or learned coordinates of the same name; prefill again")
        if self.weights != other.weights:  # which channels are balanced follows from the cache, which is as it should be
            others, instead = ("other", "leave out") if "-" in self.weights else ("no", "give")
            raise InputError(f"{name} was made with {others} channels balanced; {instead} --balance off, or prefill again")

    def require_fits(self, sequence: StoredSequence, plan: KVPlan, name: str) -> None:
        """Refuse a sequence whose tensors are not those of a plan; an InputError names the tensor."""
        for part in filter(None, (sequence, sequence.earlier)):
            expected = _expected(plan, self.shape, part.length, whole=part is sequence)
            for layer, state in self.shape.states:
                state_tensors = _expected_state(state, part, layer, name)
                expected |= {f"layers.{layer}.{key}": shape_and_dtype for key, shape_and_dtype in state_tensors.items()}
            if names := sorted(expected.keys() ^ part.tensors.keys()):
                raise InputError(f"{name} does not fit this cache: {names[0]} is missing, or not of this cache")
            for key, shape_and_dtype in expected.items():
                tensor = part.tensors[key]
                if (actual := (tuple(tensor.shape), tensor.dtype)) != shape_and_dtype:
                    raise InputError(f"{name} does not fit this cache: {key} is {actual}, not {shape_and_dtype}")
        if not all(0 <= token < self.shape.vocab_size for token in sequence.token_ids):
            raise InputError(f"{name} has tokens that this model does not know")


def sequence_origin(plan: KVPlan, shape: ModelShape, weights: str, made_by: str = "") -> Origin:
    """The origin of sequences that a model stores by a plan."""
    layers = tuple(formats.describe(*pair) for pair in plan.layers)
    return Origin(shape, weights, layers, plan.recent, plan.sink, _tables(plan, shape.layers), made_by)


def save(path: Path, sequence: StoredSequence, origin: Origin, note: str = "", compress: bool = False) -> None:
    """Write a stored sequence, all or nothing; `compress` packs what zstd makes at least 5 % smaller. An InputError if it
    cannot be written.
    """
    metadata = {
        "length": str(sequence.length), "note": note,
        "origin": json.dumps(asdict(origin) | {"shape": origin.shape.as_json()}, sort_keys=True),
    }  # fmt: skip
    tensors = {
        **sequence.tensors,
        "token_ids": torch.tensor(sequence.token_ids, dtype=torch.int64),
        "sha256": _block_digests(sequence),
    }
    if sequence.earlier:
        metadata["earlier"] = str(sequence.earlier.length)
        tensors |= {_EARLIER + name: tensor for name, tensor in sequence.earlier.tensors.items()}
    artifact.write(path, CACHE, metadata, tensors, compress)


def load(path: Path) -> tuple[StoredSequence, Origin]:
    """Read a stored sequence and check every byte against its digests; an InputError if it cannot be read or is damaged."""
    metadata, tensors = artifact.read(path, CACHE)
    with CACHE.refusing(path):
        origin = _origin(metadata["origin"])
        token_ids, digests = tensors.pop("token_ids"), tensors.pop("sha256")
        if token_ids.dtype != torch.int64 or token_ids.ndim != 1:
            raise ValueError("its tokens are no ids")
        ids, earlier = tuple(token_ids.tolist()), None
        length = _count(metadata["length"], len(ids))
        if "earlier" in metadata:
            begin = _count(metadata["earlier"], length)
            earlier_tensors = {
                name.removeprefix(_EARLIER): tensors.pop(name) for name in [*tensors] if name.startswith(_EARLIER)
            }
            earlier = StoredSequence(ids[:begin], begin, earlier_tensors)
        sequence = StoredSequence(ids, length, tensors, earlier)
        _check_blocks(sequence, digests)
        return sequence, origin


def load_for(path: Path, origin: Origin, plan: KVPlan) -> StoredSequence:
    """`load` a sequence that continues under an origin and plan; its origin is compared before its tensors are read."""
    read_origin(path)[1].require_same(origin, str(path))
    sequence, _ = load(path)
    origin.require_fits(sequence, plan, str(path))
    return sequence


def read_origin(path: Path) -> tuple[int, Origin]:
    """Stored tokens and origin, from the header alone, unchecked; errors as of `load`."""
    metadata = artifact.header(path, CACHE)
    with CACHE.refusing(path):
        return _count(metadata["length"]), _origin(metadata["origin"])


def read_note(path: Path) -> str:
    """The note, from the header alone; errors as of `load`."""
    return artifact.header(path, CACHE)["note"]


def _expected(
    plan: KVPlan, shape: ModelShape, length: int, whole: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:  # fmt: skip
    """The tensors of K and V, as `LayerKV.take` gives them."""
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for layer, (pair, kv) in enumerate(zip(plan.layers, shape.layers, strict=True)):
        if kv is None:
            continue
        blocks = blocks_for(length) - kv.first_block(length)
        for side, kv_format in zip("kv", pair, strict=True):
            for name, field in kv_format.fields(kv.head_dim).items() if whole or kv.window else ():
                size = (blocks, kv.num_kv_heads, BLOCK_SIZE // kv_format.group_tokens, *field.shape)
                expected[f"layers.{layer}.{side}.{name}"] = size, field.dtype
            if plan.has_window(kv_format) and (whole or plan.ring_tokens(kv_format)):
                size = (kv.num_kv_heads, plan.sink + plan.ring_tokens(kv_format), kv.head_dim)
                expected[f"layers.{layer}.{side}.window"] = size, torch.bfloat16
    return expected


def _expected_state(
    state: StateShape, sequence: StoredSequence, layer: int, name: str
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Tensors of a layer's state; an InputError if its versions are not such as `Recurrent.take` gives."""
    versions = sequence.tensors.get(f"layers.{layer}.seen", torch.empty(0))
    counts = versions.tolist() if versions.dtype == torch.int64 and versions.ndim == 1 else []
    if not 0 < len(counts) < MOST_VERSIONS or counts[-1] != sequence.length or counts != sorted(set(counts)):
        raise InputError(f"{name} does not fit this cache: the state of layer {layer} is not that of {sequence.length} tokens")
    tensors = {key: ((len(counts), *size), dtype) for key, size, dtype in state.tensors}
    return tensors | {"seen": ((len(counts),), torch.int64)}


def _origin(text: str) -> Origin:
    raw: Any = parse_json(text)
    if not isinstance(raw, dict) or raw.keys() != {"shape", "weights", "layers", "tail", "sink", "tables", "made_by"}:
        raise ValueError("its origin is not described")
    shape = ModelShape.read(raw["shape"])
    layers, tail, sink = read_layers(raw, shape)
    for pair in set(layers):
        if not formats.needs_calibration(pair):
            formats.parse(pair)
    return Origin(shape, str(raw["weights"]), tuple(layers), tail, sink, str(raw["tables"]), str(raw["made_by"]))


def _count(text: str, most: int = 10**12) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= most):
        raise ValueError("its length is not a number of its tokens")
    return int(text)


def _fields(sequence: StoredSequence) -> list[Tensor]:
    """What blocks hold, in the order of the names."""
    return [tensor.contiguous() for name, tensor in sorted(sequence.tensors.items()) if in_blocks(name)]


def _block_digests(sequence: StoredSequence) -> Tensor:
    """[blocks, 32] uint8: SHA-256 of each block's fields, ordered by name. Layers with a window lack the first blocks."""
    fields, blocks = _fields(sequence), blocks_for(sequence.length)
    digests = []
    for block in range(blocks):
        digest = hashlib.sha256()
        for tensor in fields:
            if (index := block - blocks + len(tensor)) >= 0:
                digest.update(tensor[index].reshape(-1).view(torch.uint8).numpy().data)
        digests.append(list(digest.digest()))
    return torch.tensor(digests, dtype=torch.uint8).view(-1, 32)


def _check_blocks(sequence: StoredSequence, digests: Tensor) -> None:
    blocks = blocks_for(sequence.length)
    if len(digests) != blocks or any(tensor.ndim < 3 or len(tensor) > blocks for tensor in _fields(sequence)):
        raise ValueError("its tensors are not of as many blocks as it has digests")
    wrong = (_block_digests(sequence) != digests).any(1).nonzero().flatten().tolist() if len(digests) else []
    if wrong:
        raise ValueError(f"block {wrong[0]} of {len(digests)} is damaged")


def _tables(plan: KVPlan, shapes: Shapes) -> str:
    digest = hashlib.sha256()
    for layer, (pair, shape) in enumerate(zip(plan.layers, each(shapes, len(plan.layers)), strict=True)):
        if shape is not None:
            for kv_format in pair:
                digest.update(_format_digest(kv_format, layer, shape.head_dim))
    return digest.hexdigest()[:16]


@cache
def _format_digest(kv_format: KVFormat, layer: int, head_dim: int) -> bytes:
    """Digest of what a format's levels stand for in a layer; of a format without rotated levels, of its name."""
    description = kv_format.description(head_dim)
    digest = hashlib.sha256(kv_format.name.encode())
    if description is not None:
        numbers = [torch.tensor(description.centroids), description.transform.matrix(layer, head_dim)]
        if (coordinates := description.transform.coordinates) is not None:
            numbers += [coordinates(layer).rows, coordinates(layer).mean]
        for tensor in numbers:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
