"""From a model's name, as users give it, to its shapes and weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from haarkv.models.base import DecoderModel
from haarkv.models.checkpoint import (
    NO_SHARED_WEIGHTS,
    Progress,
    load_weights,
    random_tensors,
    require_tensors,
    stored_tensors,
)
from haarkv.models.config import ModelConfig
from haarkv.models.families import SIZES
from haarkv.models.hf_config import parse_config
from haarkv.models.hf_folder import HFFolder
from haarkv.models.parallel import SINGLE_RANK, Ranks, Split
from haarkv.models.source import CheckpointTensor, KeptBlocks, Source
from haarkv.models.weights import IN_PLACE, WeightBytes, checkpoint_tensors, fingerprint, weight_bytes
from haarkv.tq_ops.errors import InputError, warn
from haarkv.tq_ops.input_files import read_file
from haarkv.tq_ops.memory import available_memory
from haarkv.tq_ops.weight import Weight, rounding_to

TINY = Path(__file__).parent / "tiny_qwen3"
_BUNDLED_MODELS = {
    "tiny": TINY, "tiny-draft": Path(__file__).parent / "tiny_draft", "tiny-hybrid": Path(__file__).parent / "tiny_qwen3_5",
}  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RANDOM, GGUF = "random:", ".gguf"
_COMPANION_FILE = re.compile(r"mmproj|-(?!00001)[0-9]{5}-of-[0-9]{5}\.gguf$", re.IGNORECASE)
"""Names of GGUF files that are no model, or not its first part."""


def model_files(name: str | Path) -> Sequence[Path]:
    """`Source.files` of a model; none without such a model or file."""
    try:
        source = open_source(name)
    except InputError:
        return ()
    return () if source is None else source.files()


def find_model(name: str | Path) -> Path | None:
    """The folder or GGUF file of a model; None for `random:SIZE`.

    Args:
        name: `tiny`, `tiny-hybrid`, `random:SIZE`, a folder, a `.gguf` file, or the Hub id of a downloaded model;
            `ORG/NAME:Q4_K_M` is one of several GGUF files.
    Raises:
        InputError: no such model, or several.
    """
    text = str(name)
    if text in _BUNDLED_MODELS or text.startswith(_RANDOM):
        return _BUNDLED_MODELS.get(text)
    try:
        path = Path(name).expanduser()
        is_there, is_folder = bool(text) and path.exists(), path.is_dir()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or no such home
        path, is_there, is_folder = Path(), False, False
    if is_there and (is_folder or path.suffix == GGUF):  # what is no regular file is refused as what it is
        return _model_in(path, text) if is_folder else path
    hub_id, _, tag = text.partition(":")
    if (snapshot := _hub_snapshot(hub_id)) is not None:
        return _model_in(snapshot, text, tag)
    if is_there and (path.parent / "config.json").exists():
        raise InputError(f"{text} is one file of a model; name its folder, {path.parent}")
    raise InputError(
        f"no such model: {text or repr('')}; give tiny, random:SIZE, a folder in Hugging Face format, a .gguf file, or "
        "the Hub id of a model that you have downloaded (hf download ORG/NAME)"
    )


def _model_in(folder: Path, name: str, tag: str = "") -> Path:
    """A folder, or its one GGUF file whose name has the tag, where it has no other weights."""
    if not tag and any(folder.glob("*.safetensors")):
        return folder
    # Of a model in parts the first; what turns pictures into tokens is no model.
    files = [
        path for path in sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]) if not _COMPANION_FILE.search(path.name)
    ]
    tag_pattern = re.compile(rf"(?<![a-z0-9_]){re.escape(tag)}(?![a-z0-9_])", re.IGNORECASE)
    fitting = [path for path in files if not tag or tag_pattern.search(str(path.relative_to(folder)))]
    if len(fitting) == 1:
        return fitting[0]
    if files or tag:
        names = ", ".join(str(path.relative_to(folder)) for path in (fitting or files)[:20])
        which = "several GGUF files" if fitting or not tag else f"no GGUF file with {tag} in its name"
        raise InputError(f"{name} has {which}: name one as {folder}/FILE, of {names or 'none'}")
    if not (folder / "config.json").exists() and (below := sorted(folder.glob("*/config.json"))):
        raise InputError(f"{name} has no config.json; name the folder of a model in it, such as {below[0].parent}")
    return folder


def open_source(name: str | Path) -> Source | None:
    """The source of a model; None for `random:SIZE`. Arguments and errors of `find_model`."""
    path = find_model(name)
    if path is None:
        return None
    if path.is_dir():
        return HFFolder(path)
    from haarkv.models.gguf_source import GGUFSource

    return GGUFSource(path)


def _hub_snapshot(hub_id: str) -> Path | None:
    """The snapshot of `refs/main`, or else the newest, in the Hub's cache; it may lack files, which its reader names."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id):
        return None
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        folder, main = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=hub_id, repo_type="model"), ""
    except HFValidationError:  # a name that the Hub would not give
        return None
    snapshots = {path.name: path for path in folder.glob("snapshots/*") if path.is_dir()}
    with suppress(InputError, ValueError):
        main = read_file(folder / "refs" / "main").decode().strip()
    newest = max(snapshots.values(), key=lambda path: path.stat().st_mtime, default=None)
    if main and newest and main not in snapshots:
        warn(f"{folder} has no snapshot {main[:40]!r}, which refs/main names; the newest is taken, {newest.name}")
    return snapshots.get(main) or newest


def read_config(name: str | Path, layers: int | None = None) -> ModelConfig:
    """Declaration of a model by name, without reading its weights.

    Args:
        name: as in `find_model`; sizes of `random:SIZE` are `models.families.SIZES`.
        layers: number of layers, for `random:SIZE` only.
    Raises:
        InputError: no such model, a config that no family builds, or layers for a checkpoint.
    """
    source = open_source(name)
    if source is not None:
        if layers is not None:
            raise InputError("--layers shortens a random model; a checkpoint runs whole")
        settings = source.settings()
        if isinstance(by := settings.get("quantization_config"), dict) and (method := by.get("quant_method")):
            raise InputError(
                f"{source.path}: its weights are quantized by {method}, which is not read; take the model's files without it, "
                "or a GGUF file"
            )
        return parse_config(source.settings_path, settings)
    size = str(name).removeprefix(_RANDOM)
    if size not in SIZES:
        raise InputError(f"no such size: {name}; choose from {', '.join(_RANDOM + s for s in SIZES)}")
    config = SIZES[size]
    if layers is None:
        return config
    if not 1 <= layers <= config.num_layers:
        raise InputError(f"{name} has {config.num_layers} layers; --layers must lie in 1 … {config.num_layers}")
    return config.with_layers(layers)


def load_model(
    name: str | Path,
    dtype: str = "float32",
    layers: int | None = None,
    progress: Progress | None = None,
    ranks: Ranks = SINGLE_RANK,
    shared_weights: Mapping[str, Weight] = NO_SHARED_WEIGHTS,
    keep_blocks: KeptBlocks = False,
    activation_bits: int = 16,
    mmap: bool = True,
) -> DecoderModel:
    """Load a model by name, or this rank's part of it, onto the host; arguments as of `read_config` and `load_weights`.

    Args:
        dtype: of weights and hidden states, float32 or bfloat16.
        activation_bits: `Blocks.x_bits` of the blocks that are kept.
    Raises:
        InputError: as `read_config` and `load_weights`; an unknown dtype; or a model that these ranks cannot share.
    """
    weight_dtype, config = _dtype(dtype), read_config(name, layers)
    split = Split(config, ranks.rank, ranks.size) if ranks.size > 1 else None
    path, tensors = _tensors(name, config)
    weights = load_weights(path, tensors, config, weight_dtype, progress, split, shared_weights, keep_blocks, mmap)
    part = split.part if split else config
    return DecoderModel.from_weights(part, weights.map(partial(rounding_to, bits=activation_bits)), ranks)


def _tensors(name: str | Path, config: ModelConfig) -> tuple[Path, Mapping[str, CheckpointTensor]]:
    """A model's path, for messages, and its tensors."""
    source = open_source(name)
    return (Path(name), random_tensors(checkpoint_tensors(config))) if source is None else (source.path, source.tensors())


def model_weight_bytes(
    name: str | Path, config: ModelConfig, dtype: str, split: Split | None = None, keep_blocks: KeptBlocks = False,
    in_order: Mapping[str, float] = IN_PLACE,
) -> WeightBytes:  # fmt: skip
    """Bytes that `load_model` takes for weights, which are checked against the config; `in_order` as of `weight_bytes`."""
    specs = checkpoint_tensors(config)
    return weight_bytes(require_tensors(*_tensors(name, config), specs), specs, _dtype(dtype), split, keep_blocks, in_order)


def maps_file(weights: WeightBytes, mmap_option: bool | None, processes: int = 1, in_place: bool = True) -> bool:
    """Whether weights stay in their file's pages; by default unless twice their size is free, since private memory is faster.

    Args:
        weights: of one process, as mapped.
        processes: on this machine, with as many weights each.
        in_place: the executor multiplies with them in place, in every forward.
    """
    return (
        mmap_option
        if mmap_option is not None
        else not in_place or 2 * processes * weights.copied().private > available_memory()
    )


def block_types(name: str | Path) -> list[str]:
    """Types of a model's quantized blocks, by name."""
    source = open_source(name)
    tensors = source.tensors().values() if source is not None else ()
    return sorted({tensor.blocks for tensor in tensors if tensor.blocks is not None})


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; choose from {', '.join(DTYPES)}")
    return DTYPES[name]


def stream_tensors(
    name: str | Path, config: ModelConfig, dtype: torch.dtype, keep_blocks: KeptBlocks = False
) -> Iterator[tuple[str, Weight]]:
    """A model's weights by Hugging Face name, one in memory at a time; errors of `load_weights` come with the first."""
    return stored_tensors(*_tensors(name, config), checkpoint_tensors(config), dtype, keep_blocks=keep_blocks)


def weights_fingerprint(name: str | Path, layers: int | None = None) -> str:
    """`weights.fingerprint` of a model that is not loaded."""
    weights = stream_tensors(name, read_config(name, layers), torch.bfloat16, keep_blocks=True)
    return fingerprint(weights, streamed=True)
