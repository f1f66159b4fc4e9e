"""The worker processes of ``prepare``; with one process the work is done in the caller's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any

from crucible_train.documents import Encoded, EncodeJob, encode_block
from crucible_train.errors import TrainingError
from crucible_train.sources import Block


class EncoderPool:
    """Encodes blocks. ``window``: so many may be on their way at a time, which bounds the memory."""

    def __init__(self, processes: int) -> None:
        self.window = 2 * processes if processes > 1 else 0
        self._executor: ProcessPoolExecutor | None = None
        if processes > 1:
            context = multiprocessing.get_context("spawn")  # the caller may have threads: never fork
            self._executor = ProcessPoolExecutor(processes, context, _begin_worker)

    def submit(self, job: EncodeJob, block: Block) -> Future[Encoded]:
        """A worker's answer to come; its ``result`` raises the TrainingError that the block met with."""
        if self._executor is None:
            done: Future[Encoded] = Future()
            done.set_result(encode_block(job, block))
            return done
        try:
            return self._executor.submit(encode_block, job, block)
        except BrokenProcessPool:
            raise _worker_died() from None

    def result(self, future: Future[Encoded]) -> Encoded:
        """What the worker made of the block."""
        try:
            return future.result()
        except BrokenProcessPool:
            raise _worker_died() from None

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


def _worker_died() -> TrainingError:
    return TrainingError("a worker process ended (out of memory?); the same command goes on, --processes sets how many")


def _begin_worker() -> None:
    """Leaves an interrupt to the main process, and ends with it even when that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
