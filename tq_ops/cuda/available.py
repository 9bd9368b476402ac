"""Whether the Triton kernels can run here."""

from __future__ import annotations

import torch


def unavailable() -> str | None:
    """None, or in one sentence why not."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed; pip install 'haarkv[cuda]'"
    if torch.cuda.is_available() or triton.knobs.runtime.interpret:
        return None
    return "there is no NVIDIA GPU; with TRITON_INTERPRET=1 the kernels run in Triton's interpreter"
