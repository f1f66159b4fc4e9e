from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from crucible.bench.surfaces import Job
from crucible.bench.workload import Lengths, Workload, read_dataset
from crucible.errors import ConfigError


def draws(text: str, count: int = 3000) -> list[int]:
    lengths, rng = Lengths.parse(text), random.Random(1)
    return [lengths.draw(rng) for _ in range(count)]


def test_fixed_and_uniform() -> None:
    assert set(draws("7", 10)) == {7}
    assert set(draws("3:6")) == {3, 4, 5, 6}
    assert set(draws("uniform:3:4")) == {3, 4}


def test_the_mean_of_a_lognormal_is_what_was_asked() -> None:
    lengths = draws("lognormal:200:0.5", 20_000)
    assert sum(lengths) / len(lengths) == pytest.approx(200, rel=0.02)
    assert min(lengths) >= 1
    assert max(lengths) <= 1600
    assert len(set(lengths)) > 200


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "x", "5:3", "0:3", "1:2:3", "lognormal:0:1", "lognormal:5", "lognormal:5:9", "uniform:5"]
)
def test_lengths_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths are N"):
        Lengths.parse(text)


def workload(**changes: object) -> Workload:
    values: dict[str, object] = {"prompt": Lengths.parse("2:9"), "output": Lengths.parse("3:5"), "id_limit": 50}
    return Workload(**{**values, **changes})  # type: ignore[arg-type]


def test_jobs_repeat_with_their_seed() -> None:
    first, again, other = (list(islice(workload(disconnect=0.5).jobs(seed), 20)) for seed in (1, 1, 2))
    assert first == again != other
    for job in first:
        assert 2 <= len(job.prompt) <= 9
        assert 3 <= job.max_tokens <= 5
        assert all(isinstance(token, int) and 0 <= token < 50 for token in job.prompt)


def test_a_nonce_changes_what_prompts_consist_of_and_nothing_else() -> None:
    for text in (False, True):
        first, second = (list(islice(workload(text=text, disconnect=0.5, nonce=n).jobs(1), 20)) for n in (1, 2))
        assert not any(a.prompt == b.prompt for a, b in zip(first, second, strict=True))
        for a, b in zip(first, second, strict=True):
            assert (a.max_tokens, a.hang_up_after) == (b.max_tokens, b.hang_up_after)
            assert text or len(a.prompt) == len(b.prompt)


def test_disconnecting_clients_hang_up_midway() -> None:
    jobs = list(islice(workload(disconnect=0.25).jobs(1), 2000))
    leaving = [job for job in jobs if job.hang_up_after is not None]
    assert len(leaving) == pytest.approx(500, abs=60)
    assert all(1 <= (job.hang_up_after or 0) < job.max_tokens for job in leaving)
    assert not any(job.hang_up_after for job in islice(workload().jobs(1), 100))


def test_text_prompts() -> None:
    job = next(workload(text=True).jobs(1))
    assert isinstance(job.prompt, str)
    assert 2 <= len(job.prompt.split()) <= 9


def test_dataset_goes_round(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 2}\n\n{"prompt": [1, 2], "max_tokens": 3}\n')
    dataset = read_dataset(path)
    assert list(islice(workload(dataset=dataset).jobs(1), 3)) == [Job("a", 2), Job([1, 2], 3), Job("a", 2)]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"prompt": "a"}',
        '{"prompt": "a", "max_tokens": 0}',
        '{"prompt": "a", "max_tokens": true}',
        '{"prompt": [], "max_tokens": 1}',
        '{"prompt": [-1], "max_tokens": 1}',
        '{"prompt": "a", "max_tokens": 1, "x": 1}',
        "",
    ],
)
def test_a_bad_dataset_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match="line 1" if line else "no requests"):
        read_dataset(path)
