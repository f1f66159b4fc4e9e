"""Histograms of what requests feel, by a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from crucible.config import SamplingParams
from crucible.engine.histogram import Histogram
from crucible.engine.messages import Finished, HistogramValues
from crucible.engine.recorder import LiveRequest, Recorder
from tests.engine.engines import engine

NOBODY: Any = None


def live(submitted: float) -> LiveRequest:
    return LiveRequest(NOBODY, submitted)


def finished(request_id: str, reason: Any = "length") -> Finished:
    return Finished(request_id, reason, 1, 1)


def count(values: HistogramValues) -> int:
    return sum(values.counts)


def test_a_bound_belongs_to_its_bucket_and_what_is_above_all_has_one_too() -> None:
    histogram = Histogram([1.0, 2.0])
    for value, times in ((0.0, 1), (1.0, 2), (1.5, 1), (2.0, 1), (2.5, 3)):
        histogram.observe(value, times)
    assert histogram.values() == HistogramValues([1.0, 2.0], [3, 2, 3], 0.0 + 2.0 + 1.5 + 2.0 + 7.5)


def test_values_are_a_copy() -> None:
    histogram = Histogram([1.0])
    before = histogram.values()
    histogram.observe(0.5)
    assert before.counts == [0, 0]


def test_the_first_token_the_gaps_and_the_whole_of_a_request() -> None:
    recorder, request = Recorder(), live(10.0)
    recorder.submitted("a", request)
    for now in (10.25, 10.5, 11.5):
        recorder.token(request, now)
        recorder.step(1)
    recorder.finished(request, finished("a"), 11.5)
    values = recorder.values()
    assert (count(values["time_to_first_token_seconds"]), values["time_to_first_token_seconds"].sum) == (1, 0.25)
    assert (count(values["inter_token_latency_seconds"]), values["inter_token_latency_seconds"].sum) == (2, 1.25)
    assert (count(values["e2e_request_latency_seconds"]), values["e2e_request_latency_seconds"].sum) == (1, 1.5)
    assert (count(values["batch_size"]), values["batch_size"].sum) == (3, 3.0)


def test_many_streams_of_one_step_are_all_counted() -> None:
    recorder = Recorder()
    requests = [live(0.0) for _ in range(20)]
    for now in (1.0, 1.5):
        for request in requests[: 20 if now == 1.0 else 15]:
            recorder.token(request, now)
        recorder.step(20)
    for request in requests:  # five streams had a pause
        recorder.token(request, 2.5)
    recorder.step(20)
    gaps = recorder.values()["inter_token_latency_seconds"]
    assert count(gaps) == 35
    assert gaps.sum == pytest.approx(15 * 0.5 + 15 * 1.0 + 5 * 1.5)
    assert gaps.counts[gaps.bounds.index(0.5)] == 15
    assert gaps.counts[gaps.bounds.index(1.0)] == 15
    assert gaps.counts[gaps.bounds.index(2.5)] == 5


def test_steps_that_gave_nothing_are_no_batches() -> None:
    recorder = Recorder()
    recorder.step(0)
    assert count(recorder.values()["batch_size"]) == 0


@pytest.mark.parametrize(("reason", "counted"), [("stop", 1), ("length", 1), ("cancelled", 0), ("error", 0)])
def test_only_completed_requests_have_a_whole(reason: str, counted: int) -> None:
    recorder = Recorder()
    recorder.finished(live(0.0), finished("a", reason), 1.0)
    assert count(recorder.values()["e2e_request_latency_seconds"]) == counted


def test_the_queue_is_left_in_order_at_the_start_of_the_admitting_step() -> None:
    recorder = Recorder()
    for number, name in enumerate("abcd"):
        recorder.submitted(name, live(float(number)))
    recorder.admitted(waiting=3, step_started=4.0)  # a, after 4 s
    recorder.withdrawn("b")
    recorder.admitted(waiting=1, step_started=10.0)  # c, after 8 s
    recorder.admitted(waiting=1, step_started=11.0)
    assert recorder.queued == 1
    recorder.finished(live(3.0), finished("d", "error"), 12.0)
    assert recorder.queued == 0
    queue = recorder.values()["queue_time_seconds"]
    assert (count(queue), queue.sum) == (2, 12.0)


def test_a_request_that_came_while_its_step_was_planned_did_not_wait() -> None:
    recorder = Recorder()
    recorder.submitted("a", live(5.0))
    recorder.admitted(waiting=0, step_started=4.9)
    assert recorder.values()["queue_time_seconds"].sum == 0.0


def test_the_engine_process_observes_its_requests() -> None:
    with engine(max_batch=1, step_s=0.05) as (_, client):
        first, second = (client.submit(prompt, SamplingParams(max_tokens=4)) for prompt in ([1], [2, 256]))
        assert len(list(first)) == 5
        assert len(list(second)) == 2
        histograms = client.report().histograms
        counts = {name: count(values) for name, values in histograms.items()}
        assert counts == {
            "time_to_first_token_seconds": 2, "inter_token_latency_seconds": 3, "e2e_request_latency_seconds": 2,
            "queue_time_seconds": 2, "batch_size": 6,
        }
        sums = {name: values.sum for name, values in histograms.items()}
        assert sums["batch_size"] == 6.0
        assert 0.15 <= sums["inter_token_latency_seconds"] < 1.5
        assert 0.05 + 0.25 <= sums["time_to_first_token_seconds"] < sums["e2e_request_latency_seconds"] < 5
        assert 0.15 <= sums["queue_time_seconds"] < sums["time_to_first_token_seconds"]
