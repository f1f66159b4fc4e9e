from __future__ import annotations

from typing import Any

import pytest
import torch

from crucible_train.cli import main
from crucible_train.errors import TrainingError
from crucible_train.presets import model_config
from crucible_train.probe import Measurement, Probe, decide, search

GB = 10**9
CARD = int(16.3 * GB)
# 350m on a laptop GPU under WSL2: nothing fails, batch 12 is 200 times slower than batch 4.
SPILLING = {4: (227.6, 12.61), 6: (419.4, 16.57), 8: (2778.5, 20.61), 12: (44883.2, 28.57)}


def point(batch: int, milliseconds: float, gigabytes: float = 1.0, refused: bool = False) -> Measurement:
    return Measurement(batch, batch * 1024, milliseconds, int(gigabytes * GB), refused)


def test_a_driver_that_spills_is_found_out_without_any_error() -> None:
    points = [point(batch, *measured) for batch, measured in SPILLING.items()]
    decision = decide(points, CARD)
    assert decision.batch == 4
    assert "memory overshoot" in decision.faults[6]
    assert decide(points, None).batch == 4  # by the cliff alone
    assert "past the cliff" in decide(points, None).faults[8]


def test_memory_alone_is_a_fault_too() -> None:
    assert decide([point(1, 10, 8.0), point(2, 18, 15.4), point(4, 35, 15.6)], CARD).batch == 2


def test_what_comes_after_a_fault_is_not_useful_whatever_it_says() -> None:
    assert decide([point(1, 10), point(2, 100), point(4, 40)], None).batch == 1


def test_a_small_dip_is_no_cliff_and_a_refusal_is_a_fault() -> None:
    points = [point(1, 10), point(2, 21), point(4, float("inf"), refused=True)]
    assert decide(points, CARD).batch == 2
    assert decide(points, CARD).faults == {4: "out of memory"}


def test_not_even_the_smallest() -> None:
    assert decide([point(1, 10, 17.0)], CARD).batch is None


class Card:
    """Ten milliseconds a step and one a sequence; from ``full`` sequences on, a hundred times that."""

    def __init__(self, full: int, hiccup: int | None = None) -> None:
        self.full, self.hiccup, self.seen = full, hiccup, []

    def __call__(self, batch: int, expected: float | None) -> Measurement:
        self.seen.append(batch)
        milliseconds = 10.0 + batch
        if batch >= self.full:
            milliseconds *= 100
        if batch == self.hiccup and self.seen.count(batch) == 1:
            milliseconds *= 10
        return point(batch, milliseconds)


def test_the_search_doubles_then_narrows_down() -> None:
    card = Card(full=53)
    points = search(card, None)
    assert decide(points, None).batch == 52
    assert [one.batch for one in points] == [1, 2, 4, 8, 16, 32, 48, 52, 56, 64]
    assert decide(search(Card(full=10**9), None, start=3, largest=40), None).batch == 40


def test_one_slow_measurement_is_measured_again() -> None:
    card = Card(full=100, hiccup=8)
    assert decide(search(card, None, largest=64), None).batch == 64
    assert card.seen.count(8) == 2


def test_the_first_batch_must_be_possible() -> None:
    for start in (0, 9):
        with pytest.raises(TrainingError, match="first batch"):
            search(Card(10), None, start=start, largest=8)


def test_measuring_real_steps_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from crucible_train.cli import main

    words = ["probe-batch", "--preset", "tiny", "--device", "cpu", "--steps", "2", "--start", "2", "--max-batch", "2"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "largest useful batch: 2 (128 tokens a micro-batch of tiny; the last one tried," in printed
    assert main([*words, "--memory-gb", "0.001"]) == 2
    assert "not even batch 2 is useful here" in capsys.readouterr().err


def test_memory_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe-batch", "--preset", "tiny", "--memory-gb", "inf", "--max-batch", "1"]) == 2
    assert "--memory-gb must be a positive number, got inf" in capsys.readouterr().err


@pytest.mark.parametrize(("matmul", "projections", "head"), [
    ("bf16", "bf16", "bf16"), ("fp8-head", "bf16", "fp8"), ("fp8", "fp8", "fp8"),
])  # fmt: skip
def test_products_have_the_precision_that_train_gives_them(matmul: Any, projections: str, head: str) -> None:
    compute = Probe(model_config("tiny"), torch.device("cpu"), matmul=matmul)._model.compute
    assert (compute.matmul, compute.head_matmul) == (projections, head)
