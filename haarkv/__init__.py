"""haarkv: decoder models with a rotated low-bit KV cache, proved layer by layer against a reference.

This package is what gets installed. Its rooms lie at the top of the repository, and here as links: `haarkv.models` is the
folder `models/`. `import tq` is the short face.
"""

from haarkv.tq_ops.npu.versions import leave_unsourced_npu_alone

leave_unsourced_npu_alone()
