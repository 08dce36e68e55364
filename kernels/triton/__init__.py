"""The kernels of NVIDIA GPUs, in Triton, one idea a file; beside each the launch function that checks what it is given.

Importing this needs the package `triton` (`niwaki[gpu]`). Where there is no GPU the kernels run in Triton's
interpreter, unless TRITON_INTERPRET says otherwise: slowly, on CPU tensors, and with the same results. Triton decides
this when a kernel is defined, so it is settled here, before any of them is.

Their references are the `*_torch` functions: those of the CPU kernels where these compute the same, else beside the
kernel.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
