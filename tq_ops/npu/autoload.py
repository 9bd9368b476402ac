"""Keeps `import torch` from loading torch-npu, which raises where CANN is not sourced.

torch-npu is registered with torch, so that `import torch` loads it, and every command would end in its traceback. The one
way to prevent this is torch's own switch, a variable of the process that torch reads as it is imported. The executor `npu`
loads torch-npu itself when it is opened, and says in one line why it cannot.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from haarkv.tq_ops.npu.versions import sourced_from


def leave_npu_alone() -> None:
    """Let torch load no device extension in this process and in those that it starts. To be called before torch is imported.

    For the command, whose process nobody else shares.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def leave_unsourced_npu_alone() -> None:
    """The same where loading could do nothing but raise: torch-npu is there and CANN is not sourced.

    For `import haarkv` in somebody's program, which keeps its NPU where it works.
    """
    if "torch" not in sys.modules and sourced_from() is None and find_spec("torch_npu") is not None:
        leave_npu_alone()
