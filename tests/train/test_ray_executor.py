"""Runs as Ray tasks; the slow test has a cluster of two nodes and kills one."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from crucible_train.errors import TrainingError
from crucible_train.ray_executor import RayExecutor, cluster, pack, train_on_node, unpack
from crucible_train.study_design import Study, plan
from crucible_train.study_runs import State, state_of
from crucible_train.sweep import Progress, Sweep

TRAINER = (sys.executable, str(Path(__file__).parent / "fake_trainer.py"))


def study_of(seeds: int = 1, steps: int = 3) -> Study:
    return plan(["norm"], range(seeds), {"preset": "tiny", "data": "/data", "steps": steps})


def test_a_packed_run_arrives_without_the_optimiser_and_replaces_what_was_there(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out" / "run"
    for name in ("log.csv", "checkpoints/step-2/model/config.json", "checkpoints/step-2/trainer.pt",
                 "checkpoints/step-3/model/config.json"):  # fmt: skip
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    for link, step in (("best", "step-2"), ("last", "step-3")):
        (source / "checkpoints" / link).symlink_to(step)
    target.mkdir(parents=True)
    (target / "old").touch()
    unpack(pack(source), target)
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert files == ["checkpoints/step-2/model/config.json", "log.csv"]
    assert (target / "checkpoints" / "best" / "model" / "config.json").exists()
    assert [path.name for path in target.parent.iterdir()] == ["run"]


def test_the_body_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = study_of().runs[0]
    first = train_on_node(run, str(tmp_path / "node"), None, TRAINER)
    assert (first.code, first.detail) == (0, "")
    unpack(first.files, tmp_path / "out" / run.name)
    assert state_of(run, tmp_path / "out") is State.DONE
    shared = train_on_node(run, str(tmp_path / "shared"), False, TRAINER)
    assert shared.files is None
    assert state_of(run, tmp_path / "shared") is State.DONE
    monkeypatch.setenv("FAKE_FAIL", json.dumps({run.name: 1}))
    failed = train_on_node(run, str(tmp_path / "other"), None, TRAINER)
    assert (failed.code, failed.detail, failed.files) == (3, "exit code 3: boom", None)
    retried = train_on_node(run, str(tmp_path / "other"), None, TRAINER)
    assert retried.code == 0
    assert "resume=1" in (tmp_path / "other" / "starts.txt").read_text()


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch):
    """A head without CPUs, so that the driver survives, and two nodes of two CPUs."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("FAKE_STEP", "0.25")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [made.add_node(num_cpus=2) for _ in range(2)]
    made.wait_for_nodes()
    ray = cluster(made.address)
    yield made, nodes
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_the_runs_of_a_lost_node_are_restarted_on_the_other(two_nodes, tmp_path: Path, shared: bool) -> None:
    made, nodes = two_nodes
    out = tmp_path / "out"
    out.mkdir()
    node_dir = tmp_path / "node"
    study = study_of(seeds=3, steps=30)
    executor = RayExecutor(out, address=made.address, shared=shared, node_dir=str(node_dir), trainer=TRAINER)
    assert executor.slots == 4
    started = out / "starts.txt" if shared else node_dir / "starts.txt"
    events: list[str] = []
    killed: list[float] = []

    def kill_one(progress: list[Progress]) -> None:
        if not killed and started.exists() and len(started.read_text().splitlines()) >= 4:
            made.remove_node(nodes[1], allow_graceful=False)
            killed.append(time.monotonic())

    failed = Sweep(study.runs, out, executor, on_event=events.append, on_tick=kill_one).run()
    assert killed
    assert failed == []
    assert any("its node was lost" in line for line in events), events
    assert [state_of(run, out) for run in study.runs] == [State.DONE] * 6
    for run in study.runs:
        steps = [line.split(",")[0] for line in (out / run.name / "log.csv").read_text().splitlines()]
        assert steps == ["step", *map(str, range(1, 31))], run.name
    assert (out / study.runs[0].name / "checkpoints" / "last").exists() == shared


@pytest.mark.slow
def test_fractions_of_a_device_and_a_run_that_fails(two_nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = two_nodes
    study = study_of()
    executor = RayExecutor(tmp_path, address=made.address, jobs=2, node_dir=str(tmp_path / "node"), trainer=("false",))
    assert executor.slots == 8
    failed = Sweep(study.runs, tmp_path, executor).run()
    assert [item.run.name for item in failed] == [run.name for run in study.runs]
    assert failed[0].detail == "exit code 1"


def test_a_cluster_that_does_not_listen_is_told_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(TrainingError, match=f"no Ray cluster at '127.0.0.1:{port}'"):
        cluster(f"127.0.0.1:{port}")
