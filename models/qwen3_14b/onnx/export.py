"""A folder with a model as ONNX graphs, prefill and decode, and one file of weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from haarkv.models.catalog import find_model, open_source, stream_tensors
from haarkv.models.checkpoint import Progress, require_tensors
from haarkv.models.config import ModelConfig
from haarkv.models.qwen3_14b.onnx.model import (
    GraphSpec,
    build,
    coded_values,
    require_opset,
    rope_values,
    stored_values,
    weight_offsets,
    weight_types,
)
from haarkv.models.qwen3_14b.onnx.scopes import Qwen3Scopes
from haarkv.models.rope import RopeTable
from haarkv.models.weights import checkpoint_tensors
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.onnx import EXPORT_SUPPORT, FORMAT
from haarkv.tq_ops.onnx.block_codes import CODES
from haarkv.tq_ops.onnx.block_products import CodedWeight
from haarkv.tq_ops.onnx.graph import StoredWeights, TensorType
from haarkv.tq_ops.weight import Blocks

ABOUT, WEIGHTS = "export.json", "weights.bin"
_COPIED_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Export:
    """What to export: layers, the first with the embedding, the last with the head; `restore` dequantizes blocks."""

    model: str
    config: ModelConfig
    span: range
    dtype: str
    opset: int
    version: str
    restore: bool = False

    def __post_init__(self) -> None:
        require_opset(self.opset)

    @property
    def graph(self) -> GraphSpec:
        """Of a prefill."""
        return GraphSpec(self.span, self.span.start == 0, self.span.stop == self.config.num_layers, self.opset)

    @property
    def kept_types(self) -> tuple[str, ...]:
        """Types of blocks that graphs multiply with."""
        return () if self.restore else tuple(CODES)

    @cached_property
    def blocks(self) -> dict[str, str]:
        """Type of the blocks of each weight that lies in some, by Hugging Face's name."""
        source = open_source(self.model)
        specs = checkpoint_tensors(self.config)
        tensors = {} if source is None else require_tensors(source.path, source.tensors(), specs)
        weight_names = weight_types(Qwen3Scopes(self.config), self.graph)
        return {name: kind for name in weight_names if name in tensors and (kind := tensors[name].blocks) is not None}

    def about(self) -> dict[str, str]:
        """Metadata of every graph."""
        types = sorted(set(self.blocks.values()) & set(self.kept_types))
        return {
            "haarkv.version": self.version,
            "haarkv.model": self.model,
            "haarkv.layers": f"{self.span.start}:{self.span.stop} of {self.config.num_layers}",
            "haarkv.dtype": self.dtype,
            "haarkv.kv_format": FORMAT.name,
            "haarkv.bytes_per_vector": f"{FORMAT.bytes_per_vector(self.config.heads.head_dim):g}",
            "haarkv.rotation_sha256": rotation_sha256(self.span, self.config.heads.head_dim),
            **({"haarkv.blocks": " ".join(types)} if types else {}),
        }


def rotation_sha256(span: range, head_dim: int) -> str:
    """SHA-256 of the rotations of some layers: their BF16 bits, little-endian, row by row, layer after layer."""
    digest, transform = hashlib.sha256(), EXPORT_SUPPORT.built_in(head_dim).transform
    for layer in span:
        digest.update(transform.matrix(layer, head_dim).view(torch.uint16).numpy().astype("<u2").tobytes())
    return digest.hexdigest()


def write_export(folder: Path, export: Export, progress: Progress | None = None) -> list[str]:
    """Write everything into an empty folder, one weight at a time in memory; the graphs' files. InputError of bad weights."""
    specs, kept_types = checkpoint_tensors(export.config), export.kept_types
    coded = {name: CodedWeight(CODES[kind], *specs[name].shape) for name, kind in export.blocks.items() if kind in kept_types}
    scopes, prefill = Qwen3Scopes(export.config, export.dtype, blocks=coded), export.graph
    types = weight_types(scopes, prefill)
    weight_file = StoredWeights(WEIGHTS, weight_offsets(types))
    rope = RopeTable(export.config.common.attention.rope, export.config.max_position_embeddings)
    weights = stream_tensors(export.model, export.config, getattr(torch, export.dtype), kept_types)
    tensors = chain(
        chain.from_iterable(
            coded_values(name, weight) if isinstance(weight, Blocks) else [(name, weight)] for name, weight in weights
        ),
        rope_values(rope),
        stored_values(scopes, prefill).items(),
    )  # fmt: skip
    _write_weights(folder / WEIGHTS, export.dtype, tensors, types, weight_file, progress)
    metadata = export.about()
    plans = {"prefill.onnx": prefill, "decode.onnx": replace(prefill, one_token=True)}
    for name, plan in plans.items():
        model = build(scopes, plan, weight_file)
        onnx.helper.set_model_props(model, metadata)
        (folder / name).write_bytes(model.SerializeToString())
        onnx.checker.check_model(str(folder / name), full_check=True)
    source = find_model(export.model)
    for name in _COPIED_FILES if source is not None else ():
        if (source / name).is_file():  # type: ignore[operator]
            shutil.copyfile(source / name, folder / name)  # type: ignore[operator]
    about = {
        **metadata,
        "opset": export.opset,
        "weights": WEIGHTS,
        "graphs": list(plans),
        "files": sorted(path.name for path in folder.iterdir()),
        "config": _sizes(export.config),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return list(plans)


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """What a program that runs the graphs needs of the config."""
    return {
        "model_type": config.model_type, "num_layers": config.num_layers, **config.heads._asdict(),
        "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "tied": config.tied,
        "max_position_embeddings": config.max_position_embeddings, "eos_token_ids": config.eos_token_ids,
    }  # fmt: skip


def _write_weights(
    path: Path, dtype: str, tensors: Iterable[tuple[str, Tensor]], types: dict[str, TensorType], weight_file: StoredWeights,
    progress: Progress | None,
) -> None:  # fmt: skip
    done = 0
    with path.open("wb") as file:
        for name, tensor in tensors:
            if name not in types:
                continue
            if not all(torch.isfinite(edge) for edge in tensor.aminmax()):
                raise InputError(f"the weight {name} is not finite in {dtype}; give another --dtype or fetch it again")
            file.seek(weight_file.offsets[name])
            file.write(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data)
            done += 1
            if progress:
                progress(done, len(types))
    if done != len(types):
        raise ValueError(f"{len(types) - done} weights were not written")
