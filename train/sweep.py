"""The sweep: starts the runs of a study that are not done, retries what fails once, and goes on past failures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from crucible_train.executor import Ended, Executor
from crucible_train.study_design import PlannedRun
from crucible_train.study_runs import State, set_aside, state_of

RETRIES = 1
LOSSES = 20
"""Times that a run may lose its machine before it counts as failed."""
TICK = 1.0


@dataclass
class Progress:
    """A run's way through the sweep, for the status table. ``phase``: waiting, running, done, skipped, failed."""

    run: PlannedRun
    phase: str = "waiting"
    where: str = ""
    detail: str = ""
    failures: int = 0
    losses: int = 0
    started: float = 0.0
    seconds: float = 0.0


@dataclass
class Sweep:
    """Runs ``runs`` of the study at ``directory`` through ``executor``.

    ``on_event(line)`` hears what happens to runs; ``on_tick(progress)`` is called about once a second.
    """

    runs: Iterable[PlannedRun]
    directory: Path
    executor: Executor
    on_event: Callable[[str], None] = lambda line: None
    on_tick: Callable[[list[Progress]], None] = lambda progress: None
    progress: list[Progress] = field(default_factory=list)

    def run(self) -> list[Progress]:
        """Sweeps to the end and returns the runs that failed. An interrupt lets the runs save, then is raised again."""
        self.progress = [Progress(run) for run in self.runs]
        waiting = deque(item for item in self.progress if not self._skipped(item))
        running: dict[str, Progress] = {}
        try:
            while waiting or running:
                while waiting and self.executor.room():
                    item = waiting.popleft()
                    self._start(item)
                    running[item.run.name] = item
                self.on_tick(self.progress)
                for ended in self.executor.wait(TICK):
                    item = running.pop(ended.name)
                    if not self._finished(item, ended):
                        waiting.append(item)
            self.on_tick(self.progress)
        finally:
            self.executor.stop()
        return [item for item in self.progress if item.phase == "failed"]

    def _skipped(self, item: Progress) -> bool:
        if state_of(item.run, self.directory) is not State.DONE:
            return False
        item.phase = "skipped"
        self.on_event(f"{item.run.name}: finished before, skipped")
        return True

    def _start(self, item: Progress) -> None:
        state = state_of(item.run, self.directory)
        if state is State.STALE:
            aside = set_aside(self.directory / item.run.name)
            self.on_event(f"{item.run.name}: what is there has other settings; kept as {aside.name}")
        item.where = self.executor.start(item.run, state is State.HALF)
        item.phase, item.started = "running", time.monotonic()
        self.on_event(f"{item.run.name}: {'continued' if state is State.HALF else 'started'} on {item.where}")

    def _finished(self, item: Progress, ended: Ended) -> bool:
        """Records how an attempt ended; False when the run is to be started again."""
        name, item.seconds = item.run.name, ended.seconds
        fault = ended.detail or f"exit code {ended.code}"
        state = state_of(item.run, self.directory)
        if state is State.DONE:  # with an error code, too: a loss that blew up is a result of the study
            item.phase = "done"
            note = f" ({fault})" if ended.code else ""
            self.on_event(f"{name}: done in {item.seconds:.0f} s{note}")
            return True
        if ended.code == 0 and not ended.lost:
            fault = f"ended without error but its directory is {state.value}"
        item.detail, item.phase = fault, "waiting"
        item.losses += ended.lost
        item.failures += not ended.lost
        if item.failures > RETRIES or item.losses > LOSSES:
            item.phase = "failed"
            self.on_event(f"{name}: failed again, given up ({fault})")
            return True
        self.on_event(f"{name}: {'its node was lost' if ended.lost else 'failed'} ({fault}); started again")
        return False
