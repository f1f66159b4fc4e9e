"""LocalExecutor: training processes on this machine's GPUs, or on its CPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from crucible_train.executor import LOGS, TRAINER, Ended, check_jobs, dies_with_parent, take_lock, train_command, why
from crucible_train.study_design import PlannedRun

CPU = ""
POLL = 0.05
PATIENCE = 120.0
"""Seconds that a run gets to save its state after an interrupt."""


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    gpu: str
    log: Path
    began: float


class LocalExecutor:
    """At most ``jobs`` processes at once on each of ``gpus`` (ids for CUDA_VISIBLE_DEVICES; none: the CPU is the one).

    Takes the lock of the study at ``directory``, which every child holds too: two sweeps, or a sweep and what an
    earlier one left running, never write the same run. Raises TrainingError when it is taken.
    """

    def __init__(
        self, directory: Path, gpus: Sequence[str] = (), jobs: int = 1, trainer: Sequence[str] = TRAINER
    ) -> None:
        check_jobs(jobs)
        self._directory = directory
        self._trainer = tuple(trainer)
        self._slots = dict.fromkeys(gpus or (CPU,), jobs)
        self._children: dict[str, _Child] = {}
        self._open = ExitStack()
        self._lock = self._open.enter_context(take_lock(directory))

    def room(self) -> bool:
        return any(self._slots.values())

    def start(self, run: PlannedRun, resume: bool) -> str:
        gpu = max(self._slots, key=lambda name: self._slots[name])
        log = self._directory / LOGS / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                train_command(run, self._directory / run.name, resume, self._trainer),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which passes it on once
                pass_fds=(self._lock,),
                preexec_fn=dies_with_parent(),
            )
        self._slots[gpu] -= 1
        self._children[run.name] = _Child(process, gpu, log, time.monotonic())
        return f"gpu {gpu}" if gpu else "cpu"

    def wait(self, seconds: float) -> list[Ended]:
        end = time.monotonic() + seconds
        while not (ended := self._reap()) and time.monotonic() < end:
            time.sleep(POLL)
        return ended

    def _reap(self) -> list[Ended]:
        over = [name for name, child in self._children.items() if child.process.poll() is not None]
        ended = []
        for name in over:
            child = self._children.pop(name)
            self._slots[child.gpu] += 1
            code = child.process.returncode
            seconds = time.monotonic() - child.began
            ended.append(Ended(name, code, "" if code == 0 else why(code, child.log), seconds=seconds))
        return ended

    def stop(self) -> None:
        for number, patience in ((signal.SIGINT, PATIENCE), (signal.SIGKILL, 10.0)):
            for child in self._children.values():
                child.process.send_signal(number)
            end = time.monotonic() + patience
            while self._children and time.monotonic() < end:
                self._reap()
                time.sleep(POLL)
        self._open.close()


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use: CUDA_VISIBLE_DEVICES, else what nvidia-smi lists, else none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = [name.strip() for name in visible.split(",")]
        return [name for name in ids if name and name != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed.stdout.split() if listed.returncode == 0 else []
