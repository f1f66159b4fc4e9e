"""The sweep over a stand-in trainer: processes, resuming, retries, locks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crucible_train.errors import TrainingError
from crucible_train.executor import take_lock, train_command
from crucible_train.local_executor import LocalExecutor, visible_gpus
from crucible_train.study_design import Study, plan
from crucible_train.study_runs import State, load_study, save_study, state_of
from crucible_train.sweep import Sweep

TRAINER = (sys.executable, str(Path(__file__).parent / "fake_trainer.py"))


def study_of(seeds: int = 2, axes=("norm",), **base) -> Study:
    return plan(axes, range(seeds), {"preset": "tiny", "data": "/data", "steps": 3} | base)


def sweep(study: Study, out: Path, gpus=("0",), jobs: int = 2):
    events: list[str] = []
    executor = LocalExecutor(out, gpus, jobs, TRAINER)
    failed = Sweep(study.runs, out, executor, on_event=events.append).run()
    return [item.run.name for item in failed], events


def starts(out: Path) -> list[str]:
    path = out / "starts.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_every_run_is_trained_once_and_a_second_sweep_trains_nothing(tmp_path: Path) -> None:
    study = study_of()
    failed, _ = sweep(study, tmp_path)
    assert failed == []
    assert [state_of(run, tmp_path) for run in study.runs] == [State.DONE] * 4
    assert len(starts(tmp_path)) == 4
    failed, events = sweep(study, tmp_path)
    assert failed == []
    assert len(starts(tmp_path)) == 4
    assert all("skipped" in line for line in events)


def test_a_finished_run_of_other_settings_is_trained_anew_and_kept(tmp_path: Path) -> None:
    sweep(study_of(1), tmp_path)
    sweep(study_of(1, steps=4), tmp_path)
    assert json.loads((tmp_path / "control-seed0" / "result.json").read_text())["steps"] == 4
    assert json.loads((tmp_path / "control-seed0.superseded-1" / "result.json").read_text())["steps"] == 3


def test_a_half_finished_run_is_continued(tmp_path: Path) -> None:
    study = study_of(1)
    sweep(study, tmp_path)
    (tmp_path / "control-seed0" / "result.json").unlink()
    assert state_of(study.runs[0], tmp_path) is State.HALF
    sweep(study, tmp_path)
    assert next(line for line in starts(tmp_path) if "resume=1" in line).startswith("control-seed0 ")
    assert state_of(study.runs[0], tmp_path) is State.DONE


def test_a_run_that_was_stopped_early_is_not_finished(tmp_path: Path) -> None:
    study = study_of(1)
    sweep(study, tmp_path)
    result = tmp_path / "control-seed0" / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"stopped_by": 2}))
    assert state_of(study.runs[0], tmp_path) is State.HALF


def test_a_failure_is_retried_once_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAIL", json.dumps({"control-seed0": 1, "norm-layernorm-seed0": 2}))
    study = study_of()
    failed, events = sweep(study, tmp_path)
    assert failed == ["norm-layernorm-seed0"]
    assert "norm-layernorm-seed0: failed again, given up (exit code 3: boom)" in events
    done = [run.name for run in study.runs if state_of(run, tmp_path) is State.DONE]
    assert done == ["control-seed0", "control-seed1", "norm-layernorm-seed1"]
    assert len(starts(tmp_path)) == 6
    assert "boom" in (tmp_path / "logs" / "norm-layernorm-seed0.log").read_text()


def test_runs_spread_over_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP", "0.1")
    sweep(study_of(2), tmp_path, gpus=("2", "3"), jobs=2)
    assert sorted(line.split("gpu=")[1].split()[0] for line in starts(tmp_path)) == ["2", "2", "3", "3"]


def test_never_more_than_jobs_at_once_on_a_gpu(tmp_path: Path) -> None:
    executor = LocalExecutor(tmp_path, ("0",), 1, (sys.executable, "-c", "import time; time.sleep(60)"))
    study = study_of(1)
    assert executor.room()
    executor.start(study.runs[0], False)
    assert not executor.room()
    assert executor.wait(0.1) == []
    executor.stop()


def test_two_sweeps_never_share_a_directory(tmp_path: Path) -> None:
    executor = LocalExecutor(tmp_path, trainer=TRAINER)
    with pytest.raises(TrainingError, match="another sweep is at work"):
        LocalExecutor(tmp_path, trainer=TRAINER)
    executor.stop()
    LocalExecutor(tmp_path, trainer=TRAINER).stop()


DRIVER = """
import sys
from pathlib import Path
from crucible_train.local_executor import LocalExecutor
from crucible_train.study_runs import load_study
from crucible_train.sweep import Sweep
out = Path(sys.argv[1])
Sweep(load_study(out).runs, out, LocalExecutor(out, ("0",), 1, sys.argv[2:])).run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_stopped_leaves_no_process_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("FAKE_STEP", "0.2")
    study = study_of(1, steps=20)
    save_study(tmp_path, study)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), *TRAINER], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (tmp_path / "control-seed0" / "log.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.send_signal(number)
    assert driver.wait(30) != 0
    child = int(starts(tmp_path)[0].split("pid=")[1])
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(child)
    assert state_of(study.runs[0], tmp_path) is State.HALF  # it did not just go on to its end
    monkeypatch.setenv("FAKE_STEP", "0")
    _wait_for_lock(tmp_path, deadline)
    failed, _ = sweep(study, tmp_path)
    assert failed == []
    steps = [line.split(",")[0] for line in (tmp_path / "control-seed0" / "log.csv").read_text().splitlines()]
    assert steps == ["step", *map(str, range(1, 21))]


def _wait_for_lock(directory: Path, deadline: float) -> None:
    """A killed process's threads may hold its files for a moment after it has become a zombie."""
    while True:
        try:
            with take_lock(directory):
                return
        except TrainingError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_study_is_kept_and_a_damaged_one_refused(tmp_path: Path) -> None:
    study = study_of(axes=("norm", "placement"))
    assert load_study(tmp_path) is None
    save_study(tmp_path, study)
    assert load_study(tmp_path) == study
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(TrainingError, match="damaged"):
        load_study(tmp_path)


def test_the_command_of_a_run(tmp_path: Path) -> None:
    run = study_of(1).runs[1]
    command = train_command(run, tmp_path / run.name, True)
    assert command[:4] == [sys.executable, "-m", "crucible_train.cli", "train"]
    assert command[-1] == "--resume"
    assert " --norm layernorm --seed 0 --data-seed 0" in " ".join(command)


def test_visible_gpus_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in (("2,5", ["2", "5"]), ("", []), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert visible_gpus() == wanted
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", os.devnull)
    assert visible_gpus() == []
