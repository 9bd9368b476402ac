"""haarkv: decoder models such as Qwen3 with a rotated low-bit KV cache.

>>> import tq
>>> session = tq.load("tiny", kv="tq4")
>>> result = session.generate("def main(", max_new_tokens=8)
>>> len(result.texts)
1

The command is `tq`, or `python -m tq`. Names are imported on first use, so that `import tq` and `tq --help` need no torch.

load            Load a model, ready to generate.
Session         A loaded model: generate, encode, new_cache.
Sampling        How the next token is drawn: temperature, top-k, top-p and more.
formats         The module of KV formats: names() and get(name).
KVSpec          A KV cache as --kv and its options ask for it.
KVPlan          The formats of each layer's K and V, with tail and sinks.
PagedKVCache    The packed K and V of many sequences, in blocks.
PagedSequences  The blocks that each sequence holds; makes batches.
Batch           The new tokens of one forward, and where they are stored.
ModelConfig   The shapes of a model.
InputError      An error that the caller can correct; its one line says how.
TQCache         A cache for a model of transformers; needs haarkv[hf].
generate        Generate with a model of transformers and a TQCache; needs haarkv[hf].
calibrate       Learn coordinates of a model of transformers for formats lr2 to lr5; needs haarkv[hf].
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from haarkv.engine.sampling import Sampling
    from haarkv.engine.session import Session
    from haarkv.models.config import ModelConfig
    from haarkv.tq_ops import formats
    from haarkv.tq_ops.errors import InputError
    from haarkv.tq_ops.kv.batch import Batch, PagedSequences
    from haarkv.tq_ops.kv.cache import PagedKVCache
    from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
    from tq.hf.cache import TQCache as TQCache
    from tq.hf.cache import generate as generate
    from tq.hf.calibrate import calibrate as calibrate
    from tq.loading import load as load

# Every public name and its module; the docstring says what each is for.
_PUBLIC = {
    "load": "tq.loading",
    "Session": "haarkv.engine.session",
    "Sampling": "haarkv.engine.sampling",
    "formats": "haarkv.tq_ops.formats",
    "KVSpec": "haarkv.tq_ops.kv.plan",
    "KVPlan": "haarkv.tq_ops.kv.plan",
    "PagedKVCache": "haarkv.tq_ops.kv.cache",
    "PagedSequences": "haarkv.tq_ops.kv.batch",
    "Batch": "haarkv.tq_ops.kv.batch",
    "ModelConfig": "haarkv.models.base",
    "InputError": "haarkv.tq_ops.errors",
    "TQCache": "tq.hf.cache",
    "generate": "tq.hf.cache",
    "calibrate": "tq.hf.calibrate",
}
_NEEDS_TRANSFORMERS = ("TQCache", "generate", "calibrate")

# Without those of transformers, so that `from tq import *` needs no extra.
__all__ = [
    "Batch", "InputError", "KVPlan", "KVSpec", "ModelConfig", "PagedKVCache", "PagedSequences", "Sampling", "Session",
    "formats", "load",
]  # fmt: skip


def __dir__() -> list[str]:
    available = [name for name in _PUBLIC if name not in _NEEDS_TRANSFORMERS or find_spec("transformers")]
    return sorted([*available, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("haarkv")
        except PackageNotFoundError:  # run from a checkout that is not installed
            return "0"
    if name == "formats":
        return import_module(_PUBLIC[name])
    if name in _PUBLIC:
        try:
            return getattr(import_module(_PUBLIC[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "transformers":
                raise
            from haarkv.tq_ops.errors import InputError

            raise InputError(f"tq.{name} needs transformers, which is not installed; run pip install 'haarkv[hf]'") from None
    raise AttributeError(f"module 'tq' has no attribute {name!r}")
