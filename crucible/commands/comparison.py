"""``eval --against cpu``: the windows of a text through the CPU engine too, compared as their logits come."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from crucible.commands.paired_difference import PairedDifference
from crucible.commands.session import Session, log_probabilities
from crucible.model.direct import Consume
from crucible.model.ops import FloatArray

CPU_QUANTS = {"f32": "f32", "f16": "f32", "int8": "int8"}
"""The CPU's weight type to compare each weight type with: it has no f16."""

BOUNDS = {"f32": 1e-4, "f16": 1e-3, "int8": 1e-3}
"""Largest |Δ| that rounding explains, as a share of the position's largest |logit|, by weight type.

Stated, not taken from the errors of the run: they would excuse themselves. A row whose gap exceeds 10 × its own largest
|Δ| cannot choose differently, since errors of |Δ| close a gap of 2 |Δ| at most.
"""

SLACK = 10
"""A choice is decided where the CPU's two largest logits lie further apart than this many times the bound."""


class Comparison:
    """What ``device`` computes with ``quant`` beside ``reference``, a Session on the CPU with CPU_QUANTS[quant].

    Both compute the same rows in turn, so that no more logits exist than a Session hands out at once. seconds: what the
    CPU's side took.
    """

    def __init__(self, reference: Session, *, device: str, quant: str) -> None:
        self.seconds = 0.0
        self._reference = reference
        self._device, self._quant = device, quant
        self._scores: list[npt.NDArray[np.float64]] = []
        self._largest = 0.0
        self._positions = self._decided = self._differing = 0
        self._first = ""

    def watch(self, tokens: Sequence[int], name: str, start: int) -> Consume:
        """For Session.score(tokens, …): ``tokens`` is the window of text ``name`` that begins at token ``start``."""

        def see(first: int, rows: FloatArray) -> None:
            started = time.perf_counter()
            end = first + len(rows)
            count = self._reference.config.token_count
            theirs = self._reference.rows(tokens[:end], first)[:, :count]
            self._scores.append(log_probabilities(theirs, np.asarray(tokens[first + 1 : end + 1], np.int64)))
            self._compare(rows[:, :count], theirs, name, start + first)
            self.seconds += time.perf_counter() - started

        return see

    def _compare(self, ours: FloatArray, theirs: FloatArray, name: str, position: int) -> None:
        """Rows [n, tokens] of the text's positions ``position`` …"""
        peak = np.abs(theirs).max(axis=1)
        errors = np.abs(ours - theirs).max(axis=1)
        with np.errstate(divide="ignore"):  # logits that are all 0 here and not there: infinitely far
            shares = np.divide(errors, peak, out=np.zeros_like(errors), where=errors > 0)
        self._largest = max(self._largest, float(shares.max()))

        every = np.arange(len(theirs))
        choice = theirs.argmax(axis=1)
        others = theirs.copy()
        others[every, choice] = -np.inf
        gap = theirs[every, choice] - others.max(axis=1)
        decided = gap > SLACK * BOUNDS[self._quant] * peak
        differing = np.flatnonzero(decided & (ours.argmax(axis=1) != choice))
        if len(differing) and not self._differing:
            self._first = f"position {position + int(differing[0])} of {name}"
        self._positions += len(theirs)
        self._decided += int(decided.sum())
        self._differing += len(differing)

    @property
    def fault(self) -> str | None:
        """One line where a decided choice differs."""
        if not self._differing:
            return None
        return (
            f"DIFFERENT: {self._quant} on {self._device} and {CPU_QUANTS[self._quant]} on cpu choose different tokens "
            f"at {self._differing:,} of {self._decided:,} decided positions, first at {self._first}"
        )

    def line(self, scores: npt.NDArray[np.float64]) -> str:
        """The result beside ``scores``, what Session.score gave of all that was watched: float64 [tokens]."""
        theirs = np.concatenate(self._scores)
        kind = CPU_QUANTS[self._quant]
        return (
            f"against cpu {kind}{'' if kind == self._quant else f' instead of {self._quant}'}: "
            f"nats/token {-theirs.mean():.6f} (difference {PairedDifference.of(-scores, -theirs)}), "
            f"largest |Δ| / max |logit| {self._largest:.1e}, "
            f"top 1 equal at {self._decided - self._differing:,} of {self._decided:,} decided positions "
            f"of {self._positions:,}"
        )
