"""How many processors there are for us, and how kernel threads wait for work."""

from __future__ import annotations

import os


def available_processors() -> int:
    """Processors this process may run on: a container or ``taskset`` may leave fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spin_briefly() -> None:
    """Has OpenMP threads that libgomp starts later sleep soon when they idle, unless the user said how they wait.

    By default they spin for milliseconds: when other programs need the processors, every kernel then waits for a
    thread that is not running (docs/decisions/0006). libgomp reads the environment when it is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
