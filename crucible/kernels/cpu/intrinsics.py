"""Instructions that Numba does not name: a fused multiply-add and the bits of a float32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
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
