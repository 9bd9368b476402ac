"""What the NPU programs read: a few formats, whose tables are built into the programs, and learned keys."""

from __future__ import annotations

from haarkv.tq_ops import formats
from haarkv.tq_ops.kv.reads import Reads

HEAD_DIM = 128
"""Of scopes that are measured alone; a layer's programs take the model's own."""
FORMAT = formats.get("tq4")
READS = Reads(
    "its programs", head_dims=(64, HEAD_DIM, 256), only=FORMAT, also=(formats.PUBLISHED, formats.get("bf16")),
    kept=True, windows=True, learned=True,
)  # fmt: skip
