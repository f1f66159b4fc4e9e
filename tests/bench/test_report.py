from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from crucible.bench import machine
from crucible.bench.report import Column, Report, Table, write
from crucible.bench.statistics import Summary

COLUMNS = (
    Column("name", "name"),
    Column("speed", "tok/s", ",.1f", detail=True),
    Column("n", "n", ",.0f", steady=False),
)


def report(*rows: dict[str, object]) -> Report:
    table = Table("Title", COLUMNS, list(rows))  # type: ignore[arg-type]
    made = Report("decode", "crucible bench decode --batch 1", 3, {"quant": "int8"}, [table], gpus_before=[])
    made.finish()
    return made


STEADY = {"name": "a|b", "speed": Summary((1000.0, 1010.0, 990.0)), "n": 4}
WILD = {"name": "c", "speed": Summary((10.0, 20.0)), "n": Summary((1.0, 9.0)), "hidden": Summary((0.0, math.inf))}


def test_text() -> None:
    text = report(STEADY).to_text()
    assert [line.split() for line in text.splitlines()] == [
        ["Title"],
        ["name", "tok/s", "min", "max", "spread", "%", "n"],
        ["a|b", "1,000.0", "990.0", "1,010.0", "2.0", "4"],
    ]


def test_a_wide_spread_is_flagged_and_explained() -> None:
    text = report(WILD).to_text()
    assert "15.0!" in text
    assert "more than 30 %" in text
    assert "5!" not in text.replace("15.0!", "")  # counts of events come out as they come out
    assert "30 %" not in report(STEADY).to_text()


def test_json_has_every_trial_and_where_it_ran() -> None:
    document = json.loads(report(STEADY, WILD).to_json())
    first, second = document["tables"][0]["rows"]
    assert first["speed"] == {
        "median": 1000, "min": 990, "max": 1010, "spread_percent": 2.0, "flagged": False, "values": [1000, 1010, 990],
    }
    assert second["speed"]["flagged"]
    assert second["hidden"]["max"] is None  # JSON has no infinity
    assert document["command"] == "crucible bench decode --batch 1"
    assert document["trials"] == 3
    assert {"cpu", "cores", "threads", "memory_gib", "gpus", "gpus_after"} <= set(document["machine"])
    assert set(document) >= {"date", "commit", "version", "settings"}


def test_markdown() -> None:
    text = report(STEADY, WILD).to_markdown()
    assert "```sh\ncrucible bench decode --batch 1\n```" in text
    assert "| name | tok/s | min | max | spread % | n |" in text
    assert "| a\\|b | 1,000.0 | 990.0 | 1,010.0 | 2.0 | 4 |" in text
    assert "3 trials" in text
    assert "quant int8" in text


def test_a_gpu_is_named_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[{"name": "G", "sm_clock_mhz": 300.0}], [{"name": "G", "sm_clock_mhz": 1980.0}]])
    monkeypatch.setattr(machine, "describe_gpus", lambda: next(answers))
    made = Report("x", "y", 1, gpus_before=machine.describe_gpus())
    made.finish()
    text = made.to_markdown()
    assert "GPU before: name G, sm_clock_mhz 300.0" in text
    assert "GPU after: name G, sm_clock_mhz 1980.0" in text


def test_files_appear_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write(path, "old")
    write(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "missing" / "out.json", "x")


def test_gpu_rows() -> None:
    answer = "NVIDIA H200, 580.65, 700.00, 120.5, 1980, 1980, 143771\nOdd, [N/A], [N/A], [N/A], 300, 1000, 8000\n"
    assert machine.parse_gpus(answer) == [
        {
            "name": "NVIDIA H200",
            "driver": "580.65",
            "power_limit_w": 700.0,
            "power_draw_w": 120.5,
            "sm_clock_mhz": 1980.0,
            "max_sm_clock_mhz": 1980.0,
            "memory_mib": 143771.0,
        },
        {"name": "Odd", "sm_clock_mhz": 300.0, "max_sm_clock_mhz": 1000.0, "memory_mib": 8000.0},
    ]
    assert machine.parse_gpus("No devices were found\n") == []


def test_cpu_is_described() -> None:
    found = machine.describe_cpu()
    assert found["cpu"]
    assert 1 <= int(found["cores"]) <= int(found["threads"])


def test_commit_is_that_of_the_source_and_of_nothing_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x", *arguments], check=True,
                       capture_output=True)

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(machine, "PACKAGE", package)
    assert machine.commit() is None
    git("init")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "-m", "x")
    assert machine.commit() is None
    git("add", "package")
    git("commit", "-m", "y")
    found = machine.commit()
    assert found is not None
    assert len(found) == 40
    (package / "__init__.py").write_text("changed")
    assert machine.commit() == found + " + changes"


def test_a_program_that_is_missing_or_fails_says_nothing() -> None:
    assert machine.ask("no-such-program-anywhere") is None
    assert machine.ask("false") is None
