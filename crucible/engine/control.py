"""The line between a supervisor and one of its children: a socketpair whose end of file is the other's death."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from crucible.engine.messages import Drain, Starting, ToChild, frame, receive
from crucible.errors import CrucibleError


class Control:
    """A child's end. ``report`` may be called from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def report(self, message: msgspec.Struct) -> None:
        """Tell the supervisor; silently nothing when it is gone (the watcher ends this process)."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(frame(message))

    def progress(self, message: str) -> None:
        self.report(Starting(message))

    def watch(self, on_drain: Callable[[], None] | None = None, on_orphaned: Callable[[], None] | None = None) -> None:
        """Start the thread that calls ``on_drain`` when asked, and ends this process when the supervisor is gone."""

        def loop() -> None:
            with contextlib.suppress(CrucibleError):
                for message in receive(self._connection, ToChild):
                    if isinstance(message, Drain) and on_drain is not None:
                        on_drain()
            try:
                if on_orphaned is not None:
                    on_orphaned()
            finally:
                # Not sys.exit: another thread may be inside a kernel or a wait that only the supervisor would end.
                os._exit(0)

        threading.Thread(target=loop, name="control", daemon=True).start()


def load_object(path: str) -> Any:
    """The object that ``package.module:name`` names (how spawned children are told what to run)."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
