"""PairedDifference: what two computations of the same tokens differ by on average, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """``mean`` of values paired token by token, and ``error``, its standard error: NaN of one token, which has none."""

    mean: float
    error: float

    @classmethod
    def of(cls, ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> PairedDifference:
        """Of ``ours`` − ``theirs``, float64 [tokens] each. The difficulty of the tokens cancels in it."""
        deltas = ours - theirs
        count = len(deltas)
        return cls(float(deltas.mean()), float(deltas.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan)

    def __str__(self) -> str:
        return f"{self.mean:+.6f} ± {self.error:.6f}"
