"""kill -9 at random moments, again and again: the run still ends with the bits of one that nothing disturbed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from crucible_train.run_config import RunConfig
from tests.train.small_run import flags, losses, make_data, optimizer_state, run_config, weights

KILLS = 20


def start(config: RunConfig) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "crucible_train.cli", "train", *flags(config), "--resume"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_twenty_times(tmp_path: Path) -> None:
    data = make_data(tmp_path / "text")
    settings = {"steps": 1500, "save_every": 3, "eval_every": 10}
    whole, out = run_config(data, tmp_path / "whole", **settings), run_config(data, tmp_path / "killed", **settings)
    assert start(whole).wait() == 0
    draw, seen = random.Random(5), 0
    for number in range(KILLS):
        process, before = start(out), size(tmp_path / "killed" / "log.csv")
        if number % 4 == 0:  # while it starts
            time.sleep(draw.uniform(0, 3))
        else:  # while it trains, evaluates and saves
            while size(tmp_path / "killed" / "log.csv") == before and process.poll() is None:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.7))
        assert process.poll() is None, "it ended before it could be killed"
        process.kill()
        process.wait()
        steps = losses_so_far(tmp_path / "killed" / "log.csv")
        assert steps >= seen - 3, "it went back beyond the last checkpoint"
        seen = steps
    assert start(out).wait() == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for which in ("last", "best"):
        assert weights(tmp_path / "killed", which) == weights(tmp_path / "whole", which)
    ours, theirs = optimizer_state(tmp_path / "killed"), optimizer_state(tmp_path / "whole")
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    kept = {entry.name for entry in (tmp_path / "killed" / "checkpoints").iterdir()}
    assert kept == {entry.name for entry in (tmp_path / "whole" / "checkpoints").iterdir()}


def losses_so_far(log: Path) -> int:
    """The last step of a log that may end in a torn line."""
    lines = log.read_text().split("\n")[1:-1] if log.exists() else []
    return int(lines[-1].split(",")[0]) if lines else 0
