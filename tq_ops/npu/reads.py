"""What the NPU programs read: one format at one head_dim, its tables built into them."""

from __future__ import annotations

from haarkv.tq_ops import formats
from haarkv.tq_ops.kv.reads import Reads

HEAD_DIM = 128
FORMAT = formats.get("tq4")
READS = Reads("its programs", head_dims=(HEAD_DIM,), only=FORMAT)
