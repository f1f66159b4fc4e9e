"""The supervisor: spawns the engine and the http workers, restarts what dies, drains on SIGTERM.

One thread waits for everything: children's reports, their deaths, signals. A child gets one end of a socketpair; its
end of file is how it learns that the supervisor is gone. Children are spawned, never forked, with SIGINT and SIGTERM
blocked from birth: a Ctrl-C reaches the whole terminal group, and only the supervisor decides what it means.
Knows neither models nor HTTP: a child is a ``module:function`` and its arguments.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

from crucible.engine.control import load_object
from crucible.engine.messages import Drain, EngineInfo, Failed, FrameReader, FromChild, Ready, Serving, Starting, frame
from crucible.errors import CrucibleError

BACKOFF_S = (0.1, 10.0)
"""Pause before the first restart of a child and the longest one; it doubles between, and a long life resets it."""

LONG_LIFE_S = 60.0
GIVE_UP_AFTER = 10
"""Deaths of one child in a row, none of them after a long life, that end the service."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO_S = 0.3
"""A signal this soon after the first is the same one: timeout(1) and terminals signal both process and group."""


@dataclass(frozen=True)
class ChildSpec:
    """``target`` is called in the child as target(control_socket, **arguments). ``drains``: it finishes its requests
    when asked to; the others are stopped after these have ended."""

    name: str
    target: str
    arguments: Mapping[str, Any]
    drains: bool


@dataclass(eq=False)
class Child:
    spec: ChildSpec
    process: SpawnProcess
    control: socket.socket
    started: float
    reader: FrameReader = field(default_factory=lambda: FrameReader(FromChild))
    up: bool = False
    failure: str | None = None


def run_child(target: str, control: socket.socket, arguments: Mapping[str, Any]) -> None:
    """The spawned process's first function."""
    load_object(target)(control, **arguments)


class Supervisor:
    """Runs ``children`` until told to stop. ``say`` prints one line for a human (stderr by default).

    ``on_up`` is called once, with what the engine says of itself, when every child first works.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        on_up: Callable[[EngineInfo], None],
        on_drain: Callable[[], None] = lambda: None,
        drain_s: float = 30.0,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self._specs = children
        self._on_up, self._on_drain, self._drain_s, self._say = on_up, on_drain, drain_s, say
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._restarts: list[tuple[float, ChildSpec]] = []
        self._deaths: dict[str, int] = {}
        self._info: EngineInfo | None = None
        self._was_up = False
        self._draining_until: float | None = None
        self._signalled = 0.0
        self._exit_code: int | None = None

    def run(self) -> int:
        """Serve until a signal; the process's exit code: 0 after a drain, 1 when the service could not go on."""
        with self._signals() as wakeup:
            self._selector.register(wakeup, selectors.EVENT_READ, None)
            try:
                for spec in self._specs:
                    self._spawn(spec)
                while self._exit_code is None:
                    for key, _ in self._selector.select(self._timeout()):
                        if key.data is None:
                            self._on_signals(wakeup.recv(64))
                        elif key.data in self._children:
                            self._on_report(key.data)
                    self._tick()
                return self._exit_code
            finally:
                self._stop_all()

    # -- children ------------------------------------------------------------------------------------------------

    def _spawn(self, spec: ChildSpec) -> None:
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=run_child, args=(spec.target, theirs, spec.arguments), name=spec.name, daemon=True
        )
        resource_tracker.ensure_running()  # its start unblocks the signals blocked next
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            theirs.close()
        ours.setblocking(False)
        child = Child(spec, process, ours, time.monotonic())
        self._children.append(child)
        self._selector.register(ours, selectors.EVENT_READ, child)

    def _on_report(self, child: Child) -> None:
        try:
            data = child.control.recv(2**16)
            messages = list(child.reader.feed(data))
        except BlockingIOError:
            return
        except (OSError, CrucibleError):
            data, messages = b"", []
        for message in messages:
            if isinstance(message, Starting):
                if not self._was_up:
                    self._say(message.message)
            elif isinstance(message, Failed):
                child.failure = message.message
            elif isinstance(message, (Ready, Serving)):
                child.up = True
                if isinstance(message, Ready):
                    self._info = message.info
                self._note_up(child)
        if not data:
            self._bury(child)

    def _note_up(self, child: Child) -> None:
        if self._was_up:
            self._say(f"the {child.spec.name} is back")
        elif len(self._children) == len(self._specs) and all(c.up for c in self._children) and self._info is not None:
            self._was_up = True
            self._on_up(self._info)

    def _bury(self, child: Child) -> None:
        """A child's end of the socketpair is closed: it is dead or dying."""
        self._selector.unregister(child.control)
        child.control.close()
        self._children.remove(child)
        child.process.join(timeout=5)
        if child.process.is_alive():
            child.process.kill()
            child.process.join()
        if self._draining_until is not None:
            return
        name, reason = child.spec.name, child.failure or _exit_reason(child.process.exitcode)
        if not self._was_up:
            self._say(f"error: {reason}" if child.failure else f"error: the {name} could not start: {reason}")
            self._exit_code = 1
            return
        if time.monotonic() - child.started > LONG_LIFE_S:
            self._deaths[name] = 0
        deaths = self._deaths[name] = self._deaths.get(name, 0) + 1
        if deaths > GIVE_UP_AFTER:
            self._say(f"error: the {name} died {deaths} times in a row, giving up: {reason}")
            self._exit_code = 1
            return
        pause = min(BACKOFF_S[0] * 2 ** (deaths - 1), BACKOFF_S[1])
        self._say(f"the {name} died ({reason}); restarting it in {pause:g} s")
        self._restarts.append((time.monotonic() + pause, child.spec))

    # -- signals and time ----------------------------------------------------------------------------------------

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in SIGNALS:
                continue
            if self._signalled and time.monotonic() - self._signalled < ECHO_S:
                continue
            if self._draining_until is not None:
                self._say("stopping at once")
                self._exit_code = 128 + number
                return
            self._say("draining: live requests may finish; a second signal stops at once")
            self._signalled = time.monotonic()
            self._draining_until = self._signalled + self._drain_s
            self._restarts.clear()
            self._on_drain()
            for child in self._children:
                if child.spec.drains:
                    with contextlib.suppress(OSError):
                        child.control.send(frame(Drain()))

    def _timeout(self) -> float | None:
        moments = [moment for moment, _ in self._restarts]
        if self._draining_until is not None:
            moments.append(self._draining_until)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _tick(self) -> None:
        now = time.monotonic()
        if self._draining_until is not None:
            if not any(child.spec.drains for child in self._children):
                self._exit_code = 0 if self._exit_code is None else self._exit_code
            elif now >= self._draining_until:
                self._say(f"requests still live after {self._drain_s:g} s are dropped")
                self._exit_code = 0
            return
        due = [spec for moment, spec in self._restarts if moment <= now]
        self._restarts = [entry for entry in self._restarts if entry[0] > now]
        for spec in due:
            self._spawn(spec)

    def _stop_all(self) -> None:
        """Close every line, which ends well-behaved children, then kill the rest."""
        for child in self._children:
            child.control.close()
        deadline = time.monotonic() + 2
        for child in self._children:
            child.process.join(timeout=max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
        self._selector.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """Signals as bytes on a socket, so that nothing happens at a point where it could do harm."""
        wakeup, written = socket.socketpair()
        wakeup.setblocking(False)
        written.setblocking(False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        previous = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        try:
            yield wakeup
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            wakeup.close()
            written.close()


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        hint = ", out of memory?" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    return f"exit code {code}"
