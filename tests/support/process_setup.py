"""What every test process sets: results do not depend on the machine's cores, and parallel workers do not fight."""

import os

import torch


def set_up():
    torch.set_num_threads(1)
    # Read as Triton is imported: without a GPU its kernels run in its interpreter, in worker processes and children too.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
