"""RunResult: what a finished run has come to, kept as ``result.json``."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from crucible_train.files import write_atomically
from crucible_train.run_log import read_log

RESULT_FILE = "result.json"


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Losses in nats a token. Speed and shares are medians over the steps of the log; None without a value.

    ``diverged``: the loss became NaN or infinite, and the losses are None. ``stopped_by``: the signal that ended the
    run early. ``loader_wait_share``: of the time since the last start, spent waiting for data.
    """

    steps: int
    tokens: int
    parameters: int
    config_hash: str
    best_val_loss: float | None = None
    best_step: int | None = None
    final_val_loss: float | None = None
    val_bits_per_byte: float | None = None
    final_train_loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    mfu_datasheet: float | None = None
    memory_gb: float | None = None
    seconds: float | None = None
    loader_wait_share: float | None = None
    diverged: bool = False
    stopped_by: int | None = None

    def summary(self, out: str) -> str:
        """One line for people."""
        parts = [f"{self.steps} steps, {self.tokens:,} tokens"]
        if self.final_val_loss is not None and self.best_val_loss is not None:
            parts.append(f"validation loss {self.final_val_loss:.4f} (best {self.best_val_loss:.4f})")
        if self.val_bits_per_byte is not None:
            parts.append(f"{self.val_bits_per_byte:.4f} bits per byte")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        return f"{out}: " + ", ".join(parts)


def medians(log: Path) -> dict[str, float | None]:
    """tokens_per_second, mfu, mfu_datasheet (medians), memory_gb (highest) and final_train_loss of a log.

    A log that is not there yet is an empty one.
    """
    rows = read_log(log) if log.exists() else []
    result: dict[str, float | None] = {}
    for name in ("tokens_per_second", "mfu", "mfu_datasheet"):
        values = [float(row[name]) for row in rows if row[name]]
        result[name] = statistics.median(values) if values else None
    memory = [float(row["memory_gb"]) for row in rows if row["memory_gb"]]
    result["memory_gb"] = max(memory) if memory else None
    result["final_train_loss"] = float(rows[-1]["loss"]) if rows else None
    return result


def write_result(directory: Path, result: RunResult) -> None:
    """Writes ``result.json``, whole or not at all."""
    write_atomically(directory / RESULT_FILE, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def read_result(directory: Path) -> RunResult | None:
    """The result of a finished run; None where there is none that can be read."""
    try:
        return msgspec.json.decode((directory / RESULT_FILE).read_bytes(), type=RunResult)
    except (OSError, msgspec.DecodeError):
        return None
