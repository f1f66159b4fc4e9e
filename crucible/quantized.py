"""QuantizedTensor: an int8 matrix with its scales, as checkpoints store it (docs/decisions/0005)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GROUP = 32
"""Inputs of an output that share a scale in the stored form."""

SCALE_SUFFIX = "_scale"
"""Of the tensor that holds a matrix's scales: its name is the matrix's and this."""

_CHUNK = 1 << 22  # elements looked at in one go
_RISKY_SCALE = 0xF800  # 2**121: 127 times a larger one may exceed float32, or it is itself no number
_LOWEST = -128  # packing is symmetric and never makes it


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of the scales of a matrix [out, in]: [out, ceil(in / 32)]."""
    rows, columns = shape
    return rows, -(-columns // GROUP)


def scale_values(scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 that 16-bit scales stand for: an exponent and 8 leading fraction bits, no sign."""
    return (scales.astype(np.uint32) << np.uint32(15)).view(np.float32)


@dataclass(frozen=True)
class QuantizedTensor:
    """values int8 [out, in], scales uint16 [out, ceil(in / 32)]; weight = value · scale_values(scale of its group)."""

    values: NDArray[np.int8]
    scales: NDArray[np.uint16]

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        rows, columns = self.values.shape
        return rows, columns

    @classmethod
    def concatenate(cls, parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """The outputs of several matrices of the same inputs, one after another; always a copy."""
        return cls(np.concatenate([part.values for part in parts]), np.concatenate([part.scales for part in parts]))

    def dequantize(self) -> NDArray[np.float32]:
        """The weights, float32 [out, in]; exact: 7 bits by 9."""
        weights = self.values.astype(np.float32)
        scales = scale_values(self.scales)
        with np.errstate(over="ignore", invalid="ignore"):
            for group in range(scales.shape[1]):
                weights[:, group * GROUP : (group + 1) * GROUP] *= scales[:, group, None]
        return weights

    def fault(self) -> str | None:
        """What makes the first bad weight none (``holds … at index [row, column]``); ``None`` where all are good.

        Bad are -128, a value other than 0 under scale 0, and what is not finite.
        """
        step = max(1, _CHUNK // max(1, self.values.shape[1]))
        for first in range(0, len(self.values), step):
            part = QuantizedTensor(self.values[first : first + step], self.scales[first : first + step])
            if part._suspicious():
                lowest, unscaled, infinite = part._bad()
                bad = lowest | unscaled | infinite
                if bad.any():
                    row, column = divmod(int(np.argmax(bad)), bad.shape[1])
                    where = f"at index [{first + row}, {column}]"
                    value = part.values[row, column]
                    if lowest[row, column]:
                        return f"holds {value} {where}; int8 weights lie in -127 … 127"
                    if unscaled[row, column]:
                        return f"holds {value} {where}, where the scale is 0"
                    return f"holds {part.dequantize()[row, column]} {where}"
        return None

    def _suspicious(self) -> bool:
        """A cheap look that no bad weight escapes."""
        return bool(
            self.values.min(initial=0) == _LOWEST
            or self.scales.min(initial=1) == 0
            or self.scales.max(initial=0) >= _RISKY_SCALE
        )

    def _bad(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Where weights are -128, have no scale, are not finite: bool [out, in] each."""
        unscaled = np.repeat(self.scales == 0, GROUP, axis=1)[:, : self.values.shape[1]]
        return self.values == _LOWEST, unscaled & (self.values != 0), ~np.isfinite(self.dequantize())
