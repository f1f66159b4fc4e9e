"""The checks of ``crucible check``: an Outcome a case, which compares logit bits with those of a lone request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from crucible.config import SamplingParams
from crucible.engine.checks.device_checks import attention, graphs
from crucible.engine.checks.lab import Difference, Job, Lab, Trace, difference
from crucible.engine.checks.outcome import TEMPERATURES, TOP_KS, Check, Outcome, compare, ids, params
from crucible.native.batch import pages_for

LENGTHS = (1, 15, 16, 17, 33, 127, 128, 129, 511, 512, 513)
"""Around the ends of a page, and of the pieces in which attention walks the context."""

CHUNKS = (7, 13, 17, 32, 64, 100, 128, 251, 256, 300, 511, 768, 1019)
LARGE_BATCHES = (32, 64, 128, 256)
"""As far as the device has room for them."""


def jobs_of(lab: Lab, random: np.random.Generator, count: int, longest: int, **places: Any) -> list[Job]:
    """``count`` requests of 1 … ``longest`` prompt tokens, half of them sampled; ``places`` give each its arrival."""
    longest = min(longest, lab.context - 12)
    return [
        Job(
            f"r{i}",
            ids(lab, random, int(random.integers(1, longest + 1))),
            params(random, int(random.integers(1, 12)), sampled=bool(i % 2)),
            **{name: place(i) for name, place in places.items()},
        )
        for i in range(count)
    ]


def paged(lab: Lab, cases: int, random: np.random.Generator) -> Iterator[Outcome]:
    """Pages in order, pages in any order, and no cache at all: every position computed anew from its whole prefix."""
    new = 4
    for length in fitting(LENGTHS, lab.context - new):
        job = Job(f"n{length}", ids(lab, random, length), params(random, new, sampled=False))
        wanted = lab.alone(job)
        fresh = Trace(reason=wanted.reason, tokens=wanted.tokens)
        for made in range(new):
            longer = Job(job.name, (*job.token_ids, *wanted.tokens[:made]), params(random, 1, sampled=False))
            fresh.logits += lab.alone(longer).logits
        found = difference(job.name, length, wanted, fresh)
        yield Outcome(f"{length} tokens, without a cache", 1, new, found)
        pages = pages_for(length + new) + 5
        shuffled = lab.run([job], kv_pages=pages, shuffle=random, prefill_budget=lab.context)
        yield compare(lab, f"{length} tokens, shuffled pages", [job], shuffled)


def batch(lab: Lab, cases: int, random: np.random.Generator) -> Iterator[Outcome]:
    """Requests together, at once and one after the other, some of them withdrawn, against each alone."""
    for case in range(cases):
        lab.forget()
        count = int(random.integers(2, 17))
        together = jobs_of(lab, random, count, 160)
        yield compare(lab, f"{case}: {count} at once", together, lab.run(together, prefill_budget=1024))
        staggered = jobs_of(lab, random, count, 160, arrival=lambda i: i + int(random.integers(0, 3)))
        yield compare(lab, f"{case}: {count} staggered", staggered, lab.run(staggered, max_batch=int(count * 0.7) + 1))
        cancelled = jobs_of(
            lab, random, count, 160, arrival=lambda i: i // 2, cancel=lambda i: i // 2 + 3 if i % 3 == 0 else None
        )
        yield compare(lab, f"{case}: {count} with cancellations", cancelled, lab.run(cancelled))
    for count in LARGE_BATCHES:
        if count <= lab.largest_batch:
            lab.forget()
            many = jobs_of(lab, random, count, 40)
            yield compare(lab, f"{count} at once", many, lab.run(many, max_batch=count, prefill_budget=1024))


def sampling(lab: Lab, cases: int, random: np.random.Generator) -> Iterator[Outcome]:
    """Greedy and sampled requests in one batch: temperatures 0.3 … 1.0, top_k 5 … 500, a seed each."""
    for case in range(cases):
        lab.forget()
        jobs = [Job("greedy", ids(lab, random, 24), params(random, 10, sampled=False))]
        for number, top_k in enumerate(TOP_KS):
            temperature = TEMPERATURES[(number + case) % len(TEMPERATURES)]
            seed = int(random.integers(0, 2**63))
            drawn = SamplingParams(max_tokens=10, temperature=temperature, top_k=top_k, seed=seed, ignore_eos=True)
            jobs.append(Job(f"T{temperature}/k{top_k}", ids(lab, random, int(random.integers(1, 40))), drawn))
        yield compare(lab, f"{case}: {len(jobs)} at once", jobs, lab.run(jobs))
        order = [jobs[i] for i in random.permutation(len(jobs))]
        yield compare(lab, f"{case}: in other slots", order, lab.run(order, max_batch=3, prefill_budget=17))


def prefill(lab: Lab, cases: int, random: np.random.Generator) -> Iterator[Outcome]:
    """A prompt in chunks of any size against the prompt at once."""
    length = lab.context - 4
    job = Job("p", ids(lab, random, length), params(random, 4, sampled=False))
    for chunk in fitting(CHUNKS, length):
        traces = lab.run([job], prefill_budget=max(300, chunk), prefill_chunk_tokens=chunk)
        yield compare(lab, f"{length} tokens in chunks of {chunk}", [job], traces)


def packed(lab: Lab, cases: int, random: np.random.Generator) -> Iterator[Outcome]:
    """Several prompts in one step against each alone; whole, cut by the budget, and one prompt a step."""
    for case in range(cases):
        lab.forget()
        jobs = jobs_of(lab, random, int(random.integers(2, 9)), 300)
        for budget in (1024, 256, 61):
            traces = lab.run(jobs, prefill_budget=budget)
            yield compare(lab, f"{case}: {len(jobs)} prompts, budget {budget}", jobs, traces)
        apart = lab.run(jobs, batched_prefill=False)
        yield compare(lab, f"{case}: {len(jobs)} prompts, one a step", jobs, apart)


def prefix(lab: Lab, cases: int, random: np.random.Generator) -> Iterator[Outcome]:
    """The prefix cache against none: shared beginnings, conversations, salts, and pools too small to keep it all."""
    for case in range(cases):
        lab.forget()
        jobs = family(lab, random)
        needed = max(pages_for(len(job.token_ids) + job.max_tokens) for job in jobs)
        for name, pages in (("room for all", None), ("eviction", needed + int(random.integers(0, needed + 1)))):
            traces = lab.run(jobs, kv_pages=pages, prefix_cache=True, max_batch=4)
            hits = int(lab.metrics["prefix_cache_tokens"])
            yield compare(lab, f"{case}: {len(jobs)} requests, {name}, {hits} tokens found", jobs, traces)
        yield conversation(lab, random, f"{case}: conversation")


def family(lab: Lab, random: np.random.Generator) -> list[Job]:
    """Requests that begin alike: two stems, cut anywhere, with tails of their own."""
    longest = min(200, lab.context // 2)
    stems = [ids(lab, random, longest) for _ in range(2)]
    jobs = []
    for i in range(12):
        stem = stems[int(random.integers(0, 2))][: int(random.integers(1, longest + 1))]
        tail = ids(lab, random, int(random.integers(0, 40)))
        salt = None if i % 4 else "other"
        chosen = params(random, int(random.integers(1, 24)), sampled=bool(i % 2))
        jobs.append(Job(f"r{i}", stem + tail, chosen, arrival=2 * i, salt=salt))
    return jobs


def conversation(lab: Lab, random: np.random.Generator, case: str) -> Outcome:
    """Turn after turn, each prompt holds the answers before it: generated pages are found too."""
    history = ids(lab, random, 40)
    jobs = []
    for turn in range(6):
        if len(history) + 20 > lab.context:
            break
        job = Job(f"turn{turn}", history, params(random, 20, sampled=turn % 2 == 1), arrival=40 * turn)
        jobs.append(job)
        history = (*history, *lab.alone(job).tokens, *ids(lab, random, 9))
    traces = lab.run(jobs, prefix_cache=True)
    outcome = compare(lab, case, jobs, traces)
    for job, trace in zip(jobs[1:], list(traces.values())[1:], strict=True):
        if outcome.difference is None and trace.cached_tokens != (len(job.token_ids) - 1 - 9) // 16 * 16:
            what = f"{trace.cached_tokens} of {len(job.token_ids)} tokens found in the cache"
            return Outcome(case, len(jobs), outcome.rows, Difference(job.name, 0, what))
    return outcome


def fitting(lengths: Iterable[int], longest: int) -> list[int]:
    """The lengths that the model's context has room for."""
    return [length for length in lengths if length <= longest]


CHECKS: dict[str, Check] = {
    "paged": paged,
    "batch": batch,
    "sampling": sampling,
    "prefill": prefill,
    "packed": packed,
    "prefix": prefix,
    "graphs": graphs,
    "attention": attention,
}
