"""Entry point. Ctrl-C ends the process at once while a large library is imported, which swallows an interrupt or stays half
imported.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

EXIT_INTERRUPTED = 130
_LARGE = ("numpy", "torch", "transformers", "triton", "onnxruntime", "vllm")


def _interrupt(*_: Any) -> None:
    specs = (getattr(sys.modules.get(name), "__spec__", None) for name in _LARGE)
    if any(getattr(spec, "_initializing", False) for spec in specs):
        os.write(2, b"\n" * sys.stderr.isatty() + b"tq: interrupted\n")
        os._exit(EXIT_INTERRUPTED)
    raise KeyboardInterrupt


def main() -> int:
    """Run the command; exit codes as `tq.cli.main`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from tq.cli import main as command
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return command()
