"""The stream of batches: deterministic, complete, shifted by one, resumable, split between ranks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from crucible_train.errors import TrainingError
from crucible_train.loader import BatchLoader, WindowOrder
from crucible_train.shards import TokenDataset
from tests.train.prepared import dataset_of


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return dataset_of(tmp_path_factory.mktemp("data"), 250, shard_tokens=40)


def inputs(
    dataset: TokenDataset, count: int, *, seed: int = 1, batch: int = 2, **options: Any
) -> list[list[list[int]]]:
    with BatchLoader(dataset, batch, 8, seed, **options) as loader:
        return [loader.next()[0].tolist() for _ in range(count)]


def test_targets_are_the_inputs_shifted_by_one(dataset: TokenDataset) -> None:
    with BatchLoader(dataset, 3, 8, 0) as loader:
        for _ in range(20):
            tokens, targets = loader.next()
            assert tokens.shape == targets.shape == (3, 8)
            assert tokens.dtype == targets.dtype == torch.int64
            assert tokens.is_contiguous()
            assert targets.is_contiguous()
            # The ids of the split count up.
            assert torch.equal(targets, tokens + 1)
            assert torch.equal(tokens, tokens[:, :1] + torch.arange(8))


def test_an_epoch_visits_every_window_once(dataset: TokenDataset) -> None:
    order = WindowOrder(250, 8, seed=5)
    assert order.windows == 30
    for epoch in range(6):
        starts = order.starts(epoch * 30, 30)
        offsets = {int(start) % 8 for start in starts}
        assert len(offsets) == 1
        assert len(set(starts.tolist())) == 30
        assert 0 <= starts.min() <= starts.max() <= 250 - 9
    assert len({int(order.starts(epoch * 30, 1)[0]) % 8 for epoch in range(30)}) > 3
    assert order.starts(0, 30).tolist() != (order.starts(30, 30) - order.starts(30, 30).min()).tolist()


@pytest.mark.parametrize("tokens", [9, 10, 15, 16, 17, 24, 25, 250])
def test_windows_stay_inside_the_split(tokens: int) -> None:
    order = WindowOrder(tokens, 8, seed=3)
    starts = order.starts(0, 200 * order.windows)
    assert starts.min() == 0
    assert starts.max() <= tokens - 9
    assert starts.max() >= min(tokens - 9, 8 * (order.windows - 1))
    assert len(set(starts.tolist())) == order.windows * min(8, tokens - 8 * order.windows)


def test_the_order_is_a_function_of_seed_and_number(dataset: TokenDataset) -> None:
    order = WindowOrder(250, 8, seed=7)
    whole = order.starts(0, 100).tolist()
    assert [int(order.starts(number, 1)[0]) for number in reversed(range(100))] == whole[::-1]
    assert WindowOrder(250, 8, seed=8).starts(0, 100).tolist() != whole
    assert WindowOrder(250, 8, seed=-1).starts(0, 3).tolist() != WindowOrder(250, 8, seed=1).starts(0, 3).tolist()
    # Pinned: a later version must not change the order under a run that goes on.
    assert whole[:6] == PINNED


PINNED = [139, 67, 11, 179, 99, 195]


def test_a_run_goes_on_at_any_step(dataset: TokenDataset) -> None:
    whole = inputs(dataset, 40, grad_accum=2)
    assert inputs(dataset, 40, grad_accum=2) == whole
    for step in (1, 7, 19):
        assert inputs(dataset, 2, grad_accum=2, start_step=step) == whole[2 * step : 2 * step + 2]


@pytest.mark.parametrize(("world", "grad_accum", "batch"), [(2, 1, 2), (1, 2, 2), (4, 1, 1), (2, 2, 1), (1, 1, 4)])
def test_a_step_holds_the_same_sequences_however_it_is_divided(
    dataset: TokenDataset, world: int, grad_accum: int, batch: int
) -> None:
    def steps(world: int, grad_accum: int, batch: int) -> list[Counter[tuple[int, ...]]]:
        found: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(9)]
        for rank in range(world):
            micros = inputs(dataset, 9 * grad_accum, batch=batch, rank=rank, world=world, grad_accum=grad_accum)
            for index, micro in enumerate(micros):
                found[index // grad_accum].update(map(tuple, micro))
        return found

    assert steps(world, grad_accum, batch) == steps(1, 1, 4)


@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_less_than_one_window_is_refused(tmp_path: Path, tokens: int) -> None:
    data = dataset_of(tmp_path, tokens)
    with pytest.raises(TrainingError, match=f"train split has {tokens} tokens; a context of 64 needs at least 65"):
        BatchLoader(data, 2, 64, 0)


def test_exactly_one_window_is_enough(tmp_path: Path) -> None:
    with BatchLoader(dataset_of(tmp_path, 65), 2, 64, 0) as loader:
        for _ in range(3):
            tokens, targets = loader.next()
            assert tokens.tolist() == [list(range(64))] * 2
            assert targets.tolist() == [list(range(1, 65))] * 2
        assert loader.step == 3
        assert loader.epoch == 6


def test_an_error_in_the_thread_reaches_the_caller(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise TrainingError("the disk is gone")

    monkeypatch.setattr(TokenDataset, "gather", broken)
    with BatchLoader(dataset, 2, 8, 0) as loader, pytest.raises(TrainingError, match="the disk is gone"):
        loader.next()


def test_closing_ends_the_thread(dataset: TokenDataset) -> None:
    before = threading.active_count()
    loader = BatchLoader(dataset, 2, 8, 0, prefetch=1)
    loader.close()
    assert threading.active_count() == before


def test_waiting_is_counted(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = TokenDataset.gather

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return gather(*arguments)

    with BatchLoader(dataset, 2, 8, 0) as loader:
        time.sleep(0.1)
        loader.next()
        assert loader.wait_seconds < 0.04
    monkeypatch.setattr(TokenDataset, "gather", slow)
    with BatchLoader(dataset, 2, 8, 0) as loader:
        for _ in range(3):
            loader.next()
        assert loader.wait_seconds > 0.1
