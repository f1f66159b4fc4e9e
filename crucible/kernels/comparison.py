"""Comparing what a kernel made with what is right: the error, and the first element that is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """max |difference| / max |value|; infinite where one side is not finite or has another shape."""
    if got.shape != want.shape:
        return math.inf
    if got.dtype.kind in "iu" or not np.isfinite(want).all():  # selections: equal or not
        return 0.0 if np.array_equal(got, want, equal_nan=got.dtype.kind == "f") else math.inf
    exact = want.astype(np.float64)
    worst = np.abs(got.astype(np.float64) - exact).max(initial=0.0) / max(float(np.abs(exact).max(initial=0.0)), 1e-300)
    return float(worst) if math.isfinite(worst) else math.inf


def first_fault(got: NDArray[Any], want: NDArray[Any], bound: float) -> str:
    """The first element whose difference exceeds the bound: where, both values, and how many floats lie between."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, expected {list(want.shape)}"
    ours, exact = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(exact)
    scale = float(np.abs(exact[finite]).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        same = (ours == exact) | (np.isnan(ours) & np.isnan(exact)) | (np.abs(ours - exact) <= bound * scale)
    faults = np.argwhere(~same)
    if not len(faults):
        return ""
    index = tuple(int(i) for i in faults[0])
    text = f"element {list(index)} is {ours[index]:.9g}, expected {exact[index]:.9g}"
    if got.dtype.kind == "f":
        text += f", {ulps(got[index], exact[index])} ulps of {got.dtype}"
    return f"{text} ({len(faults)} of {got.size} elements exceed the bound)"


def ulps(value: Any, exact: float) -> int | str:
    """Floats of ``value``'s type between it and ``exact`` rounded to that type."""
    with np.errstate(over="ignore"):
        other = value.dtype.type(exact)
    if not (np.isfinite(value) and np.isfinite(other)):
        return "infinitely many"
    return abs(_rank(value) - _rank(other))


def _rank(value: Any) -> int:
    bits = int(value.view(np.dtype(f"i{value.dtype.itemsize}")))
    return bits if bits >= 0 else -(bits & ((1 << (8 * value.dtype.itemsize - 1)) - 1))
