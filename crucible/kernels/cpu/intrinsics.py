"""What Numba does not name: fused multiply-add, the bits of a float32, and the 16-bit scales made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32 with one rounding (IEEE 754 fusedMultiplyAdd); vectorises like any operation."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 whose IEEE 754 representation is the int32 ``bits``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def float_to_bits(typingctx: Any, value: Any) -> Any:
    """The IEEE 754 representation of a float32 as int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@njit(forceinline=True)
def scale_to_float(bits: int) -> float:
    """The float32 of a 16-bit scale: a float32's exponent and 8 leading fraction bits; scales have no sign."""
    return float_from_bits(np.int32(bits) << np.int32(15))


@njit(forceinline=True)
def scale_from_float(value: float) -> np.uint16:
    """The 16-bit scale nearest to a float32 of at least 0; halves go up."""
    return np.uint16((float_to_bits(value) + np.int32(0x4000)) >> np.int32(15))
