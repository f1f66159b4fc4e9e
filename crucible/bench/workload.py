"""What a load consists of: lengths drawn from distributions, prompts, or a file of requests. Seeded, so repeatable."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crucible.bench.surfaces import Job
from crucible.errors import ConfigError

WORDS = ("time", "people", "way", "day", "thing", "world", "life", "hand", "part", "place", "week", "water", "story")


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers ≥ 1, as written by the user: ``64``, ``32:384``, ``lognormal:200:0.5``.

    kind: fixed, uniform (``low`` … ``high``, both included) or lognormal. The lognormal's ``low`` is its mean and
    ``sigma`` the deviation of the logarithm; a draw above ``high`` (8 means) or below 1 is drawn again.
    """

    text: str
    kind: str
    low: int
    high: int
    sigma: float = 0.0

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ConfigError saying what would be right."""
        kind, *rest = text.split(":")
        try:
            if kind == "lognormal":
                mean, sigma = int(rest[0]), float(rest[1])
                lengths = cls(text, kind, mean, 8 * mean, sigma)
                right = len(rest) == 2 and mean >= 1 and 0 <= sigma <= 2
            elif kind == "uniform" or rest:
                low, high = (int(part) for part in (rest if kind == "uniform" else [kind, *rest]))
                lengths = cls(text, "uniform", low, high)
                right = 1 <= low <= high
            else:
                lengths = cls(text, "fixed", int(kind), int(kind))
                right = lengths.low >= 1
        except (ValueError, IndexError):
            right = False
        if not right:
            raise ConfigError(f"lengths are N, LOW:HIGH or lognormal:MEAN:SIGMA (sigma 0 … 2), got {text!r}")
        return lengths

    def draw(self, rng: random.Random) -> int:
        if self.kind != "lognormal":
            return rng.randint(self.low, self.high)
        mu = math.log(self.low) - self.sigma**2 / 2
        while True:
            length = round(rng.lognormvariate(mu, self.sigma))
            if 1 <= length <= self.high:
                return length


@dataclass(frozen=True)
class Workload:
    """An endless, seeded sequence of jobs: drawn from the two distributions, or the dataset's, round and round.

    id_limit: prompts are ids below it. text: prompts are words instead, about one a token. disconnect: fraction of
    the requests whose client hangs up after some but not all of its tokens. nonce: what the prompts consist of, and
    nothing else, depends on it: a server that has seen the same prompts before would answer from its prefix cache.
    """

    prompt: Lengths
    output: Lengths
    id_limit: int
    text: bool = False
    disconnect: float = 0.0
    dataset: tuple[Job, ...] = ()
    nonce: int = 0

    def jobs(self, seed: int) -> Iterator[Job]:
        """The same jobs for the same seed and nonce."""
        rng, contents = random.Random(seed), random.Random(f"{seed} {self.nonce}")
        number = 0
        while True:
            if self.dataset:
                job = self.dataset[number % len(self.dataset)]
            else:
                count = self.prompt.draw(rng)
                job = Job(self._prompt(count, contents), self.output.draw(rng))
            number += 1
            if rng.random() < self.disconnect and job.max_tokens > 1:
                job = Job(job.prompt, job.max_tokens, rng.randrange(1, job.max_tokens))
            yield job

    def _prompt(self, count: int, rng: random.Random) -> str | list[int]:
        if not self.text:
            return rng.choices(range(self.id_limit), k=count)
        return " ".join([f"{rng.getrandbits(32):x}", *rng.choices(WORDS, k=count - 1)])  # a few words repeat too soon


def read_dataset(path: str | Path) -> tuple[Job, ...]:
    """Requests of a JSONL file: ``{"prompt": text or ids, "max_tokens": n}`` a line. Raises ConfigError."""
    jobs = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            jobs.append(as_job(json.loads(line)))
        except (ValueError, RecursionError) as error:
            detail = " ".join(str(error).split())
            raise ConfigError(f'{path}, line {number}: not a {{"prompt", "max_tokens"}} object ({detail})') from None
    if not jobs:
        raise ConfigError(f"{path}: no requests in it")
    return tuple(jobs)


def as_job(value: Any) -> Job:
    """Raises ValueError."""
    if not isinstance(value, dict) or set(value) != {"prompt", "max_tokens"}:
        raise ValueError("exactly these two fields are needed")
    prompt, max_tokens = value["prompt"], value["max_tokens"]
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens!r}")
    ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    if not prompt or not (isinstance(prompt, str) or ids):
        raise ValueError("the prompt must be text or token ids, and not empty")
    return Job(prompt, max_tokens)
