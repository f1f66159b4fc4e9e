"""An EngineProcess in threads of the test's own process, over a fake core."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crucible.engine.client import EngineClient
from crucible.engine.process import EngineProcess
from crucible.errors import EngineError
from tests.fakes import FakeCore


class LocalEngine:
    """``path``: where it listens; ``core``: the fake; ``failure``: what ended the step loop."""

    def __init__(self, directory: str, **settings: Any) -> None:
        self.path = str(Path(directory) / "engine")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        listener.listen(16)
        self.core = FakeCore(**settings)
        self.process = EngineProcess(listener)
        self.process.start()
        self.failure: EngineError | None = None
        self.loop = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.process.run(self.core)
        except EngineError as error:
            self.failure = error


@contextlib.contextmanager
def engine(*, start: bool = True, **settings: Any) -> Iterator[tuple[LocalEngine, EngineClient]]:
    """A running engine and a client of it; with ``start=False`` it still loads."""
    with tempfile.TemporaryDirectory() as directory:
        local = LocalEngine(directory, **settings)
        client = EngineClient(local.path)
        try:
            if start:
                local.loop.start()
                assert client.wait_ready(5)
            yield local, client
        finally:
            client.close()
