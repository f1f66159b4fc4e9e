"""The checks ``graphs`` and ``attention``: what a captured graph computes, and attention over caches of any layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.config import SamplingParams
from crucible.engine.checks.lab import Attend, Difference, Job, Lab, Trace, difference
from crucible.engine.checks.outcome import Outcome, compare, ids, params
from crucible.errors import ConfigError
from crucible.kernels.problems import AttentionProblem, attention_problem
from crucible.model.reference_ops import ReferenceOps
from crucible.model.validation_ops import Expected
from crucible.native.batch import pages_for

EDGES = (0, 1, 14, 15, 16, 17, 63, 64, 65, 126, 127, 128, 129, 255, 256, 257, 300)
"""Positions around the ends of pages, tiles and pieces."""
MIXED = 80
"""Rows of a step whose prompts are cut in several ways: more than an attention tile has."""
ENGINE_SHARE = 10
"""One in so many cases of ``attention`` runs requests through the engine, too."""


# ---- graphs


def graphs(lab: Lab, cases: int, random: np.random.Generator) -> Iterator[Outcome]:
    """Steps replayed from graphs against the same steps launched one kernel after the other."""
    if lab.device != "cuda":
        raise ConfigError("check graphs compares captured graphs, which only a GPU has; use --device cuda")
    most = min(16, lab.largest_batch)
    for case in range(cases):
        lab.forget()
        yield replayed(lab, f"{case}: batches of 1 … {most} and back", growing(lab, random, most), {})
        jobs = shrinking(lab, random, most)
        yield replayed(lab, f"{case}: batches of {most}, 1, {max(1, most // 2)}, 2", jobs, {})
        jobs, pages = crowded(lab, random, most)
        reuse: dict[str, Any] = {"kv_pages": pages, "shuffle": np.random.default_rng(case)}
        yield replayed(lab, f"{case}: cancellations, {pages} pages used again", jobs, reuse)
        if lab.context > MIXED:
            yield replayed(lab, f"{case}: mixtures of {MIXED} rows", mixtures(lab, random), {"prefill_budget": 128})


def replayed(lab: Lab, case: str, jobs: list[Job], settings: dict[str, Any]) -> Outcome:
    """``jobs`` with and without graphs, and the graphs' answers against each request's alone."""
    eager = lab.run(jobs, runner=lab.eager, **_again(settings))
    before = lab.replays()
    got = lab.run(jobs, **_again(settings))
    count = lab.replays() - before
    rows = sum(len(trace.logits) for trace in got.values())
    if not count:
        return Outcome(case, len(jobs), rows, Difference("-", 0, "no step was replayed: nothing could be captured"))
    for job in jobs:
        if (found := difference(job.name, len(job.token_ids), eager[job.name], got[job.name])) is not None:
            return Outcome(case, len(jobs), rows, found)
    outcome = compare(lab, case, jobs, got)
    return Outcome(f"{case}, {count} steps replayed", len(jobs), rows, outcome.difference)


def _again(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose generators begin anew, so that two runs hand out the same pages."""
    return {
        name: np.random.default_rng(1) if isinstance(value, np.random.Generator) else value
        for name, value in settings.items()
    }


def growing(lab: Lab, random: np.random.Generator, most: int) -> list[Job]:
    """A request more every other step, so that each size has a step without a prompt; then one less at a time."""
    return [
        Job(f"r{i}", ids(lab, random, int(random.integers(1, 12))), _some(random, 2 * most + 3, i), arrival=2 * i)
        for i in range(most)
    ]


def shrinking(lab: Lab, random: np.random.Generator, most: int) -> list[Job]:
    """``most`` requests of which one stays, then half as many of which two stay."""
    half = max(1, most // 2)
    first = [
        Job(f"a{i}", ids(lab, random, int(random.integers(1, 12))), _some(random, 24 if i == 3 % most else 4, i))
        for i in range(most)
    ]
    second = [
        Job(f"b{i}", ids(lab, random, int(random.integers(1, 12))), _some(random, 12 if not i else 4, i), arrival=9)
        for i in range(half - 1)
    ]
    return first + second


def mixtures(lab: Lab, random: np.random.Generator) -> list[Job]:
    """Steps of as many rows, each twice: of what else a graph depends on, any two differ in one or two things.

    A prompt of two tiles, so with one row of logits; two prompts of a tile each; of three tiles; one and a decode row.
    """
    steps = ([MIXED], [MIXED // 2, MIXED // 2], [MIXED - 10, 10], [MIXED - 1])
    jobs = [
        Job(f"s{step}.{i}", ids(lab, random, length), params(random, 1, sampled=False), arrival=step + step // 6)
        for step, lengths in enumerate(lengths for lengths in steps for _ in range(2))
        for i, length in enumerate(lengths)
    ]
    decoding = Job("d", ids(lab, random, 1), params(random, 4, sampled=False), arrival=6)  # in steps 7 … 9
    return [*jobs, decoding]


def crowded(lab: Lab, random: np.random.Generator, most: int) -> tuple[list[Job], int]:
    """More requests than fit, some withdrawn, and pages for about a third of them."""
    jobs = [
        Job(
            f"r{i}",
            ids(lab, random, int(random.integers(1, min(60, lab.context - 12)))),
            _some(random, int(random.integers(2, 12)), i),
            arrival=i // 3,
            cancel=i // 3 + 4 if i % 4 == 1 else None,
        )
        for i in range(2 * most)
    ]
    needed = [pages_for(len(job.token_ids) + job.max_tokens) for job in jobs]
    return jobs, max(max(needed), sum(needed) // 3)


def _some(random: np.random.Generator, max_tokens: int, index: int) -> SamplingParams:
    return params(random, max_tokens, sampled=index % 3 == 2)


# ---- attention


def attention(lab: Lab, cases: int, random: np.random.Generator) -> Iterator[Outcome]:
    """Random ragged problems: pages in any order and elsewhere, NaN in unwritten slots, rows alone, heads apart.

    Every way of computing attention that the device has must give the same bits, within a bound of the oracle's.
    """
    for case in range(cases):
        if lab.attend:
            yield problem(lab, f"{case}: ", random)
        if case % ENGINE_SHARE == 0:
            yield chunked(lab, f"{case}: ", random)


def problem(lab: Lab, case: str, random: np.random.Generator) -> Outcome:
    """One problem, on every form of ``lab.attend``."""
    c = lab.config
    count = int(random.integers(1, 9))
    last = min(lab.context - 1, max(EDGES))
    starts = tuple(int(random.choice([edge for edge in EDGES if edge < last])) for _ in range(count))
    lengths = tuple(int(random.integers(1, min(50, last + 1 - start) + 1)) for start in starts)
    made = attention_problem(random, lengths, starts, c.num_heads, c.num_kv_heads, c.head_dim)
    label = f"{case}{count} sequences, {sum(lengths)} rows at {min(starts)} … {max(starts)}"
    name, first = next(iter(lab.attend.items()))
    whole = first(made, random)
    found = _elsewhere(lab, made, whole, random) or _heads(lab, made, whole, name)
    return Outcome(label, count, sum(lengths), found)


def _elsewhere(lab: Lab, made: AttentionProblem, whole: NDArray[Any], random: np.random.Generator) -> Difference | None:
    """The first bit that differs when pages, form, company or the cut of the rows do."""
    rows = len(whole)
    some = np.sort(random.choice(rows, size=int(random.integers(1, rows + 1)), replace=False))
    runs = np.flatnonzero(np.isin(made.row_sequence, made.row_sequence[some]))  # a tile holds successive rows
    one = np.array([int(random.integers(0, rows))])
    for name, form in lab.attend.items():
        for what, picked, cut in (
            ("in another run", np.arange(rows), made),
            ("on other pages", np.arange(rows), made.remapped(random)),
            ("with fewer sequences", runs, made.remapped(random).rows(runs)),
            ("alone", one, made.rows(one)),
        ):
            if (found := _bits(f"{name}, {what}", made, whole[picked], form, cut, random)) is not None:
                return found
    return None


def _bits(
    what: str, made: AttentionProblem, wanted: NDArray[Any], form: Attend, cut: AttentionProblem,
    random: np.random.Generator,
) -> Difference | None:  # fmt: skip
    got = form(cut, random)
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    unequal = np.argwhere(np.ascontiguousarray(got).view(unsigned) != np.ascontiguousarray(wanted).view(unsigned))
    if not len(unequal):
        return None
    row, column = (int(i) for i in unequal[0])
    head, element = divmod(column, made.q.shape[2])
    text = f"{what}: head {head}, element {element} is {got[row, column]!r}, expected {wanted[row, column]!r}"
    return Difference(f"of sequence {cut.row_sequence[row]}", int(cut.positions[row]), text)


def _heads(lab: Lab, made: AttentionProblem, whole: NDArray[Any], name: str) -> Difference | None:
    """Against the oracle: each KV head has content of its own, so a query head that reads another's is far off."""
    exact = Expected(ReferenceOps(lab.config), half=False).attend(made)
    bound = 2.0**-10 if whole.dtype == np.float16 else 4e-6
    bad = np.argwhere(~(np.abs(whole.astype(np.float64) - exact) <= bound * np.abs(exact).max()))
    if not len(bad):
        return None
    row, column = (int(i) for i in bad[0])
    head, element = divmod(column, made.q.shape[2])
    text = f"{name}: head {head}, element {element} is {whole[row, column]!r}, the oracle's is {exact[row, column]:.7g}"
    return Difference(f"of sequence {made.row_sequence[row]}", int(made.positions[row]), text)


def chunked(lab: Lab, case: str, random: np.random.Generator) -> Outcome:
    """Requests through the engine: prompts in chunks, pages shuffled, slots used again, NaN in the cache before."""
    lab.forget()
    longest = min(max(EDGES), lab.context - 12)
    count = int(random.integers(3, 10))
    jobs = [
        Job(
            f"r{i}",
            ids(lab, random, int(min(longest, max(1, random.choice(EDGES))))),
            params(random, int(random.integers(1, 9)), sampled=bool(i % 2)),
            arrival=int(random.integers(0, 4)),
        )
        for i in range(count)
    ]
    budget, chunk = int(random.integers(20, 130)), int(random.integers(7, 130))
    batch = min(int(random.integers(2, 6)), lab.largest_batch)
    traces: dict[str, Trace] = lab.run(
        jobs, shuffle=random, poison=True, max_batch=batch, prefill_budget=budget, prefill_chunk_tokens=chunk
    )
    return compare(lab, f"{case}{count} requests, chunks of {min(chunk, budget)}, {batch} at a time", jobs, traces)
