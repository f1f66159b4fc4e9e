"""What a sweep needs of whatever runs its training processes, and what the two kinds share."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from crucible_train.errors import TrainingError
from crucible_train.files import locked
from crucible_train.study_design import PlannedRun

TRAINER = (sys.executable, "-m", "crucible_train.cli", "train")
LOGS = "logs"
TAIL_BYTES = 8192
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Ended:
    """A process that is over, ``seconds`` after it began. ``lost``: its machine went away, no fault of the run."""

    name: str
    code: int
    detail: str = ""
    lost: bool = False
    seconds: float = 0.0


class Executor(Protocol):
    """Runs training processes, each on its share of a device."""

    def room(self) -> bool:
        """Whether another run can be started now."""

    def start(self, run: PlannedRun, resume: bool) -> str:
        """Starts ``run`` (continues it where ``resume``) and says where, in a word or two."""

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that ended, after ``seconds`` at most."""

    def stop(self) -> None:
        """Lets every run save and end; returns when none is left."""


def train_command(run: PlannedRun, out: Path, resume: bool, trainer: Sequence[str] = TRAINER) -> list[str]:
    """The command line that trains ``run`` into the directory ``out``."""
    command = [*trainer, "--out", str(out)]
    for name, value in run.settings.items():
        command += [f"--{name.replace('_', '-')}", *_words(value)]
    return [*command, "--resume"] if resume else command


def _words(value: Any) -> list[str]:
    if isinstance(value, bool):
        return [str(int(value))]
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    return [str(value)]


def log_tail(path: Path) -> str:
    """The last line of text that a run's process printed: with an error, its one line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def why(code: int, log: Path) -> str:
    """How a process ended, in words, with the last line of its output."""
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    tail = log_tail(log)
    return f"{ended}: {tail}" if tail else ended


def dies_with_parent() -> Callable[[], None] | None:
    """For Popen's ``preexec_fn``: the child is killed when its parent dies. None where the system has no such thing.

    A sweep killed with kill -9, or a lost node's worker, must not leave a process behind that goes on writing to a
    run directory.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: nothing may be imported after the fork
    return lambda: prctl(DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0) and None


def take_lock(directory: Path) -> AbstractContextManager[int]:
    """The lock of the study at ``directory``. Raises TrainingError, when entered, if it is taken."""
    return locked(directory, "another sweep is at work there; wait for it or end it")


def check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise TrainingError(f"--jobs must be at least 1, got {jobs}")
