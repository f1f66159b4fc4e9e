"""How the parts of gpu_run.py run commands, and what they hand back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
Document = dict[str, Any]


class Run(Protocol):
    """run_command, or what tests put in its place."""

    def __call__(
        self,
        command: list[str],
        timeout: int,
        *,
        under: Sequence[str] = (),
        environment: Mapping[str, str] = ...,
    ) -> tuple[int, str]: ...


@dataclass(frozen=True)
class Context:
    """What a part is given. texts, accuracy_models: for ``accuracy`` only; timeout: seconds a command may take."""

    run: Run
    model: str
    timeout: int
    texts: Sequence[str] = ()
    accuracy_models: Sequence[str] = ()


def surroundings(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a command: this one, with our package first, and ``more``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **more}


def run_command(
    command: list[str], timeout: int, *, under: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and output of a Python command, shown as it comes; a code of its own after ``timeout`` seconds.

    under: a program and its options that starts Python itself; environment: variables besides this process's.
    """
    shown = [*(f"{name}={value}" for name, value in (environment or {}).items()), *under, "python", *command]
    print(f"$ {' '.join(shown)}", flush=True)
    lines, late = [], threading.Event()
    with subprocess.Popen(
        [*under, sys.executable, *command], cwd=ROOT, env=surroundings(environment or {}), text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip

        def stop() -> None:
            late.set()
            kill_group(process)

        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                lines.append(line)
        except BaseException:  # Ctrl-C does not reach a session of its own
            kill_group(process)
            raise
        finally:
            timer.cancel()
    if late.is_set():
        return 124, "".join([*lines, f"stopped after {timeout} s\n"])
    return process.returncode, "".join(lines)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that was started in a new session, and what it started: they hold its pipe open, even after it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def result(what: str, code: int, text: str, started: float) -> Document:
    return {"what": what, "result": text, "ok": code == 0, "seconds": round(time.monotonic() - started, 1)}


def attempt(what: str, work: Callable[[], tuple[bool, str]]) -> Document:
    """``work``, which says whether it went well and what it found, as a result; failed if it raises."""
    started = time.monotonic()
    try:
        fine, text = work()
    except Exception as error:  # the others still have something to say
        fine, text = False, f"{type(error).__name__}: {error}"
    return result(what, 0 if fine else 1, text, started)
