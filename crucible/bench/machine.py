"""The machine and the source a number came from. Reads files and asks git and nvidia-smi; changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from crucible.config.processors import available_processors

GPU_FIELDS = ("name", "driver_version", "power.limit", "power.draw", "clocks.sm", "clocks.max.sm", "memory.total")
GPU_LABELS = ("name", "driver", "power_limit_w", "power_draw_w", "sm_clock_mhz", "max_sm_clock_mhz", "memory_mib")
PACKAGE = Path(__file__).resolve().parent.parent


def describe_cpu() -> dict[str, str | int | float]:
    """CPU model, cores (physical), threads (logical), those this process may use, memory in GiB, load of a minute."""
    cpuinfo = read("/proc/cpuinfo")
    fields = [tuple(part.strip() for part in line.split(":", 1)) for line in cpuinfo.splitlines() if ":" in line]
    models = [field[1] for field in fields if field[0] == "model name"]
    packages = [field[1] for field in fields if field[0] == "physical id"]
    cores = [field[1] for field in fields if field[0] == "core id"]
    threads = os.cpu_count() or 1
    found: dict[str, str | int | float] = {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(set(zip(packages, cores, strict=False))) or threads,
        "threads": threads,
        "usable_threads": available_processors(),
    }
    for line in read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            found["memory_gib"] = round(int(line.split()[1]) / 2**20, 1)
    if hasattr(os, "getloadavg"):
        found["load_average"] = round(os.getloadavg()[0], 2)
    found["system"] = f"{platform.system()} {platform.release()}"
    found["python"] = platform.python_version()
    return found


def describe_gpus() -> list[dict[str, str | float]]:
    """Each NVIDIA GPU with its power limit and clocks as they are now; empty where there is none."""
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    answer = ask("nvidia-smi", query, "--format=csv,noheader,nounits")
    return [] if answer is None else parse_gpus(answer)


def parse_gpus(answer: str) -> list[dict[str, str | float]]:
    """The rows of nvidia-smi's CSV; what a GPU does not tell ("[N/A]") is left out."""
    gpus = []
    for line in answer.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(GPU_LABELS):
            continue
        gpu: dict[str, str | float] = {}
        for label, value in zip(GPU_LABELS, values, strict=True):
            if value.startswith("["):
                continue
            gpu[label] = value if label in ("name", "driver") else float(value)
        gpus.append(gpu)
    return gpus


def commit() -> str | None:
    """The commit of the package's source, "+ changes" when files differ; ``None`` where git does not track it."""
    # Installed in an environment that lies in someone's repository, the package is not that repository's source.
    if ask("git", "-C", str(PACKAGE), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = ask("git", "-C", str(PACKAGE), "rev-parse", "HEAD")
    if head is None:
        return None
    changes = ask("git", "--no-optional-locks", "-C", str(PACKAGE), "status", "--porcelain", "-uno")
    return head.strip() + (" + changes" if changes and changes.strip() else "")


def ask(*command: str) -> str | None:
    """What a program prints, or ``None`` when it is not there, fails or takes long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def read(path: str) -> str:
    """A file's text; empty where there is no such file (other systems)."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
