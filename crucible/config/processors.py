"""How many processors there are for us."""

from __future__ import annotations

import os


def available_processors() -> int:
    """Processors this process may run on: a container or ``taskset`` may leave fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
