"""RayExecutor: each run a Ray task with its share of a GPU, on however many nodes the cluster has (extra cluster).

Every node needs Crucible installed and the prepared data at the same path. Without a shared directory a run trains in
``node_dir`` of its node and comes back to the driver as a tar file when it ends: configuration, log, samples, result
and the best model (not the optimiser's state). A run whose node is lost is started on another one: from its last
checkpoint where the directory is shared, from the start otherwise. What failed stays on its node, so a retry there
resumes.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crucible_train.errors import TrainingError
from crucible_train.executor import LOGS, TRAINER, Ended, check_jobs, dies_with_parent, take_lock, train_command, why
from crucible_train.study_design import PlannedRun
from crucible_train.study_runs import State, state_of

STAYS = "trainer.pt"
"""The optimiser's state: of no use to the driver, and twice the size of the model."""
CHECKPOINTS, BEST = "checkpoints", "best"


@dataclass(frozen=True)
class Returned:
    """What a task sends back: how the process ended and, without a shared directory, its files."""

    code: int
    detail: str
    files: bytes | None
    log: bytes
    seconds: float


def cluster(address: str) -> Any:
    """The ray module, connected to ``address``. Raises TrainingError when it is not installed or no cluster answers."""
    try:
        import ray
    except ImportError:
        raise TrainingError("--executor ray needs Ray: pip install 'crucible-lm[cluster]'") from None
    if not ray.is_initialized():
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TrainingError(f"no Ray cluster at {address!r} ({first}); start one with: ray start --head") from None
    return ray


def _knock(address: str) -> None:
    """OSError unless something listens at an ``address`` of the form host:port: Ray itself tries for many minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()


class RayExecutor:
    """Gives every run to Ray at once, which starts it when its share of a device is free.

    ``jobs``: runs at once on each GPU (a share of 1/jobs). ``cpus``: CPUs a run, by default 1, and on a cluster
    without GPUs a 1/jobs share of a CPU. ``shared``: ``directory`` is one that all nodes see.
    """

    def __init__(
        self,
        directory: Path,
        *,
        address: str = "auto",
        jobs: int = 1,
        shared: bool = False,
        node_dir: str | None = None,
        cpus: float | None = None,
        trainer: Sequence[str] = TRAINER,
    ) -> None:
        check_jobs(jobs)
        self._open = ExitStack()
        self._open.enter_context(take_lock(directory))
        self._ray = cluster(address)
        self._directory = directory.resolve()
        self._shared = shared
        # The study's own name keeps two studies apart on one node.
        self._node_dir = node_dir or f"{tempfile.gettempdir()}/crucible-{os.getuid()}{self._directory}"
        self._trainer = tuple(trainer)
        resources: Mapping[str, float] = self._ray.cluster_resources()
        gpus = resources.get("GPU", 0.0)
        self._share = {"num_gpus": 1 / jobs, "num_cpus": cpus or 1} if gpus else {"num_cpus": cpus or 1 / jobs}
        per_cpu = resources.get("CPU", 1.0) / self._share["num_cpus"]
        self.slots = max(1, int(min(gpus * jobs, per_cpu) if gpus else per_cpu))
        # A lost node shows as an error here and is counted there: Ray's own retries would hide it.
        self._task = self._ray.remote(max_retries=0, **self._share)(train_on_node)
        self._running: dict[Any, PlannedRun] = {}

    def room(self) -> bool:
        return True

    def start(self, run: PlannedRun, resume: bool) -> str:
        where = self._directory if self._shared else Path(self._node_dir)
        # Ray starts tasks in the order of their submission; a shared run's state is known, another's the node looks up.
        known = resume if self._shared else None
        reference = self._task.remote(run, str(where), known, self._trainer)
        self._running[reference] = run
        return "ray"

    def wait(self, seconds: float) -> list[Ended]:
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds, fetch_local=True)
        return [self._ended(reference) for reference in ready]

    def _ended(self, reference: Any) -> Ended:
        run = self._running.pop(reference)
        errors = self._ray.exceptions
        try:
            returned: Returned = self._ray.get(reference)
        except errors.RayTaskError as error:  # the task itself failed: no disk, no trainer
            return Ended(run.name, 1, str(error.cause if hasattr(error, "cause") else error).splitlines()[-1])
        except errors.RayError as error:  # the worker or node is gone
            return Ended(run.name, 1, type(error).__name__, lost=True)
        log = self._directory / LOGS / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            file.write(returned.log)
        if returned.files is not None:
            unpack(returned.files, self._directory / run.name)
        return Ended(run.name, returned.code, returned.detail, seconds=returned.seconds)

    def stop(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True, recursive=True)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=30.0)
        self._running.clear()
        self._open.close()


def train_on_node(run: PlannedRun, directory: str, resume: bool | None, trainer: Sequence[str]) -> Returned:
    """The body of the task: trains ``run`` under ``directory`` of this node in a process of its own.

    ``resume`` None: the directory is this node's alone, so its state is looked up here and its files are sent back.
    """
    place = Path(directory) / run.name
    place.parent.mkdir(parents=True, exist_ok=True)
    send = resume is None
    if resume is None:
        state = state_of(run, Path(directory))
        if state is State.STALE:
            shutil.rmtree(place)  # what an earlier sweep trained here went to its driver
        resume = state is State.HALF
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "output"
        with log.open("wb") as output:
            # Ray has set CUDA_VISIBLE_DEVICES to this task's GPU; the process dies with the task's worker.
            process = subprocess.Popen(
                train_command(run, place, resume, trainer),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                preexec_fn=dies_with_parent(),
            )
            code = process.wait()
        detail = "" if code == 0 else why(code, log)
        done = state_of(run, Path(directory)) is State.DONE
        return Returned(
            code, detail, pack(place) if send and done else None, log.read_bytes(), time.monotonic() - began
        )


def pack(place: Path) -> bytes:
    """The run directory ``place`` as a tar file: of its checkpoints only the best, and no optimiser's state."""
    best = place / CHECKPOINTS / BEST
    kept = {BEST, os.readlink(best)} if best.is_symlink() else {BEST}

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(member.name).parts
        other = len(parts) > 1 and parts[0] == CHECKPOINTS and parts[1] not in kept
        return None if other or parts[-1:] == (STAYS,) else member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(place, arcname=".", filter=wanted)
    return buffer.getvalue()


def unpack(data: bytes, place: Path) -> None:
    """Puts a packed run directory at ``place``, whole or not at all; what was there is replaced."""
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(partial, filter="data")
    shutil.rmtree(place, ignore_errors=True)
    os.replace(partial, place)
