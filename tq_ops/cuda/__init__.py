"""The ops of `tq_ops.reference` for NVIDIA GPUs, in Triton: packed codes are read as they are stored, in the rotated domain.

Importing this package needs no Triton; every module in it but `available`, `block_planes`, `layout` and `nvrtc` does.
"""
