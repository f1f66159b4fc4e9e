"""A core factory of a real engine whose next step fails once a file appears."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from crucible.config import EngineConfig
from crucible.engine.core import EngineCore


def make_core(progress: Callable[[str], None], *, path: str, trigger: str, **settings: Any) -> EngineCore:
    """On a GPU a kernel then reads what is no address; elsewhere the step raises. The file is removed before."""
    core = EngineCore.from_checkpoint(path, EngineConfig(**settings), progress)
    runner: Any = core.runner
    launch = runner.launch

    def faulty(plan: Any) -> None:
        if os.path.exists(trigger):
            os.remove(trigger)
            if settings["device"] != "cuda":
                raise RuntimeError("planted")
            read_nowhere(runner.device)
        launch(plan)

    runner.launch = faulty
    return core


def read_nowhere(device: Any) -> None:
    """Queues a norm of a row that lies 2^50 bytes behind the array."""
    x, weight, out = device.zeros((1, 64), np.float32), device.zeros(64, np.float32), device.zeros((1, 64), np.float16)
    rows = device.upload(np.array([2**20], np.int32))
    device.launch("crucible_rmsnorm_f16", (1,), x, 2**28, rows, weight, None, 1e-5, 64, out, 64)
