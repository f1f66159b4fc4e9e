"""The commands ``sweep`` and ``analyze``, and what they write: RESULTS.md and figures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from crucible_train.analysis import analyze
from crucible_train.cli import main
from crucible_train.figures import band
from crucible_train.progress import duration
from crucible_train.results_table import plain_table, results_markdown
from crucible_train.study_design import plan
from crucible_train.study_runs import Point, last_point, losses_of, planned_seeds, save_study
from crucible_train.sweep import Progress
from crucible_train.sweep_status import time_left

BASE = {"preset": "tiny", "data": "/data", "steps": 3}


def write_run(directory: Path, run, best: float | None, **result: object) -> None:
    place = directory / run.name
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({"config_hash": run.hash}))
    losses = [6.0, 5.0, best or 9.0]
    rows = [f"{step},{loss},1000.0,{loss}" for step, loss in enumerate(losses, 1)]
    (place / "log.csv").write_text("step,loss,tokens_per_second,val_loss\n" + "\n".join(rows) + "\n")
    (place / "result.json").write_text(json.dumps({"best_val_loss": best, "diverged": best is None} | result))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Three seeds of two axes: layernorm 0.1 worse, one seed of post blown up, one of post missing."""
    study = plan(["norm", "placement"], range(3), BASE, {"post": 1e-4})
    save_study(tmp_path, study)
    for run in study.runs:
        wobble = 0.001 * ((run.seed * 7 + len(run.variant)) % 3)
        worse = 0.1 if run.variant == "norm-layernorm" else 0.0
        if run.name == "placement-post-seed1":
            write_run(tmp_path, run, None)
        elif run.name != "placement-post-seed2":
            write_run(tmp_path, run, 4 + 0.1 * run.seed + worse + wobble)
    return tmp_path


def test_the_report_says_everything_by_name(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--report", "--out", str(finished)]) == 0
    printed = capsys.readouterr().out
    assert "missing: placement-post-seed2: not started" in printed
    text = (finished / "RESULTS.md").read_text()
    assert "**Missing: 1 run of 9 planned.** placement-post-seed2 (not started)." in text
    assert "**Diverged, kept out of the means:** placement-post seed 1." in text
    assert "UNSTABLE: 1 of 2 seeds diverged" in text
    assert "placement-post 0.0001" in text
    norm = next(line for line in text.splitlines() if line.startswith("| norm |"))
    cells = [cell.strip() for cell in norm.split("|")[1:-1]]
    assert cells[:3] == ["norm", "layernorm", "3"]
    assert float(cells[4]) == pytest.approx(0.1, abs=0.002)
    assert cells[-2:] == ["worse", "no difference shown"]
    assert "the 2-SD rule in " in text
    for name in ("loss_curves", "effects"):
        assert f"](figures/{name}.png)" in text
        assert (finished / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(finished.rglob("*.partial"))


def test_a_row_of_the_markdown_table_has_as_many_cells_as_the_header(finished: Path) -> None:
    assert main(["analyze", str(finished), "--out", str(finished / "report"), "--no-figures"]) == 0
    lines = [line for line in (finished / "report" / "RESULTS.md").read_text().splitlines() if line.startswith("|")]
    table = lines[:5]
    assert {line.count("|") for line in table} == {12}
    assert not (finished / "report" / "figures").exists()


def test_one_seed_says_unknown() -> None:
    study = plan(["norm"], [0], BASE)
    losses = {"control": {0: 4.0}, "norm-layernorm": {0: 3.0}}
    analysis = analyze(losses, control="control", planned=planned_seeds(study))
    assert plain_table(study, analysis).splitlines()[2].split()[-2:] == ["unknown", "unknown"]
    assert "One seed can tell nothing." in results_markdown(study, analysis, {}, metric="best_val_loss")


def test_runs_of_other_settings_are_missing_not_counted(finished: Path) -> None:
    (finished / "control-seed0" / "config.json").write_text(json.dumps({"config_hash": "0" * 16}))
    study = plan(["norm", "placement"], range(3), BASE, {"post": 1e-4})
    losses, absent = losses_of(study, finished)
    assert absent["control-seed0"] == "of other settings"
    assert 0 not in losses["control"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["analyze"], "name the directory"),
        (["analyze", "/nowhere"], "has no study.json"),
        (["analyze", "--simulate", "--seeds", "1"], "--seeds of 2 or more"),
        (["sweep"], "needs --data"),
        (["sweep", "--data", "/nowhere", "--steps", "1"], "no such directory"),
        (["sweep", "--data", "/", "--steps", "1", "--set", "lr"], "--set takes NAME=VALUE"),
        (["sweep", "--data", "/", "--steps", "1", "--lr-for", "post=fast"], "not a learning rate"),
        (["sweep", "--data", "/", "--steps", "1", "--axes", "depth"], "unknown axis"),
        (["sweep", "--data", "/", "--steps", "1", "--seeds", "0"], "--seeds must be at least 1"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_missing_metric_is_an_error_not_a_divergence(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(finished), "--metric", "val_bits_per_byte"]) == 2
    assert "has no val_bits_per_byte" in capsys.readouterr().err


def test_dry_run_lists_states_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--data", str(tmp_path), "--steps", "3", "--preset", "tiny", "--seeds", "2", "--axes", "pos"]
    assert main([*words, "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert lines[0] == "control-seed0  new"
    assert not (tmp_path / "out").exists()


def test_simulate_prints_rates_and_power(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "--simulate", "--seeds", "3"]) == 0
    printed = capsys.readouterr().out
    assert "8 variants and 3 seeds" in printed
    assert "found 80% of the time" in printed


def test_a_band_spans_the_seeds_that_have_a_step() -> None:
    steps, mean, low, high = band([([1, 2], [4.0, 3.0]), ([2, 3], [5.0, 2.0]), ([4], [math.nan])])
    assert steps.tolist() == [1, 2, 3]
    assert mean.tolist() == [4, 4, 2]
    assert low.tolist() == [4, 3, 2]
    assert high.tolist() == [4, 5, 2]
    assert band([([], [])])[0].tolist() == []


def test_the_last_point_is_the_last_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    assert last_point(tmp_path) is None
    log.write_text("step,loss,tokens_per_second\n")
    assert last_point(tmp_path) is None
    log.write_text("step,loss,tokens_per_second\n" + "".join(f"{step},4.5,100.0\n" for step in range(1, 999)) + "999,4")
    assert last_point(tmp_path) == Point(998, 4.5, 100.0)


def test_time_left() -> None:
    run = plan(["norm"], [0], BASE).runs[0]
    progress = [Progress(run, phase, seconds=100.0) for phase in ("done", "skipped", "running", "waiting", "waiting")]
    assert time_left(progress, 2, 0.5) == 125
    assert time_left(progress[1:], 2, 0.5) is None
    assert [duration(seconds) for seconds in (45, 720, 11100)] == ["45 s", "12 min", "3 h 05 min"]
