"""Outcome: what one case of a check found; the requests that checks make, and how answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from crucible.config import SamplingParams
from crucible.engine.checks.lab import Difference, Job, Lab, Trace, difference

TEMPERATURES = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
TOP_KS = (5, 20, 40, 100, 128, 129, 500)


@dataclass(frozen=True)
class Outcome:
    """One case: how many requests and rows of logits were compared, and the first difference if there is one."""

    case: str
    requests: int
    rows: int
    difference: Difference | None = None


Check = Callable[[Lab, int, np.random.Generator], Iterator[Outcome]]


def compare(lab: Lab, case: str, jobs: Sequence[Job], traces: dict[str, Trace]) -> Outcome:
    """Each request that was accepted against what it gets alone."""
    rows = 0
    for job in jobs:
        got = traces[job.name]
        if got.reason == "refused":
            continue
        rows += len(got.logits)
        if (found := difference(job.name, len(job.token_ids), lab.alone(job), got)) is not None:
            return Outcome(case, len(jobs), rows, found)
    return Outcome(case, len(jobs), rows)


def ids(lab: Lab, random: np.random.Generator, length: int) -> tuple[int, ...]:
    """A prompt of ``length`` random ids."""
    return tuple(random.integers(0, lab.config.token_count, length).tolist())


def params(random: np.random.Generator, max_tokens: int, *, sampled: bool) -> SamplingParams:
    """Greedy, or a draw with random settings."""
    if not sampled:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(random.choice(TEMPERATURES)),
        top_k=int(random.choice(TOP_KS)),
        seed=int(random.integers(0, 2**63)),
        ignore_eos=True,
    )
