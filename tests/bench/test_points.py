from __future__ import annotations

import pytest

from crucible.bench.load import Record
from crucible.bench.points import Slo, cached_percent, measure, occupancy
from crucible.bench.surfaces import Job

JOB = Job((1,), 4)


def record(due: float = 0.0, first: float = 0.1, gap: float = 0.01, tokens: int = 4, outcome: str = "ok") -> Record:
    """A stream whose first token comes ``first`` after it was due and then one every ``gap``."""
    times = [due + first + gap * i for i in range(tokens)]
    end = times[-1] + 0.001 if times else due + first
    return Record(JOB, due, end, outcome, "", tokens, times, [1] * tokens)


def test_a_point_in_numbers() -> None:
    records = [record(), record(due=0.5, first=0.3, gap=0.03)]
    values = measure(records, Slo(), streams=2, client_s=0.05)
    window = 0.5 + 0.3 + 0.09 + 0.001
    assert values["ttft_p50"] == pytest.approx(200)
    assert values["ttft_p99"] == pytest.approx(298)
    assert values["itl_p50"] == pytest.approx(20)
    assert values["tpot_p90"] == pytest.approx(28)
    assert values["e2e_p50"] == pytest.approx((131 + 391) / 2)
    assert values["e2e_tok_s"] == pytest.approx(8 / window)
    assert values["steady_tok_s"] == pytest.approx(2 / 0.02)
    assert values["req_s"] == pytest.approx(2 / window)
    assert values["client_percent"] == pytest.approx(5 / window)
    assert (values["completed"], values["errors"], values["short"]) == (2, 0, 0)
    assert "good_req_s" not in values


def test_open_loop_steady_speed_counts_the_streams_there_were() -> None:
    values = measure([record(first=0.0, gap=0.1, tokens=11)], Slo())
    assert values["steady_tok_s"] == pytest.approx(1.0 / 1.001 / 0.1)


def test_hang_ups_and_failures_are_kept_apart() -> None:
    records = [
        record(),
        record(outcome="hang-up", tokens=2),
        record(outcome="429", tokens=0, first=0.02),
        record(outcome="5xx", tokens=0),
        record(outcome="disconnect", tokens=3, gap=9.0),
    ]
    values = measure(records, Slo(), streams=1)
    assert (values["completed"], values["hang_ups"], values["errors"]) == (1, 1, 3)
    assert [values[f"errors_{name}"] for name in ("429", "5xx", "disconnect", "timeout")] == [1, 1, 1, 0]
    assert values["refused_p99"] == pytest.approx(20)
    assert values["itl_p99"] == pytest.approx(10)  # the broken stream's pauses are no latency
    assert values["e2e_p50"] == pytest.approx(131)


def test_answers_shorter_than_asked_are_counted() -> None:
    assert measure([record(tokens=3)], Slo(), streams=1)["short"] == 1


def test_goodput() -> None:
    records = [record(), record(first=0.3), record(gap=0.05), record(outcome="429", tokens=0)]
    for slo, good in ((Slo(ttft=0.2), 2), (Slo(itl=0.02), 2), (Slo(ttft=0.2, itl=0.02), 1), (Slo(ttft=0.05), 0)):
        assert measure(records, slo, streams=1)["good_percent"] == pytest.approx(25 * good)


def test_one_long_pause_makes_a_request_bad() -> None:
    stalled = Record(JOB, 0.0, 2.0, "ok", "", 4, [0.1, 0.11, 0.12, 1.5], [1] * 4)
    assert not Slo(itl=0.1).good(stalled)
    assert Slo(ttft=0.2).good(stalled)


def test_nothing_streamed() -> None:
    values = measure([record(outcome="5xx", tokens=0)], Slo(), streams=1)
    assert values["ttft_p50"] is None
    assert values["steady_tok_s"] is None
    assert values["errors"] == 1
    assert measure([], Slo())["e2e_tok_s"] is None


def test_occupancy_is_of_the_time_between() -> None:
    before = {"decode_steps": 100, "batch_avg": 2.0, "tokens_generated": 999}
    after = {"decode_steps": 150, "batch_avg": 4.0, "tokens_generated": 9999}
    assert occupancy(before, after) == pytest.approx((600 - 200) / 50)
    assert occupancy(before, before) is None
    assert occupancy(None, after) is None
    assert occupancy({"decode_steps": 10, "tokens_generated": 5}, {"decode_steps": 20, "tokens_generated": 25}) == 2.0
    assert occupancy({"x": 1}, {"x": 2}) is None


def test_what_the_prefix_cache_gave() -> None:
    before = {"prefix_cache_tokens": 100, "prefill_tokens": 1000}
    after = {"prefix_cache_tokens": 130, "prefill_tokens": 1090}
    assert cached_percent(before, after) == 25
    assert cached_percent(before, before) is None
    assert cached_percent(before, {"prefill_tokens": 5}) is None
    assert cached_percent(None, after) is None
