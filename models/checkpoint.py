"""A model's weights from Hugging Face safetensors, memory-mapped, or random of the true shapes. It knows no family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from reprlib import repr as shown
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from haarkv.models.config import ModelConfig
from haarkv.models.large_pages import LargePages
from haarkv.models.parallel import Split
from haarkv.models.weights import HEAD, Weights, assemble, checkpoint_shapes, checkpoint_tensors, num_parameters
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.input_files import read_json, size_of
from haarkv.tq_ops.kv.safetensors_header import Header, header_in
from haarkv.tq_ops.memory import require_memory

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all) while weights load."""

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes room for a tensor of a shape and dtype."""

NOTHING_LENT: Mapping[str, Tensor] = MappingProxyType({})

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_ROPE_FREQUENCIES = ".rotary_emb.inv_freq"


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    seed: int = 0,
    progress: Progress | None = None,
    split: Split | None = None,
    device: torch.device | str = "cpu",
) -> Weights:
    """Weights of the true shapes drawn from N(0, 0.02), norms at 1: for latency work without a checkpoint.

    Args:
        split: keep one rank's part of what the whole model would hold.
        device: where they are drawn and stay; another kind of device draws other numbers.
    """
    on_host = torch.device(device).type == "cpu"
    tensors = random_tensors(config, dtype, seed, device, LargePages().empty if on_host and split is None else None)
    if on_host:
        _require_room(dtype.itemsize * num_parameters(config), split)
    if split:
        stored, of = checkpoint_tensors(config), split
        tensors = ((name, tensor[of.of(stored[name].axes)].clone()) for name, tensor in tensors)
    return _gathered(config, tensors, progress)


def random_tensors(
    config: ModelConfig,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device | str = "cpu",
    empty: Empty | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The same one by one, in the order of `checkpoint_shapes`: one of them is in memory at a time.

    Args:
        empty: makes room for each on the host; torch on `device` unless given.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in checkpoint_tensors(config).items():
        shape = tensor.shape
        if len(shape) == 1 and not name.endswith(".bias"):
            yield name, torch.ones(shape, dtype=torch.float32 if tensor.plus_one else dtype, device=device)
        else:
            room = torch.empty(shape, dtype=dtype, device=device) if empty is None else empty(shape, dtype)
            yield name, room.normal_(0.0, 0.02, generator=generator)


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Progress | None = None,
    split: Split | None = None,
    lent: Mapping[str, Tensor] = NOTHING_LENT,
) -> Weights:
    """Load a checkpoint folder, one file or sharded.

    Files are memory-mapped: a tensor whose dtype is already `dtype` stays in the file's pages and takes no memory of its
    own; others are converted one at a time.

    Args:
        dtype: of the weights in memory, torch.float32 or torch.bfloat16.
        split: read one rank's part of each tensor, and no more.
        lent: tensors of another model by name, for those that this checkpoint leaves out.
    Raises:
        InputError: no weights, or a missing, extra, mis-shaped or truncated tensor, with the tensor's and file's name.
    """
    converted = stored_tensors(
        folder, config, dtype, split, before=lambda count: _require_room(count, split), lent=lent, empty=LargePages().empty
    )
    return _gathered(config, converted, progress)


def _require_room(count: int, split: Split | None) -> None:
    """Refuse weights of so many bytes, of all ranks together, which this machine cannot hold beside each other."""
    require_memory(count / (split.size if split else 1), "its weights", "give --dtype bfloat16, or a smaller model")


def stored_tensors(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    split: Split | None = None,
    wanted: Callable[[str], bool] | None = None,
    before: Callable[[int], object] | None = None,
    lent: Mapping[str, Tensor] = NOTHING_LENT,
    empty: Empty | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The same one by one, in the order of `checkpoint_shapes`; all are checked before the first comes.

    Args:
        wanted: of a tensor's name, whether it is read; all are unless given.
        before: called once, before the first comes, with the bytes of all tensors that are not stored as `dtype`.
        lent: as in `load_weights`; they come as they are.
        empty: makes room for each that is converted; torch unless given.
    Raises:
        InputError: as `load_weights`.
    """
    shapes = checkpoint_shapes(config)
    files = _files_of_tensors(folder)
    lent = {name: tensor for name, tensor in lent.items() if name not in files and tensor.shape == shapes.get(name)}
    shapes = {name: shape for name, shape in shapes.items() if name not in lent}
    _compare_names(folder, shapes, files, tied=config.tied)
    headers = {path: read_header(path) for path in sorted(set(files.values()))}
    for name, shape in shapes.items():
        _check_tensor(name, shape, files[name], headers[files[name]])
    if before:
        stored = {name: headers[files[name]][name]["dtype"] for name in shapes}
        before(sum(dtype.itemsize * math.prod(shapes[name]) for name in shapes if _DTYPES[stored[name]] != dtype))
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_open(path)) for path in headers}
        for name, tensor in checkpoint_tensors(config).items():
            if wanted and not wanted(name):
                continue
            if name in lent:
                yield name, lent[name]
                continue
            file = opened[files[name]]
            if split is not None:
                yield name, tensor.in_memory(file.get_slice(name)[split.of(tensor.axes)], dtype).contiguous()
                continue
            found = file.get_tensor(name)
            if empty is None or tensor.plus_one or found.dtype == dtype:
                yield name, tensor.in_memory(found, dtype)
            else:
                yield name, empty(found.shape, dtype).copy_(found)


def _gathered(config: ModelConfig, tensors: Iterator[tuple[str, Tensor]], progress: Progress | None) -> Weights:
    """A whole model of a stream of its tensors."""
    total, found = len(checkpoint_shapes(config)), {}
    for done, (name, tensor) in enumerate(tensors, 1):
        found[name] = tensor
        if progress:
            progress(done, total)
    return assemble(config, found.__getitem__)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, by the index of a sharded checkpoint or the header of a single file."""
    index = folder / _INDEX
    if index.is_file():
        content = read_json(index)
        names = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise InputError(f"{index} is not an index of safetensors shards: it has no weight_map of names")
        for name, file in names.items():
            if not _stays_within(file):
                raise InputError(
                    f"{index} says that {shown(file)} holds {shown(name)}; a shard lies in the model's own folder"
                )
        files = {name: folder / file for name, file in names.items()}
        for path in sorted(set(files.values())):
            if not path.is_file():
                first = next(name for name, file in files.items() if file == path)
                raise InputError(f"{path} is missing; {index.name} says that it holds {first}")
        return files
    single = folder / _SINGLE
    if not single.is_file():
        raise InputError(f"{folder} has a config but no weights: neither {_SINGLE} nor {_INDEX} is there")
    return dict.fromkeys(read_header(single), single)


def _stays_within(file: str) -> bool:
    """Whether a shard's name leads into the model's folder and nowhere else, whatever links lie there."""
    path = Path(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in file


def read_header(path: Path) -> Header:
    """Tensor name -> {dtype, shape, data_offsets} of a safetensors file, offsets from the file's beginning.

    Raises:
        InputError: not a safetensors file, or its header is cut off.
    """
    size = size_of(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise InputError(f"{path} is truncated inside its header ({size} bytes); fetch it again")
        try:
            return header_in(file, length)
        except ValueError as error:
            raise InputError(f"{path} is not a safetensors file: {error}") from None


def _compare_names(folder: Path, shapes: dict[str, tuple[int, ...]], files: dict[str, Path], *, tied: bool) -> None:
    missing = [name for name in shapes if name not in files]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{folder} lacks the tensor {missing[0]}{more}, which its config asks for")
    # Two kinds of tensor are not read: a copy of the embedding as the head of a tied model, and RoPE's frequencies, which
    # older Llama checkpoints store in every layer and the config gives.
    extra = [
        name for name in files if name not in shapes and not (tied and name == HEAD) and not name.endswith(_ROPE_FREQUENCIES)
    ]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise InputError(f"{files[extra[0]]} holds {extra[0]}{more}, which the config does not know")


def _check_tensor(name: str, shape: tuple[int, ...], path: Path, header: Header) -> None:
    entry = header.get(name)
    if entry is None:
        raise InputError(f"{path} lacks the tensor {name}, which the index says it holds")
    if tuple(entry["shape"]) != shape:
        raise InputError(f"{path}: {name} has shape {shown(entry['shape'])}, the config asks for {list(shape)}")
    if entry["dtype"] not in _DTYPES:
        raise InputError(f"{path}: {name} is stored as {shown(entry['dtype'])}; BF16, F16 or F32 can be read")
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * _DTYPES[entry["dtype"]].itemsize:
        raise InputError(f"{path}: {name} takes {end - begin} bytes, its shape asks for another number; the file is damaged")
    if end > path.stat().st_size:
        raise InputError(f"{path} is truncated: {name} ends at byte {end}, the file at {path.stat().st_size}; fetch it again")


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
