"""Numba kernels of the CPU engine.

Exactness: every output element is one chain of operations in a fixed order that no batch size, chunk, page
placement or thread count changes. Kernels vectorise across outputs, never across a sum; a multiply-add is an
explicit ``fma`` (intrinsics.py), so the compiler decides nothing about rounding.
"""

from crucible.kernels.cpu import runtime

__all__ = ["runtime"]  # imported here, before any kernel module: it tells Numba where compiled kernels are kept
