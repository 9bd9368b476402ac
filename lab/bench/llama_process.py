"""llama.cpp in a process of its own: one model, and a context with a KV cache of each kind that is compared.

A process of its own, because llama.cpp ends the process where it meets what it cannot do, and because its threads are then
none of ours. Its times are taken there. It loads no torch.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from haarkv.tq_ops.errors import InputError

BITS = {
    "f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5, "iq4_nl": 4.5
}  # fmt: skip
"""Every type of its KV cache: bits of a number, scales included."""
BATCH, MICRO_BATCH = 2048, 512
"""Tokens of a prompt that it takes at a time, and those that it computes at a time: its own defaults."""
_PROCESSES = multiprocessing.get_context("spawn")
_LOG_ERROR = 4  # ggml's number of an error


class LlamaError(Exception):
    """llama.cpp refused, or its process has ended; the message says why."""


class LlamaKV(NamedTuple):
    """One kind of its KV cache: the type of K and of V, one of `BITS`, and whether attention is its flash attention."""

    type: str
    flash: bool

    @property
    def name(self) -> str:
        """As it is called in tables."""
        return f"{self.type} flash" if self.flash else f"{self.type} plain"


def parse_kinds(text: str) -> tuple[LlamaKV, ...]:
    """Kinds of KV cache from a list; a quantized V is read by flash attention alone, and what is not read is refused.

    >>> [kind.name for kind in parse_kinds("f16,q8_0,bf16:plain")]
    ['f16 flash', 'f16 plain', 'q8_0 flash', 'bf16 plain']
    """
    kinds: dict[LlamaKV, None] = {}
    for part in text.split(","):
        name, _, way = part.strip().partition(":")
        if name not in BITS:
            raise InputError(f"llama.cpp has no KV cache {name!r}; choose from {', '.join(BITS)}")
        ways = {"flash": True} | ({"plain": False} if BITS[name] >= 16 else {})
        if way and way not in ways:
            raise InputError(f"llama.cpp cannot read {name} that way; write {' or '.join(f'{name}:{w}' for w in ways)}")
        kinds |= dict.fromkeys(LlamaKV(name, flash) for word, flash in ways.items() if way in ("", word))
    return tuple(kinds)


def require() -> None:
    """Refuse where llama.cpp is not installed."""
    if not find_spec("llama_cpp"):
        raise InputError("llama.cpp needs the package llama-cpp-python: pip install -r lab/requirements.txt")


_OTHER_BUILD = (
    "; where a build for this very CPU crashes, another runs: "
    "CMAKE_ARGS=-DGGML_NATIVE=OFF pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python"
)


class LlamaProcess:
    """llama.cpp with a GGUF, which may be removed then, in a process that ends with this object, or with its parent.

    Attributes:
        about: version, and what it was built for, in its own words.
    Raises:
        LlamaError: it does not load.
    """

    def __init__(self, file: Path, threads: int) -> None:
        require()
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.about: str = self.call("load", str(file), threads)
        except LlamaError:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def call(self, method: str, *args: object) -> Any:
        """Call a method of `Contexts` there; LlamaError if it refuses, or the process has ended."""
        try:
            self._pipe.send((method, args))
            done, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            how = f"with signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise LlamaError(f"its process ended {how}{_OTHER_BUILD if code < 0 else ''}") from None
        if not done:
            raise LlamaError(value)
        return value


def _serve(pipe: Connection, parent: int) -> None:
    """Answer calls until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    contexts = Contexts()
    with suppress(EOFError, OSError):
        while True:
            method, args = pipe.recv()
            try:
                answer = (True, getattr(contexts, method)(*args))
            except LlamaError as error:
                answer = (False, str(error))
            pipe.send(answer)


def _end_with(parent: int) -> None:
    """End this process soon after its parent: a long prompt would not notice the closed pipe."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


class Contexts:
    """The library, its model, and a context for each kind of cache."""

    def __init__(self) -> None:
        import numpy
        from llama_cpp import __version__, llama_cpp

        self.numpy, self.lib, self.version = numpy, llama_cpp, __version__
        self.contexts: dict[LlamaKV, Any] = {}
        self.log_lines: list[str] = []
        self.log = llama_cpp.llama_log_callback(self._log)  # kept, for the library holds no reference
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def _log(self, level: int, text: bytes, _: object) -> None:  # keeps the last error
        if level == _LOG_ERROR and (line := text.decode(errors="replace").strip()):
            self.log_lines[:] = [line]

    def _refuse(self, failure: object, what: str) -> None:
        if failure:
            raise LlamaError(": ".join([what, *self.log_lines]))

    def load(self, file: str, threads: int) -> str:
        """Load a GGUF; what the library says of itself."""
        self.threads = threads
        self.model = self.lib.llama_model_load_from_file(file.encode(), self.lib.llama_model_default_params())
        self._refuse(not self.model, "it does not load the model")
        self.vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        system = " ".join(self.lib.llama_print_system_info().decode().split())
        return f"llama-cpp-python {self.version}, n_batch {BATCH}, n_ubatch {MICRO_BATCH}, {threads} threads; {system}"

    def open(self, kind: LlamaKV, context: int) -> None:
        """Make a context with room for `context` tokens; it replaces an earlier one of this kind."""
        self.shut(kind)
        params = self.lib.llama_context_default_params()
        params.n_ctx = context + 1
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = getattr(self.lib, f"GGML_TYPE_{kind.type.upper()}")
        flash = "ENABLED" if kind.flash else "DISABLED"
        params.flash_attn_type = getattr(self.lib, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
        handle = self.lib.llama_init_from_model(self.model, params)
        self._refuse(not handle, "it makes no such context")
        self.contexts[kind] = handle

    def shut(self, kind: LlamaKV) -> None:
        """Give a context's memory back."""
        if (context := self.contexts.pop(kind, None)) is not None:
            self.lib.llama_free(context)

    def prompt(self, kind: LlamaKV, ids: Sequence[int]) -> float:
        """Forget what a context holds, and compute a prompt up to the argmax of its last logits; seconds."""
        self._forget(kind)
        began = time.perf_counter()
        for begin in range(0, len(ids), BATCH):
            self._decode(kind, ids[begin : begin + BATCH])
        self._logits(kind).argmax()
        return time.perf_counter() - began

    def steps(self, kind: LlamaKV, ids: Sequence[int]) -> list[float]:
        """A decode step for each token, up to the argmax of its logits; seconds of each."""
        seconds = []
        for token in ids:
            began = time.perf_counter()
            self._decode(kind, [token])
            self._logits(kind).argmax()
            seconds.append(time.perf_counter() - began)
        return seconds

    def logits(self, kind: LlamaKV, ids: Sequence[int], new: bool = True) -> Any:
        """Logits after each token of a new prompt, or of more of the last one: [tokens, vocab] FP32, as a numpy array."""
        if new:
            self._forget(kind)
        rows = []
        for token in ids:
            self._decode(kind, [token])
            rows.append(self._logits(kind).copy())
        return self.numpy.stack(rows)

    def _forget(self, kind: LlamaKV) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.contexts[kind]), False)

    def _decode(self, kind: LlamaKV, ids: Sequence[int]) -> None:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        code = self.lib.llama_decode(self.contexts[kind], self.lib.llama_batch_get_one(tokens, len(ids)))
        self._refuse(code, f"it does not decode ({code})")

    def _logits(self, kind: LlamaKV) -> Any:
        """[vocab], after the last call's last token."""
        pointer = self.lib.llama_get_logits_ith(self.contexts[kind], -1)
        return self.numpy.ctypeslib.as_array(pointer, shape=(self.vocab,))
