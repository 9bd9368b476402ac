"""A model's weights: which tensors a declaration asks for, a fingerprint of them, and the memory of weights and a forward."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from haarkv.models.config import Dense, Layer, ModelConfig
from haarkv.models.layer import mixer_kind
from haarkv.models.parallel import Split
from haarkv.models.source import CheckpointTensor, KeptBlocks
from haarkv.models.tensors import Axis, LayerWeights, StoredTensor
from haarkv.tq_ops.weight import Blocks, Weight, backing_tensor

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYER = "model.layers.{}.{}"


@dataclass(frozen=True)
class Weights:
    """A whole model; `lm_head` is `embedding` itself where the head is tied."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Weight

    def named_tensors(self) -> Iterator[tuple[str, Weight]]:
        """(Hugging Face name, weight as it is stored), in the order of a forward."""
        yield EMBEDDING, self.embedding
        for index in range(len(self.layers)):
            for _, name, tensor in self.layers[index].named_tensors():
                yield _LAYER.format(index, name), tensor
        yield FINAL_NORM, self.final_norm
        if self.lm_head is not self.embedding:
            yield HEAD, self.lm_head

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they are stored, a tied head counted once."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def map(self, change: Callable[[Weight], Any]) -> Weights:
        """A copy with `change(weight)` in place of each weight; a tied head stays tied."""
        embedding = change(self.embedding)
        layers = tuple(layer.map(lambda _, tensor: change(tensor)) for layer in self.layers)
        head = embedding if self.lm_head is self.embedding else change(self.lm_head)
        return Weights(embedding, layers, change(self.final_norm), head)


class TensorNames:
    """Names of live tensors by their memory; of two names for one memory the first counts."""

    def __init__(self, named_tensors: Iterable[tuple[str, Weight]]) -> None:
        self._names: dict[tuple[object, ...], str] = {}
        for name, tensor in named_tensors:
            self._names.setdefault(_memory(tensor), name)

    def name_of(self, tensor: Weight) -> str | None:
        """The name of a tensor, if it has one."""
        return self._names.get(_memory(tensor))


def _memory(weight: Weight) -> tuple[object, ...]:
    tensor = backing_tensor(weight)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


# -- What a declaration asks for ---------------------------------------------------------------------------------------------


def layer_weight_specs(layer: Layer, hidden_size: int) -> dict[str, StoredTensor]:
    """Every tensor of a layer by field, named within the layer."""

    def norm(name: str) -> StoredTensor:
        return StoredTensor(f"{name}.weight", (Axis(hidden_size),), plus_one=layer.norm.plus_one)

    tensors = {"input_norm": norm("input_layernorm")}
    tensors |= mixer_kind(layer.mixer).tensors(layer.mixer, layer.norm, hidden_size)
    if layer.post_norms:
        tensors |= {
            "mixer_out_norm": norm("post_attention_layernorm"), "post_norm": norm("pre_feedforward_layernorm"),
            "mlp_out_norm": norm("post_feedforward_layernorm"),
        }  # fmt: skip
    else:
        tensors["post_norm"] = norm("post_attention_layernorm")
    return tensors | _mlp_tensors(layer, hidden_size)


def _mlp_tensors(layer: Layer, hidden_size: int) -> dict[str, StoredTensor]:
    mlp, hidden = layer.mlp, Axis(hidden_size)

    def gated_mlp(field: str, name: str, width: int) -> dict[str, StoredTensor]:
        inner = Axis(width, cut=True)
        axes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        return {field + part: StoredTensor(f"mlp.{name}{part}.weight", part_axes) for part, part_axes in axes.items()}

    if isinstance(mlp, Dense):
        return gated_mlp("", "", mlp.width)
    tensors = {"router": StoredTensor("mlp.gate.weight", (Axis(mlp.count), hidden))}
    for expert in range(mlp.count):
        tensors |= gated_mlp(f"experts.{expert}.", f"experts.{expert}.", mlp.width)
    if mlp.shared:
        tensors |= gated_mlp("shared_expert.", "shared_expert.", mlp.shared)
        tensors["shared_gate"] = StoredTensor("mlp.shared_expert_gate.weight", (Axis(1), hidden))
    return tensors


def layer_tensors(config: ModelConfig, index: int) -> dict[str, StoredTensor]:
    """Every tensor of one layer by field, under its full Hugging Face name."""
    tensors = layer_weight_specs(config.layers[index], config.hidden_size)
    return {field: replace(tensor, name=_LAYER.format(index, tensor.name)) for field, tensor in tensors.items()}


def checkpoint_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Every tensor that a checkpoint of this config must hold, by Hugging Face name."""
    outer = Axis(config.vocab_size, cut=True), Axis(config.hidden_size)
    tensors = {EMBEDDING: StoredTensor(EMBEDDING, outer)}
    for index in range(config.num_layers):
        tensors |= {tensor.name: tensor for tensor in layer_tensors(config, index).values()}
    tensors[FINAL_NORM] = StoredTensor(FINAL_NORM, outer[1:], plus_one=config.final_norm.plus_one)
    if not config.tied:
        tensors[HEAD] = StoredTensor(HEAD, outer)
    return tensors


def num_parameters(config: ModelConfig) -> int:
    """Number of weights, a tied head counted once."""
    return sum(math.prod(tensor.shape) for tensor in checkpoint_tensors(config).values())


def assemble(config: ModelConfig, get: Callable[[str], Any]) -> Weights:
    """`Weights` from a lookup by Hugging Face name."""
    embedding = get(EMBEDDING)

    def layer(index: int) -> LayerWeights:
        tensors = layer_weight_specs(config.layers[index], config.hidden_size)
        names = {field: tensor.name for field, tensor in tensors.items()}
        return LayerWeights({field: get(_LAYER.format(index, name)) for field, name in names.items()}, names)

    layers = tuple(layer(index) for index in range(config.num_layers))
    return Weights(embedding, layers, get(FINAL_NORM), embedding if config.tied else get(HEAD))


# -- Fingerprint -------------------------------------------------------------------------------------------------------------

_NUMBERS = 64


def fingerprint(named_tensors: Iterable[tuple[str, Weight]], *, streamed: bool = False) -> str:
    """16 hexadecimal digits of every tensor's name, shape and first and last 64 numbers in BF16.

    It reads few pages of a checkpoint and does not depend on the dtype in memory; blocks count by their restored numbers. A
    second name of the same memory, such as a tied head, does not count, unless tensors are `streamed`: then no name is one.
    """
    parts: dict[str, tuple[object, bytes]] = {}
    for name, tensor in named_tensors if streamed else list(named_tensors):  # a list keeps memory from being used twice
        memory: object = name if streamed else (backing_tensor(tensor).data_ptr(), tensor.shape)
        parts[name] = memory, _tensor_bytes(name, tensor)
    digest, seen = hashlib.sha256(), set[object]()
    for name in sorted(parts, key=lambda name: (name.startswith("lm_head"), name)):  # the head last: it may be tied
        memory, content = parts[name]
        if memory not in seen:
            digest.update(content)
        seen.add(memory)
    return digest.hexdigest()[:16]


def _tensor_bytes(name: str, tensor: Weight) -> bytes:
    if isinstance(tensor, Blocks):
        rows = -(-_NUMBERS // tensor.shape[1])
        first, last = (tensor.rows(part).reshape(-1) for part in (slice(rows), slice(-min(rows, len(tensor)), None)))
    else:
        first = last = tensor.detach().reshape(-1)
    ends = torch.cat([first[:_NUMBERS], last[-_NUMBERS:]]).to("cpu", torch.bfloat16)
    return f"{name} {list(tensor.shape)}\n".encode() + ends.view(torch.uint8).numpy().tobytes()


# -- Memory, from the sizes of tensors alone, before any is read --------------------------------------------------------------

IN_PLACE: Mapping[str, float] = MappingProxyType({})
_FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class WeightBytes:
    """Bytes that weights take.

    Attributes:
        private: of the process: restored, converted, reordered or drawn.
        mapped: used in the file's pages, which the system may drop and read again.
        gathered: part of `mapped`, an untied embedding; a forward touches only its tokens' rows.
    """

    private: int = 0
    mapped: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """Private and mapped."""
        return self.private + self.mapped

    def copied(self) -> WeightBytes:
        """The same with all but `gathered` copied from the file's pages to private memory."""
        return replace(self, private=self.private + self.mapped - self.gathered, mapped=self.gathered)


def keeps(block_type: str | None, keep_blocks: KeptBlocks) -> bool:
    """Whether blocks of a type stay as they are; there are none without a type."""
    return block_type is not None and (keep_blocks if isinstance(keep_blocks, bool) else block_type in keep_blocks)


def in_file_pages(
    source_tensor: CheckpointTensor, tensor: StoredTensor, dtype: torch.dtype, blocks: bool, whole: bool
) -> bool:
    """Whether a tensor loaded as `dtype` stays in its file's pages.

    Args:
        blocks: its blocks are kept; a part of them is a view, a part of dense rows a copy.
        whole: not one rank's part.
    """
    as_it_is = blocks or (source_tensor.dtype == tensor.memory_dtype(dtype) and not tensor.plus_one)
    return as_it_is and source_tensor.in_place and (blocks or whole)


def is_gathered(name: str, specs: Container[str]) -> bool:
    """Whether a forward reads only some rows: of an untied embedding."""
    return name == EMBEDDING and HEAD in specs


def weight_bytes(
    source_tensors: Mapping[str, CheckpointTensor],
    specs: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    split: Split | None = None,
    keep_blocks: KeptBlocks = False,
    in_order: Mapping[str, float] = IN_PLACE,
) -> WeightBytes:
    """Bytes of weights that `checkpoint.stored_tensors` reads, with its arguments.

    Args:
        source_tensors: tensors that are not among them are shared and take nothing.
        in_order: bytes of memory a number, by type of blocks that the executor reorders; an untied embedding is not reordered.
    """
    private = file_bytes = gathered = 0
    for name, tensor in specs.items():
        if (source_tensor := source_tensors.get(name)) is None:
            continue
        share = _share(tensor, split)
        blocks = keeps(source_tensor.blocks, keep_blocks) and not (split and source_tensor.cuts(split.slices(tensor.axes)[-1]))
        in_file = round(source_tensor.nbytes * share)
        bytes_per_number = in_order.get(source_tensor.blocks or "") if blocks else None
        if bytes_per_number is not None and not is_gathered(name, specs):
            private += round(math.prod(tensor.shape) * share * bytes_per_number)
            continue
        if in_file_pages(source_tensor, tensor, dtype, blocks, whole=share == 1):
            file_bytes += in_file
            if is_gathered(name, specs):
                gathered = in_file
        else:
            private += in_file if blocks else round(math.prod(tensor.shape) * share) * tensor.memory_dtype(dtype).itemsize
    return WeightBytes(private, file_bytes, gathered)


def work_bytes(config: ModelConfig, tokens: int, sequences: int) -> int:
    """Bytes of a forward's activations, about, all FP32: of the widest layer, hidden state, norm, update, and logits.

    A mixer's outputs count twice, before and after norms and RoPE; an MLP's gate, up and product once each.
    """
    widest = 0
    for layer in dict.fromkeys(config.layers):
        tensors = mixer_kind(layer.mixer).tensors(layer.mixer, layer.norm, config.hidden_size).values()
        outputs = sum(tensor.shape[0] for tensor in tensors if len(tensor.shape) == 2)
        widest = max(widest, 2 * outputs, 3 * max(layer.mlp.width, getattr(layer.mlp, "shared", 0)))
    logits = 2 * sequences * config.vocab_size
    return _FP32 * (tokens * (widest + 3 * config.hidden_size) + logits)


def _share(tensor: StoredTensor, split: Split | None) -> float:
    if split is None:
        return 1.0
    parts = (len(range(size)[part]) / size for size, part in zip(tensor.shape, split.slices(tensor.axes), strict=True))
    return math.prod(parts)
