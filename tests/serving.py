"""A whole service (supervisor, engine, http workers) in a subprocess, over the fakes or a real checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from crucible.config import EngineConfig

ROOT = Path(__file__).parent.parent


def main(settings: dict[str, Any]) -> int:
    """Runs in the subprocess."""
    from crucible.server.service import Service, print_line

    core = settings.pop("core", {})
    batch = {name: core[name] for name in ("max_batch", "max_queue") if name in core}
    service = Service(
        model_path=settings.pop("model_path", ""),
        model_id="fake",
        config=EngineConfig(**{"max_batch": 2, "max_queue": 2, **batch}),
        port=settings.pop("port", 0),
        core_factory=settings.pop("core_factory", "tests.fakes:make_core"),
        core_arguments=core,
        text_factory="tests.fakes:FakeText",
        **settings,
    )
    return service.run(say=print_line, announce=lambda line: print(line, flush=True))


class Running:
    """A started service. ``errors`` grows with what it prints on stderr."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.errors: list[str] = []
        self.url = ""
        assert self.process.stderr is not None
        self._pump = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._pump.start()

    def _read(self, pipe: Any) -> None:
        for line in pipe:
            self.errors.append(line.rstrip("\n"))

    def wait_up(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "listening on http://" in line, (line, self.errors)
        self.url = line.split("listening on ")[1].split(" ")[0]
        self.http = httpx.Client(base_url=self.url, timeout=20, verify=False, trust_env=False)

    def wait_exit(self, timeout: float = 15) -> int:
        code = self.process.wait(timeout)
        self._pump.join(5)
        return code

    def stop(self) -> None:
        if self.url:
            self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.4)
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                self._pump.join(5)
                pipe.close()

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def children(self) -> list[int]:
        """Process ids of the engine and the workers (not of multiprocessing's resource tracker)."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def post(self, path: str = "/v1/generate", **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = self.get("/metrics").json()
        return values

    def raw(self, data: bytes, timeout: float = 5.0) -> bytes:
        """Send bytes, read to the end of file or ``timeout``."""
        with socket.create_connection(self.address, timeout=timeout) as connection:
            connection.sendall(data)
            received = b""
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                while chunk := connection.recv(65536):
                    received += chunk
            return received

    def open_post(self, path: str, **body: Any) -> socket.socket:
        """A connection on which a request has been sent and nothing was read."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(self.address, timeout=10)
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection


@contextlib.contextmanager
def serving(*, wait: bool = True, **settings: Any) -> Iterator[Running]:
    """A service that is stopped at the end. ``core``: arguments of the fake core; the rest: fields of Service."""
    running = Running("tests.serving", json.dumps(settings))
    try:
        if wait:
            running.wait_up()
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def serving_model(path: Path, *flags: str) -> Iterator[Running]:
    """The shipped command over a real checkpoint."""
    running = Running("crucible.server.cli", str(path), "--port", "0", *flags)
    try:
        running.wait_up()
        yield running
    finally:
        running.stop()


def eventually(check: Callable[[], Any], timeout: float = 5.0) -> None:
    """Wait until ``check`` is true."""
    end = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < end, "condition not reached in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each server-sent event; comments are skipped."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(json.loads(sys.argv[1])))
