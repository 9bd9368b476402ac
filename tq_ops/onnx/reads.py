"""What the ONNX graphs read: one format, its tables built into them, and learned nibbles of the same table."""

from __future__ import annotations

from haarkv.tq_ops import formats
from haarkv.tq_ops.kv.reads import Reads

FORMAT = formats.get("tq4")
READS = Reads("its graphs", head_dims=(64, 128, 256), only=FORMAT, learned=lambda head_dim: range(16, 3 * head_dim + 1, 16))
