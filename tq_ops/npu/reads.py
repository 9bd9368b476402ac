"""What the NPU programs read: a few formats at one head_dim, their tables built into the programs, and learned keys."""

from __future__ import annotations

from haarkv.tq_ops import formats
from haarkv.tq_ops.kv.reads import Reads

HEAD_DIM = 128
FORMAT = formats.get("tq4")
READS = Reads(
    "its programs", head_dims=(HEAD_DIM,), only=FORMAT, also=(formats.PUBLISHED, formats.get("bf16")),
    kept=True, learned=True,
)  # fmt: skip
