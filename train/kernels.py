"""Whether Triton kernels can run, and how they are launched on a device."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(x: Tensor) -> bool:
    """Kernels exist for CUDA tensors of a 16-bit float type; everything else takes the plain operations."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_triton()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
