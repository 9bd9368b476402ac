"""haarkv: Qwen3 with a rotated low-bit KV cache.

>>> import tq
>>> session = tq.load("tiny", kv="tq4")
>>> result = session.generate(["def main("], max_new_tokens=8)
>>> len(result.texts)
1

Names are imported when they are first used, so that `import tq` and `tq --help` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("haarkv")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0"

_PUBLIC = {
    "Batch": "haarkv.tq_ops.kv.batch",
    "InputError": "haarkv.tq_ops.errors",
    "KVPlan": "haarkv.tq_ops.kv.plan",
    "KVSpec": "haarkv.tq_ops.kv.plan",
    "PagedKVCache": "haarkv.tq_ops.kv.cache",
    "PagedSequences": "haarkv.tq_ops.kv.batch",
    "DecoderConfig": "haarkv.models.base",
    "Sampling": "haarkv.engine.sampling",
    "Session": "haarkv.engine.session",
    "TQCache": "tq.hf.cache",
    "generate": "tq.hf.generate",
    "load": "haarkv.engine.session",
}

# Without TQCache and generate, so that `from tq import *` needs no extra.
__all__ = [
    "Batch",
    "DecoderConfig",
    "InputError",
    "KVPlan",
    "KVSpec",
    "PagedKVCache",
    "PagedSequences",
    "Sampling",
    "Session",
    "formats",
    "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "formats":
        return import_module("haarkv.tq_ops.formats")
    if name in _PUBLIC:
        try:
            return getattr(import_module(_PUBLIC[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "transformers":
                raise
            from haarkv.tq_ops.errors import InputError

            raise InputError(f"tq.{name} needs transformers, which is not installed; run pip install 'haarkv[hf]'") from None
    raise AttributeError(f"module 'tq' has no attribute {name!r}")
