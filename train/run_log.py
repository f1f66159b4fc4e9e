"""RunLog: ``log.csv`` of a run, a line a step."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from crucible_train.errors import TrainingError
from crucible_train.files import write_atomically

COLUMNS = (
    "step", "loss", "lr", "ms", "tokens", "tokens_per_second", "mfu", "mfu_datasheet", "memory_gb", "power_limit_w",
    "clock_mhz", "grad_norm", "val_loss", "val_bits_per_byte",
)  # fmt: skip
"""``tokens``: trained on so far. ``mfu``: share of the measured matmul peak; ``mfu_datasheet``: of the data sheet's.
``memory_gb``: peak device memory in 10^9 bytes. Cells without a value are empty."""


class RunLog:
    """Appends rows to ``path``, after the one of ``step``: that of the checkpoint from which the run goes on.

    Later rows, which an interrupted run got to, go when the first new one comes. A row is one write, so a killed run
    leaves at most one broken line at the end. Raises TrainingError when rows up to ``step`` are missing.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        self._path, self._step = path, step
        self._file: TextIO | None = None
        _rows_until(path, step)

    def append(self, row: Mapping[str, float | int | None]) -> None:
        """Writes one step; floats in their shortest exact form. Unknown columns are an error."""
        unknown = row.keys() - set(COLUMNS)
        if unknown:
            raise ValueError(f"unknown columns {sorted(unknown)}")
        if self._file is None:
            cut_log(self._path, self._step)
            self._file = self._path.open("a", encoding="utf-8", newline="")
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([_cell(row.get(name)) for name in COLUMNS])
        self._file.write(line.getvalue())
        self._file.flush()

    def sync(self) -> None:
        """Everything written so far survives a power cut."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _cell(value: float | int | None) -> str:
    return "" if value is None else repr(value)


def read_log(path: Path) -> list[dict[str, str]]:
    """The complete rows of a log: a last line without its end, left by a killed run, is not one."""
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(io.StringIO(complete)))


def _rows_until(path: Path, step: int) -> list[dict[str, str]]:
    """The rows 1 … ``step``. Raises TrainingError when some are missing."""
    try:
        rows = [row for row in read_log(path) if int(row["step"]) <= step] if path.exists() else []
    except (KeyError, TypeError, ValueError):
        raise TrainingError(f"{path}: is damaged, not a log of steps; start anew in another --out") from None
    if [int(row["step"]) for row in rows] != list(range(1, step + 1)):
        raise TrainingError(
            f"{path}: lacks some of the steps 1 … {step} of the checkpoint; start anew in another --out"
        )
    return rows


def cut_log(path: Path, step: int) -> None:
    """Drops the rows after ``step``, so that a run resumed there writes each once. A missing log is an empty one.

    Raises TrainingError when rows up to ``step`` are missing.
    """
    rows = _rows_until(path, step)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
