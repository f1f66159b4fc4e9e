"""The validation loss: fixed windows, every token alike."""

from __future__ import annotations

import math

import pytest
import torch

from crucible_train.distributed import Workers
from crucible_train.evaluation import Evaluation
from crucible_train.shards import TokenDataset
from crucible_train.softmax import IGNORED
from tests.train.small_run import make_data

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return TokenDataset(make_data(tmp_path_factory.mktemp("text") / "small"), "val")


def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum of the targets: what an evaluation's mean must then be is known."""
    return targets[targets != IGNORED].sum().float()


def evaluation(dataset: TokenDataset, workers: Workers = Workers(0, 1, CPU), **changes: int) -> Evaluation:  # noqa: B008
    return Evaluation(dataset, workers=workers, **{"context": 16, "batch": 3, "max_tokens": 0, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [7, 16, 10_000])
def test_the_whole_split_is_every_token_but_the_first(dataset: TokenDataset, context: int) -> None:
    score = evaluation(dataset, context=context).run(loss)
    ids = dataset.all()[1:]
    assert score.loss == pytest.approx(ids.astype(float).mean(), rel=1e-6)
    assert score.bits_per_byte == pytest.approx(score.loss / math.log(2) / dataset.bytes_per_token)


def test_inputs_and_targets_are_one_apart(dataset: TokenDataset) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append((tokens, targets))
        return loss(tokens, targets)

    evaluation(dataset, max_tokens=100).run(watch)
    assert {tuple(tokens.shape) for tokens, _ in seen} == {(3, 16)}
    for tokens, targets in seen:
        assert torch.equal(tokens[:, 1:][targets[:, 1:] != IGNORED], targets[:, :-1][targets[:, 1:] != IGNORED])


def test_a_part_is_spread_over_the_split_and_always_the_same(dataset: TokenDataset) -> None:
    part = evaluation(dataset, max_tokens=64)
    assert part.windows == 4
    assert part.run(loss) == evaluation(dataset, max_tokens=64, batch=1).run(loss)
    assert part._starts[0] == 0
    assert part._starts[-1] > dataset.token_count - 3 * 16


def test_processes_share_the_windows(dataset: TokenDataset) -> None:
    totals: list[torch.Tensor] = []

    class Half(Workers):
        def sum(self, values: torch.Tensor) -> torch.Tensor:
            totals.append(values.clone())
            return values

    for rank in (0, 1):
        evaluation(dataset, Half(rank, 2, CPU)).run(loss)
    nats, count = (totals[0] + totals[1]).tolist()
    assert count == dataset.token_count - 1
    assert nats / count == pytest.approx(evaluation(dataset).run(loss).loss)


def test_a_split_of_one_token_has_no_windows(dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "token_count", 1)
    assert evaluation(dataset).windows == 0
    monkeypatch.setattr(dataset, "token_count", 2)
    assert evaluation(dataset).windows == 1
