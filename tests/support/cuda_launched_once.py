"""Loads and launches csrc/decode.cu through NVIDIA's bindings, whatever driver they find: see `fake_cuda_driver.c`."""

import contextlib
from types import SimpleNamespace
from unittest.mock import patch

import torch

from haarkv.tq_ops.cuda import decode

GPU, SHAPE = torch.device("cuda", 0), (8, 5, 128, 4, 4, 128, 2, 0, 0, 0)

with (
    patch("torch.cuda.init"),
    patch("torch.cuda.device", lambda _: contextlib.nullcontext()),
    patch("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=0x77)),
):
    print("most", decode.shared_memory(GPU)[0], flush=True)
    kernel = decode.Kernel(decode.compile_kernel("sm_90", *SHAPE), "decode", decode.shared_bytes(5, 128), GPU)
    given = decode.Arguments(*range(1, 18), (18, 19, 20, 21), (22, 23, 24, 25), 26, 27, 0.5)
    kernel.launch((33, 8), decode.THREADS, given)
