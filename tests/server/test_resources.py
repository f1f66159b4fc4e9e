"""What serving a real model costs: time until it answers, and memory. The numbers are printed (pytest -s)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"


@contextmanager
def service(cache: Path | None = None) -> Iterator[tuple[int, str, float]]:
    """(pid of the supervisor, its URL, seconds until it said that it listens)."""
    from crucible.models import resolve

    environment = dict(os.environ)
    if cache is not None:
        environment["CRUCIBLE_CACHE"] = str(cache)
    command = [sys.executable, "-m", "crucible.server.cli", str(resolve(MODEL)), "--port", "0"]
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://[\d.:]+", line):
                yield process.pid, found.group(), time.monotonic() - started
                return
        raise AssertionError("the service ended before it listened")
    finally:
        process.terminate()
        process.wait(timeout=60)


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


def pss_mb(pid: int) -> float:
    """Proportional set size of one process in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE).group(1)) / 1000  # type: ignore[union-attr]


def post(url: str, **body: object) -> dict[str, object]:
    request = urllib.request.Request(
        f"{url}/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.load(answer))


def test_ready_within_a_minute_the_first_time_and_five_seconds_later(tmp_path: Path) -> None:
    with service(tmp_path / "empty") as (_, url, cold):
        assert post(url, prompt="Hello", max_tokens=1)
    with service(tmp_path / "empty") as (_, _, warm):
        pass
    print(f"\nready after {cold:.1f} s with an empty kernel cache, {warm:.1f} s with a filled one")
    assert cold < 60
    assert warm < 5


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")
def test_memory_with_a_request_of_512_tokens_stays_below_700_mb() -> None:
    with service() as (pid, url, _):
        post(url, prompt=[504] * 496, max_tokens=16, ignore_eos=True)
        parts = {member: pss_mb(member) for member in family(pid)}
    print(f"\nsummed PSS {sum(parts.values()):.0f} MB: {', '.join(f'{size:.0f}' for size in parts.values())}")
    assert sum(parts.values()) < 700
