from __future__ import annotations

import json
from pathlib import Path

import pytest

from crucible_train.budget import best_fit, budget, measured_throughput, run_throughput
from crucible_train.cli import main
from crucible_train.errors import TrainingError

MEASURED = {"350m": 17_995.0, "120m": 50_827.0, "30m": 250_000.0}


def test_the_table_of_eight_hours() -> None:
    rows = budget(MEASURED, 8.0, 53_000_000)
    assert [row.preset for row in rows] == ["30m", "120m", "350m"]
    middle, large = rows[1:]
    assert middle.tokens == pytest.approx(1.46e9, rel=0.01)
    assert middle.tokens_per_parameter == pytest.approx(19.7, abs=0.05)
    assert middle.share == pytest.approx(0.98, abs=0.01)
    assert middle.epochs == pytest.approx(27.6, abs=0.1)
    assert large.tokens_per_parameter == pytest.approx(1.9, abs=0.06)
    assert large.hours_needed == pytest.approx(8 / large.share)
    assert best_fit(rows).preset == "120m"


def write_run(place: Path, preset: str, speeds: list[float]) -> None:
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps({"run": {"preset": preset}}))
    rows = "".join(f"{step},{speed}\n" for step, speed in enumerate(speeds, 1))
    (place / "log.csv").write_text("step,tokens_per_second\n" + rows)


def test_throughput_of_logs_leaves_out_the_first_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "study" / "a", "30m", [1.0] * 10 + [100.0, 300.0, 200.0])
    write_run(tmp_path / "study" / "b", "30m", [1.0] * 10 + [400.0])
    write_run(tmp_path / "short", "120m", [5.0] * 10)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    assert measured_throughput([tmp_path]) == {"30m": 300.0}
    assert measured_throughput([tmp_path / "study" / "a"]) == {"30m": 200.0}
    with pytest.raises(TrainingError, match="no run with a log"):
        measured_throughput([tmp_path / "short"])


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for preset, speed in MEASURED.items() for word in ("--throughput", f"{preset}={speed:.0f}")]
    assert main(["budget", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["120m", "74.3M", "50,827", "1.46B", "19.7", "98%", "8.13"]
    assert lines[-1] == "8 h: 120m comes nearest to 20 tokens a parameter (98%)"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "needs a measured throughput"),
        (["--throughput", "30m"], "takes PRESET=TOK/S"),
        (["--throughput", "9b=1"], "preset must be one of"),
        (["--throughput", "30m=0"], "30m: must be a positive number"),
        (["--throughput", "30m=1", "--hours", "nan"], "hours: must be a positive number"),
    ],
)
def test_what_cannot_work(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_fine_tuned_run_is_of_no_preset(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "nano", [5.0] * 20)
    assert run_throughput(tmp_path / "run") == ("nano", 5.0)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"run": {"preset": "nano", "init_from": "other"}}))
    assert run_throughput(tmp_path / "run") is None
