"""log.csv: whole rows, each step once."""

from __future__ import annotations

from pathlib import Path

import pytest

from crucible_train.errors import TrainingError
from crucible_train.run_log import COLUMNS, RunLog, read_log
from crucible_train.run_result import RunResult, medians


def write(path: Path, first: int, last: int, start: int = 0) -> None:
    log = RunLog(path, start)
    for step in range(first, last + 1):
        log.append({"step": step, "loss": 1 / step})
    log.close()


def test_rows_read_back_exactly(tmp_path: Path) -> None:
    write(tmp_path / "log.csv", 1, 3)
    rows = read_log(tmp_path / "log.csv")
    assert list(rows[0]) == list(COLUMNS)
    assert [float(row["loss"]) for row in rows] == [1.0, 1 / 2, 1 / 3]
    assert rows[0]["val_loss"] == ""


def test_a_row_is_on_disk_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.csv")
    log.append({"step": 1, "loss": 2.0})
    assert len(read_log(tmp_path / "log.csv")) == 1
    log.close()


def test_going_on_drops_later_rows_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    write(path, 1, 5)
    with path.open("a") as file:
        file.write("6,0.1")
    log = RunLog(path, 3)
    assert len(read_log(path)) == 5, "nothing goes before the first new row"
    log.append({"step": 4, "loss": 9.0})
    log.close()
    assert [(row["step"], row["loss"][:3]) for row in read_log(path)][2:] == [("3", "0.3"), ("4", "9.0")]


def test_a_gap_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "log.csv", 1, 3)
    with pytest.raises(TrainingError, match="lacks some of the steps 1 … 5"):
        RunLog(tmp_path / "log.csv", 5)
    with pytest.raises(TrainingError, match="lacks"):
        RunLog(tmp_path / "absent.csv", 1)


def test_an_unknown_column_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speed"):
        RunLog(tmp_path / "log.csv").append({"step": 1, "speed": 3.0})


@pytest.mark.parametrize("text", ["step,loss\n1,2.0\nx,3.0\n", "schritt,loss\n1,2.0\n"])
def test_a_damaged_log_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(TrainingError, match="is damaged"):
        RunLog(tmp_path / "log.csv", 1)


def test_a_run_that_diverges_before_its_first_row_has_figures_too(tmp_path: Path) -> None:
    assert medians(tmp_path / "log.csv")["final_train_loss"] is None


def test_a_summary_without_a_finite_validation_loss() -> None:
    result = RunResult(steps=1, tokens=2, parameters=3, config_hash="", final_val_loss=float("nan"))
    assert result.summary("out") == "out: 1 steps, 2 tokens"
