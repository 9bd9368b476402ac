"""What ONNX graphs are built from, what they read, and what `tq export` writes of it."""

from __future__ import annotations

from haarkv.tq_ops import formats
from haarkv.tq_ops.kv.kernel_support import KernelSupport

FORMAT = formats.get("tq4")
READS = KernelSupport("its graphs", head_dims=(64, 128, 256), bits=(2, 3, 4, 5, 6, 8), bf16_tokens=True, learned=True)
EXPORT_SUPPORT = KernelSupport("exported graphs", head_dims=READS.head_dims, only=FORMAT)
