"""Several processes train what one would, started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from crucible.checkpoint import open_checkpoint
from crucible_train.distributed import Workers, workers
from crucible_train.errors import TrainingError
from crucible_train.run_config import RunConfig
from tests.train.small_run import flags, losses, make_data, optimizer_state, run_config, weights

CPU_AND_GPU = [
    pytest.param("cpu", id="gloo"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="nccl"),
]


def launch(config: RunConfig, processes: int, *words: str) -> str:
    """Runs the command line under torchrun and returns its messages."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "crucible_train.cli", "train", *flags(config), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


def same_curve(ours: Path, theirs: Path) -> None:
    assert losses(ours).keys() == losses(theirs).keys()
    for step, loss in losses(theirs).items():
        assert float(losses(ours)[step]) == pytest.approx(float(loss), abs=2e-4), step


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("text") / "small")


@pytest.fixture(params=CPU_AND_GPU)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return str(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_equal_one(data: Path, tmp_path: Path, device: str, optimizer: str) -> None:
    launch(run_config(data, tmp_path / "one", batch=4, grad_accum=2, device=device, optimizer=optimizer), 1)
    shared = {"batch": 2, "grad_accum": 2, "device": device, "optimizer": optimizer}
    launch(run_config(data, tmp_path / "ddp", **shared), 2)
    launch(run_config(data, tmp_path / "zero", zero1=True, **shared), 2)
    same_curve(tmp_path / "ddp", tmp_path / "one")
    same_curve(tmp_path / "zero", tmp_path / "one")
    with open_checkpoint(tmp_path / "zero" / "checkpoints" / "last" / "model") as checkpoint:
        assert not any("module" in name for name in checkpoint.names())


@pytest.mark.slow
def test_sharded_state_is_the_whole_state(data: Path, tmp_path: Path, device: str) -> None:
    """ZeRO-1 changes where the state is kept, so a sharded run goes on unsharded, and the other way round."""
    plain = run_config(data, tmp_path / "plain", batch=2, device=device)
    launch(plain, 2)
    for name, first, then in (("on", True, False), ("off", False, True)):
        paused = {"batch": 2, "device": device, "schedule_steps": 12}
        launch(run_config(data, tmp_path / name, steps=5, zero1=first, **paused), 2)
        launch(run_config(data, tmp_path / name, zero1=then, **paused), 2, "--resume")
        ours, theirs = optimizer_state(tmp_path / name), optimizer_state(tmp_path / "plain")
        assert ours.keys() == theirs.keys()
        if device == "cpu":
            assert losses(tmp_path / name) == losses(tmp_path / "plain")
            assert weights(tmp_path / name) == weights(tmp_path / "plain")
            assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
        else:
            same_curve(tmp_path / name, tmp_path / "plain")


@pytest.mark.slow
def test_what_rank_0_refuses_ends_every_process(data: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(AssertionError, match="already holds files"):
        launch(run_config(data, tmp_path / "taken"), 2)


def test_processes_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(TrainingError, match=r"cannot meet .* torchrun"), workers("cpu"):
        pass
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(TrainingError, match="RANK 2 must be below WORLD_SIZE 2"), workers("cpu"):
        pass


def test_a_full_disk_on_the_first_process_is_told_to_all() -> None:
    def work() -> None:
        raise OSError(28, "No space left on device", "file")

    with pytest.raises(TrainingError, match="file: No space left on device"):
        Workers(0, 1, torch.device("cpu")).agree(work)
