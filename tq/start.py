"""Entry point. While large libraries are imported, Ctrl-C ends the process at once: they swallow an interrupt or stay half
imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

EXIT_INTERRUPTED = 130
_LARGE = ("numpy", "torch", "transformers", "triton", "onnxruntime", "vllm")


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process on Ctrl-C, unless another handler is set or this is not the main thread."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: Any) -> None:
    os.write(2, b"\n" * sys.stderr.isatty() + b"tq: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


class _Finder:
    """Imports large libraries within `ending_at_once`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _LARGE else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with ending_at_once():
                run(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main() -> int:
    """Run the command; exit codes as `tq.cli.main`."""
    sys.meta_path.insert(0, _Finder)
    with ending_at_once():
        from tq.cli import main as command
    return command()
