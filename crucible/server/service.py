"""One service: a listening socket, an engine and its http workers under a supervisor."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crucible.config import EngineConfig
from crucible.engine.messages import EngineInfo
from crucible.engine.supervisor import ChildSpec, Supervisor
from crucible.errors import ConfigError

CHECKPOINT_CORE = "crucible.engine.process:core_from_checkpoint"
CHECKPOINT_TEXT = "crucible.server.text:CheckpointText"

MAX_SOCKET_PATH = 107
"""Bytes an AF_UNIX path may have (sun_path holds 108 with its terminator)."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """What to serve and where. The factories are ``module:name`` paths: tests put a fake core and text there."""

    model_path: str
    model_id: str
    config: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8080
    http_workers: int = 1
    drain_s: float = 30.0
    stalled_s: float = 60.0
    core_factory: str = CHECKPOINT_CORE
    core_arguments: Mapping[str, Any] = field(default_factory=dict)
    text_factory: str = CHECKPOINT_TEXT

    def run(self, say: Callable[[str], None], announce: Callable[[str], None]) -> int:
        """Serve until a signal; the exit code. ``announce`` gets the one line that says where, once all is ready.

        Raises ConfigError when the address cannot be bound.
        """
        with contextlib.closing(bind(self.host, self.port)) as http, engine_socket() as engine:
            address = url(http)

            def on_up(info: EngineInfo) -> None:
                announce(f"Crucible is listening on {address} (model {self.model_id}, {info.quant} on {info.device})")

            children = [ChildSpec("engine", "crucible.engine.process:run_engine", self._engine(engine), drains=False)]
            for number in range(self.http_workers):
                name = "http worker" if self.http_workers == 1 else f"http worker {number}"
                worker = self._worker(http, engine.getsockname())
                children.append(ChildSpec(name, "crucible.server.worker:run_worker", worker, drains=True))
            return Supervisor(children, on_up=on_up, on_drain=http.close, drain_s=self.drain_s, say=say).run()

    def _engine(self, listener: socket.socket) -> dict[str, Any]:
        arguments = self.core_arguments
        if self.core_factory == CHECKPOINT_CORE:
            arguments = {"path": self.model_path, "config": asdict(self.config)}
        return {"listener": listener, "factory": self.core_factory, "arguments": arguments}

    def _worker(self, listener: socket.socket, engine_path: str) -> dict[str, Any]:
        return {
            "listener": listener,
            "engine_path": engine_path,
            "model_path": self.model_path,
            "model_id": self.model_id,
            "streams": self.config.max_batch + self.config.max_queue,
            "stalled_s": self.stalled_s,
            "text_factory": self.text_factory,
        }


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ConfigError naming the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}: {getattr(error, 'strerror', None) or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a restart waits for old connections
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        hint = "; choose another with --port" if port else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}{hint}") from None
    return listener


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


@contextlib.contextmanager
def engine_socket() -> Iterator[socket.socket]:
    """A listening AF_UNIX socket in a directory only this user can enter, removed at the end."""
    parent: str | None = None
    if len(os.fsencode(tempfile.gettempdir())) > MAX_SOCKET_PATH - 32:
        parent = "/tmp"
    directory = tempfile.mkdtemp(prefix="crucible-", dir=parent)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(Path(directory) / "engine"))
            listener.listen(128)
            yield listener
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def print_line(line: str) -> None:
    """``line`` on stderr as this command's."""
    print(f"crucible-serve: {line}", file=sys.stderr, flush=True)
