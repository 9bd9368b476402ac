"""What the contract is, as data: each function computes one file of `tests/contract/data` from the code at hand.

Every input is made of whole numbers, so it is the same on each machine, and is far enough from every choice of a level that no
device's rounding moves one: `steady` leaves out groups that are not. Bytes of learned keys are in `tests/golden/learned`.
"""

import contextlib
import hashlib
import inspect
import io
import json
import lzma
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from commands import every_command

import tq
from haarkv.codebooks.learned import Basis
from haarkv.engine.plans import shape_signature
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import cache_file, plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, make_calibration
from haarkv.tq_ops.kv.calibration_file import save as save_calibration
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import take
from tq.cli import main

DATA = Path(__file__).parent / "data"
LAYER = 3
GROUPS = 4
SPEC = KVSpec("k=tq5,v=tq3", tail=8, sink=2, skip_layers=(0,))
TOKENS = 12
EXITS = (
    "formats",
    "bogus",
    "formats --head-dim 127",
    "info tiny",
    "dev compile --kv q8_0",
    "dev compile --kv tq4 --device a3",
)
"""One cheap call or two of each exit code."""
NO_SUMS = ("kivi", "q4_0", "q8_0", "fp8", "bf16", "fp32")
"""Formats that round each number by itself, or by the greatest and least of some: no order of adding can matter."""
NO_CALL = ("formats", "InputError")
"""Public names that a user reads or catches."""


# -- Formats ----------------------------------------------------------------------------------------------------------------


def numbers(seed, *shape):
    """FP32 of a bell shape, each a whole number of 128ths: equal on every machine."""
    draw = random.Random(seed)
    count = int(np.prod(shape))
    whole = np.frombuffer(draw.randbytes(4 * count), dtype="<u1").reshape(4, count).astype(np.int64).sum(0) - 510
    return torch.tensor(whole, dtype=torch.float32).div_(128).reshape(shape)


def digest(fields, layout=None):
    """SHA-256 of stored fields by name, dtype, shape and bytes, and of them in the layout of their origin.

    Of a sum in FP32 the first eleven bits count: the last ones are an order of adding, which is the machine's.
    """
    hasher = hashlib.sha256()
    for name, tensor in [*sorted(fields.items()), *([("", layout)] if layout is not None else [])]:
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        tensor = tensor.half() if layout is None and len(fields) > 1 and tensor.dtype == torch.float32 else tensor
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def in_bytes(kv_format, x):
    fields = kv_format.quantize(x, LAYER)
    if any(tensor.dtype == torch.float32 for tensor in fields.values()) and kv_format.plain is None:
        return digest(fields)
    try:
        return digest(fields, kv_format.to_bytes(fields))
    except (NotImplementedError, AttributeError):
        return digest(fields)


def steady(kv_format, x):
    """Whether rounding elsewhere leaves the bytes: eight runs with each number moved by some units in the last place."""
    if kv_format.name.startswith(NO_SUMS):
        return True
    noise = torch.Generator().manual_seed(1)
    variants = (x * (1 + 2**-20 * (torch.rand(x.shape, generator=noise) - 0.5)) for _ in range(8))
    return {in_bytes(kv_format, one) for one in variants} == {in_bytes(kv_format, x)}


def bytes_of_formats(seeds=None):
    """{format: {side and head_dim: {seeds: of its groups, sha256: of what is stored}}}; chosen anew if None."""
    return {name: dict(_format_entries(name, (seeds or {}).get(name))) for name in formats.names()}


def _format_entries(name, frozen_entries):
    for side in "kv":
        for head_dim in (64, 128):
            key, kv_format = f"{side}{head_dim}", formats.get(name, side)
            group = kv_format.group_tokens
            try:
                kv_format.fields(head_dim)
            except InputError:
                continue
            if frozen_entries is not None:
                seeds = frozen_entries[key]["seeds"]
            else:
                steady_seeds = (seed for seed in range(60) if steady(kv_format, numbers(seed, 1, group, head_dim)))
                seeds = [next(steady_seeds) for _ in range(GROUPS)]
            yield (
                key,
                {
                    "seeds": seeds,
                    "sha256": in_bytes(kv_format, torch.cat([numbers(seed, 1, group, head_dim) for seed in seeds])),
                },
            )


# -- Files ------------------------------------------------------------------------------------------------------------------


def tiny(kv=SPEC):
    return tq.load("tiny", kv=kv, executor="reference", dtype="float32", allow_collapse=True, on_warning=lambda _: None)


def sequence(session):
    """A stored sequence of `tiny` whose tensors count up: the layout matters here, and no arithmetic."""
    cache, paging = session.new_cache(1, TOKENS)
    snapshot = take(cache, paging, paging.add(TOKENS), range(TOKENS))
    tensors = {}
    for number, (name, tensor) in enumerate(sorted(snapshot.tensors.items())):
        byte_values = (torch.arange(tensor.nbytes) + number).remainder(113).to(torch.uint8)  # neither infinite nor NaN
        tensors[name] = byte_values.view(tensor.dtype).reshape(tensor.shape)
    return replace(snapshot, tensors=tensors)


def cache_bytes(path, snapshot, origin):
    cache_file.save(path, snapshot, origin, note="a note", compress=False)
    return path.read_bytes()


def plan_text(session):
    config = session.config
    return plan_file.dumps(SPEC.plan(config.num_layers), shape_signature(config), {"budget": 4.5})


def calibration_bytes(path, session):
    """Coordinates that change places and signs of channels, and nothing else."""
    heads, dim = session.config.heads.num_kv_heads, session.config.heads.head_dim
    permutation = torch.eye(dim).roll(1, 0) * torch.tensor([1.0, -1.0]).repeat(dim // 2)
    matrices = permutation.expand(heads, dim, dim)
    bases = [
        Basis(torch.zeros(heads, dim), matrices.mT.contiguous(), matrices.clone(), torch.ones(heads, dim))
        for _ in range(session.config.num_layers)
    ]
    file_calibration = make_calibration(bases, 4096)
    file = CalibrationFile(
        file_calibration, shape_signature(session.config), session.weights.partition("-")[0], {"tokens": 12}, ""
    )
    save_calibration(path, file)
    return path.read_bytes()


def same_file(content):
    """What a safetensors file says, whatever the order that its header is written in."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    return header, hashlib.sha256(content[8 + size :]).hexdigest()


# -- Names ------------------------------------------------------------------------------------------------------------------


def signature(function):
    """Parameters and defaults; what only names an object's place in memory is left out."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(function)))


def public_names():
    return {
        "all": sorted(tq.__all__),
        "on use": sorted(set(tq._PUBLIC) - set(tq.__all__)),
        "signatures": {name: _signatures(getattr(tq, name)) for name in sorted(tq._PUBLIC) if name not in NO_CALL},
    }


def _signatures(target):
    """Of a class with methods to call also those; the rest is made by its parameters and handed over."""
    if target.__name__ not in ("Session", "TQCache"):
        return signature(target)
    signatures = {"": signature(target)}
    for name in sorted(dir(target)):
        member = inspect.getattr_static(target, name)
        if name.startswith("_") or not any(name in base.__dict__ for base in target.__mro__ if _ours(base)):
            continue
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        signatures[name] = (
            signature(member) if inspect.isfunction(member) else "property" if isinstance(member, property) else "value"
        )
    return signatures


def _ours(base):
    return base.__module__.split(".")[0] in ("tq", "haarkv")


# -- Commands ---------------------------------------------------------------------------------------------------------------


def options():
    """{command: {names: what it takes and its default}}, hidden ones as well."""
    return {
        name: {" ".join(p.opts + p.secondary_opts): _parameter(p) for p in command.params} for name, command in every_command()
    }


def _parameter(parameter):
    info = parameter.to_info_dict()
    summary = {key: info[key] for key in ("required", "multiple", "is_flag", "hidden", "default") if info.get(key)}
    summary |= {"nargs": parameter.nargs} if parameter.nargs != 1 else {}
    summary |= {"metavar": parameter.metavar} if parameter.metavar else {}
    summary["type"] = {
        key: info["type"].get(key) for key in ("name", "min", "max", "choices") if info["type"].get(key) is not None
    }
    return json.loads(re.sub(r" at 0x\w+", "", json.dumps(summary, default=repr)))


def exit_codes():
    return {line: silent(line.split()) for line in EXITS}


def silent(words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(words)


# -- All of it --------------------------------------------------------------------------------------------------------------

TABLES = {"formats": bytes_of_formats, "names": public_names, "options": options, "exits": exit_codes}


def read(name):
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def unpack(name):
    return lzma.decompress((DATA / name).read_bytes())
