"""A replay file: one failing layer with all that a run needs.

tensors   hidden [T, hidden]; weights.FIELD of the layer, of blocks their bytes, with .rows and .columns their scales;
          before.PART.FIELD, its cache: PART is k, v or, where tokens stay in BF16, window.k, sink.k, …; learned.k.NAME for
          formats of learned coordinates; expected.hidden, .k, .v and .PART.FIELD, the reference's results
metadata  haarkv_replay: "5"; config, kv, tail ("" for none), sink, counts, lengths, phase, step: as in `LayerCase`; blocks:
          the type of each weight in blocks, by field; activation_bits: of what these meet; finding, reference, candidate:
          what failed and how; versions
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haarkv.codebooks.learned import Basis
from haarkv.models.config import Attention, Dense, Experts, Layer, ModelConfig, Norm, Rope, RopeScaling
from haarkv.models.gguf_file import block_type_named
from haarkv.models.rope import LinearScaling, Llama3Scaling, YarnScaling
from haarkv.models.tensors import LayerWeights
from haarkv.models.weights import layer_weight_specs
from haarkv.tq_ops import artifact
from haarkv.tq_ops.artifact import REPLAY
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.weight import Blocks, Weight, backing_tensor, rounding_to
from haarkv.validation.layers.forward import LayerRecord
from haarkv.validation.layers.parts import Snapshot, layer_tensors, new_cache
from haarkv.validation.layers.replay.case import VOCABULARY, LayerCase, OneRun, capture, is_learned, judge_case, run_reference

_SCALINGS: dict[str, Any] = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
_MOST_LAYERS = 1024
"""Of a model; every layer up to the failing one is built."""


@dataclass(frozen=True)
class ReplayFile:
    """What a replay file holds.

    Attributes:
        record: the reference's results where the file was written, without recorded calls.
        finding: what failed there: phase, step, layer, stage, reason and detail.
    """

    case: LayerCase
    record: LayerRecord
    finding: Mapping[str, Any]
    reference: str
    candidate: str
    versions: Mapping[str, str]


def build_replay_file(runs: Sequence[OneRun], versions: Mapping[str, str]) -> ReplayFile:
    """The first failure of some runs, cut out; InputError if none failed, or it does not show in a single layer."""
    run = next((run for run in runs if not run.report.passed and run.report.first_divergence), None)
    finding = run.report.first_divergence if run else None
    if run is None or finding is None:
        raise InputError("no layer failed")
    reference, candidate = run.make
    case = capture(reference(run.model, run.plan), run.model, run.prompts, run.steps, run.plan, finding, run.calibration)
    again = judge_case(case, reference, candidate).first_divergence
    if again is None or (again.stage, again.reason) != (finding.stage, finding.reason):
        raise InputError(
            f"what was found at {finding.stage} of layer {finding.layer} does not show when that layer runs alone"
        )
    record = run_reference(case, reference)[1]
    return ReplayFile(case, record, finding.as_dict(), run.report.reference, run.report.candidate, versions)


def save(path: Path, file: ReplayFile) -> None:
    """Write a replay file."""
    case = file.case
    tensors = {name: tensor.cpu().clone() for name, tensor in _tensors(case, file.record).items()}
    blocks = {field: weight for field, _, weight in case.weights.named_tensors() if isinstance(weight, Blocks)}
    metadata = {
        "blocks": json.dumps({field: weight.type.name for field, weight in blocks.items()}),
        "config": json.dumps(_config_values(case.config), sort_keys=True),
        "kv": case.kv,
        "tail": "" if case.tail is None else str(case.tail),
        "sink": str(case.sink),
        "activation_bits": str(min((weight.x_bits for weight in blocks.values()), default=16)),
        "counts": json.dumps(case.counts),
        "lengths": json.dumps(case.lengths),
        "phase": case.phase,
        "step": str(case.step),
        "finding": json.dumps(dict(file.finding), sort_keys=True),
        "reference": file.reference,
        "candidate": file.candidate,
        "versions": json.dumps(dict(file.versions), sort_keys=True),
    }
    artifact.write(path, REPLAY, metadata, tensors)


def _tensors(case: LayerCase, record: LayerRecord) -> dict[str, Tensor]:
    assert record.kv is not None, "`capture` takes layers with K and V"
    tensors = {"hidden": case.hidden, "expected.hidden": record.hidden_out}
    tensors |= zip(("expected.k", "expected.v"), record.kv, strict=True)
    for field, _, weight in case.weights.named_tensors():
        tensors[f"weights.{field}"] = backing_tensor(weight)
        if isinstance(weight, Blocks):
            scales = {"rows": weight.row_scales, "columns": weight.column_scales}
            tensors |= {f"weights.{field}.{axis}": scale for axis, scale in scales.items() if scale is not None}
    for where, part_fields in (("before", case.before), ("expected", record.new_fields)):
        tensors |= {
            f"{where}.{side}.{name}": tensor
            for side, side_fields in part_fields.items()
            for name, tensor in side_fields.items()
        }
    if case.basis:
        tensors |= {f"learned.k.{name}": tensor for name, tensor in vars(case.basis).items()}
    return tensors


def load(path: Path | str) -> ReplayFile:
    """Read a replay file."""
    metadata, tensors = artifact.read(Path(path), REPLAY)
    with REPLAY.refusing(path):
        case = _read_case(tensors, metadata)
        layer = LayerRecord(
            case.index, case.forward, [], case.before, case.hidden, tensors["expected.hidden"],
            (tensors["expected.k"], tensors["expected.v"]), _read_stored(tensors, "expected"),
        )  # fmt: skip
        finding, versions = parse_json(metadata["finding"]), parse_json(metadata["versions"])
        return ReplayFile(case, layer, finding, metadata["reference"], metadata["candidate"], versions)


def _read_case(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> LayerCase:
    config = _read_config(parse_json(metadata["config"]))
    weights = _weights(config, tensors, parse_json(metadata["blocks"]))
    if (bits := int(metadata.get("activation_bits", 16))) not in (8, 16):  # files from before it have none
        raise ValueError(f"activations of {bits} bits")
    weights = weights.map(lambda _, weight: rounding_to(weight, bits))
    basis = None
    if "learned.k.mean" in tensors:
        basis = Basis(*(tensors[f"learned.k.{part.name}"] for part in fields(Basis)))
    kv, before = metadata["kv"], _read_stored(tensors, "before")
    tail = int(metadata["tail"]) if metadata["tail"] else None
    counts, lengths = (tuple(map(int, parse_json(metadata[name]))) for name in ("counts", "lengths"))
    places = counts, lengths, metadata["phase"], int(metadata["step"])
    case = LayerCase(config, weights, kv, tail, int(metadata["sink"]), basis, tensors["hidden"], before, *places)
    if is_learned(kv) != (basis is not None):
        raise ValueError(f"it lacks the learned coordinates of {kv}")
    _check(case)
    return case


def _config_values(config: ModelConfig) -> dict[str, Any]:
    config_values = asdict(replace(config, layers=()))
    layer = asdict(config.common)
    layer["norms_behind"] = layer.pop("post_norms")  # the key that files have
    return config_values | {"layers": config.num_layers, "layer": layer}


def _read_config(raw: Mapping[str, Any]) -> ModelConfig:
    values = dict(raw)
    count, layer = values.pop("layers"), values.pop("layer")
    if type(count) is not int or not 1 <= count <= _MOST_LAYERS:
        raise ValueError(f"its layer is the {count}th, and models have at most {_MOST_LAYERS}")
    rope = layer["mixer"].pop("rope")
    scaling = rope.pop("scaling")
    rope_scaling: RopeScaling | None = _SCALINGS[scaling["rope_type"]](**scaling) if scaling else None
    mlp = Experts if "per_token" in layer["mlp"] else Dense
    layer_config = Layer(
        Attention(rope=Rope(**rope, scaling=rope_scaling), **layer["mixer"]), mlp(**layer["mlp"]), Norm(**layer["norm"]),
        layer["norms_behind"],
    )  # fmt: skip
    typed_values = {"eos_token_ids": tuple(values["eos_token_ids"]), "final_norm": Norm(**values["final_norm"])}
    config = ModelConfig(**values | typed_values | {"layers": (layer_config,) * count})
    if config.vocab_size != VOCABULARY:
        raise ValueError(f"its vocabulary has {config.vocab_size} tokens, not {VOCABULARY}")
    return config


def _weights(config: ModelConfig, tensors: Mapping[str, Tensor], blocks: Mapping[str, str]) -> LayerWeights:
    """The layer's weights, each of the shape that the config asks for; `blocks` has the types of those in blocks, by field."""
    weights_by_field: dict[str, Weight] = {}
    names = {}
    for field, tensor_spec in layer_weight_specs(config.common, config.hidden_size).items():
        tensor: Weight = tensors[f"weights.{field}"]
        dtype = tensor_spec.memory_dtype(tensors["hidden"].dtype)
        if field in blocks:
            scales = (tensors.get(f"weights.{field}.{axis}") for axis in ("rows", "columns"))
            tensor = _blocks(field, backing_tensor(tensor), blocks[field], dtype, *scales)
        if tuple(tensor.shape) != tensor_spec.shape or tensor.dtype != dtype:
            raise ValueError(f"{field} is {tensor.dtype} {list(tensor.shape)}, not {list(tensor_spec.shape)}")
        weights_by_field[field], names[field] = tensor, tensor_spec.name
    return LayerWeights(weights_by_field, names)


def _blocks(field: str, data: Tensor, kind: str, dtype: torch.dtype, rows: Tensor | None, columns: Tensor | None) -> Blocks:
    block_type = block_type_named(kind)
    if data.ndim != 2 or data.dtype != torch.uint8 or data.shape[1] % block_type.nbytes:
        raise ValueError(f"{field} is no rows of {kind}: {data.dtype} {list(data.shape)}")
    weight = Blocks(data, block_type, dtype, rows, columns)
    for scales, size in zip((rows, columns), weight.shape, strict=True):
        if scales is not None and (scales.shape != (size,) or scales.dtype != dtype):
            raise ValueError(f"{field} has scales of {scales.dtype} {list(scales.shape)}")
    return weight


def _read_stored(tensors: Mapping[str, Tensor], where: str) -> Snapshot:
    part_fields: Snapshot = {}
    for name, tensor in tensors.items():
        first, *place = name.split(".")
        if first == where and len(place) > 1:
            part_fields.setdefault(".".join(place[:-1]), {})[place[-1]] = tensor
    return part_fields


def _check(case: LayerCase) -> None:
    """Refuse what does not fit together, before anything is allocated by it."""
    config, blocks = case.config, len(next(iter(case.before["k"].values())))
    pairs = list(zip(case.counts, case.lengths, strict=True))
    if not (
        case.hidden.shape == (sum(case.counts), config.hidden_size)
        and all(0 < count <= length <= config.max_position_embeddings for count, length in pairs)
        and sum(blocks_for(length) for length in case.lengths) + 1 == blocks
    ):
        raise ValueError("its sequences do not fit its tensors")
    cache = new_cache(replace(case.plan, layers=case.plan.layers[-1:]), config.with_layers(1), blocks)
    if _shapes(case.before) != _shapes(layer_tensors(cache, 0)):
        raise ValueError(f"its cache is not that of {case.kv}")


def _shapes(snapshot: Snapshot) -> dict[str, dict[str, tuple[int, ...]]]:
    return {part: {name: tuple(tensor.shape) for name, tensor in fields.items()} for part, fields in snapshot.items()}
