"""Report: what one benchmark run found, as text, JSON and Markdown, with all that makes the numbers repeatable."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from crucible import __version__
from crucible.bench import machine
from crucible.bench.statistics import SPREAD_LIMIT, Summary
from crucible.errors import ConfigError

Cell: TypeAlias = Summary | str | int | float | None
Row: TypeAlias = Mapping[str, Cell]

FLAG = "!"


@dataclass(frozen=True, slots=True)
class Column:
    """``form``: format of a number. ``detail``: the lowest and highest trial and the spread are shown beside it.

    ``steady``: a wide spread is worth a flag (counts of events come out as they come out).
    """

    key: str
    title: str
    form: str = ",.2f"
    detail: bool = False
    steady: bool = True

    def flags(self, cell: Cell) -> bool:
        return self.steady and isinstance(cell, Summary) and cell.flagged


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[Column]
    rows: list[Row] = field(default_factory=list)

    def header(self) -> list[str]:
        titles = []
        for column in self.columns:
            titles += [column.title, "min", "max", "spread %"] if column.detail else [column.title]
        return titles

    def lines(self) -> list[list[str]]:
        """The rows as text, one string a column of ``header``."""
        return [[text for column in self.columns for text in show(row.get(column.key), column)] for row in self.rows]

    @property
    def flagged(self) -> bool:
        return any(column.flags(row.get(column.key)) for column in self.columns for row in self.rows)


def show(cell: Cell, column: Column) -> list[str]:
    """A cell's text; with ``detail`` four of them."""
    if isinstance(cell, Summary):
        texts = [number(cell.median, column.form) + (FLAG if column.flags(cell) else "")]
        if column.detail:
            texts += [number(cell.min, column.form), number(cell.max, column.form), number(cell.spread, ".1f")]
        return texts
    text = "–" if cell is None else cell if isinstance(cell, str) else number(cell, column.form)
    return [text, "", "", ""] if column.detail else [text]


def number(value: float, form: str) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return format(value, form) if math.isfinite(value) else "–"


@dataclass
class Report:
    """``settings``: what was measured (model, quant, engine, server). ``gpus_before``: as the run began."""

    mode: str
    command: str
    trials: int
    settings: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    cpu: dict[str, Any] = field(default_factory=machine.describe_cpu)
    gpus_before: list[dict[str, Any]] = field(default_factory=machine.describe_gpus)
    gpus_after: list[dict[str, Any]] = field(default_factory=list)

    def finish(self) -> None:
        """Look at the GPUs again while they are still warm, and say what to distrust."""
        self.gpus_after = machine.describe_gpus() if self.gpus_before else []
        if any(table.flagged for table in self.tables):
            self.notes.append(
                f"{FLAG}: the trials spread over more than {SPREAD_LIMIT:.0f} % of their median; power, clocks or "
                "other work on this machine changed meanwhile, so measure again before quoting it"
            )

    def to_text(self) -> str:
        """For a terminal."""
        parts = [text_table(table) for table in self.tables]
        return "\n\n".join(parts + self.notes)

    def to_json(self) -> str:
        """Everything, every trial's value included."""
        document = {
            "mode": self.mode,
            "command": self.command,
            "date": self.date,
            "version": __version__,
            "commit": machine.commit(),
            "machine": {**self.cpu, "gpus": self.gpus_before, "gpus_after": self.gpus_after},
            "settings": self.settings,
            "trials": self.trials,
            "tables": [
                {"title": table.title, "rows": [{key: plain(cell) for key, cell in row.items()} for row in table.rows]}
                for table in self.tables
            ],
            "notes": self.notes,
        }
        return json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """A section for the docs: the command, where it ran, and the tables."""
        lines = [f"## {self.mode}", "", "```sh", self.command, "```", ""]
        source = machine.commit() or f"version {__version__}"
        lines += [f"- {self.date}, {source}, {self.trials} trials"]
        lines += [f"- {', '.join(f'{name} {value}' for name, value in self.cpu.items())}"]
        for when, gpus in (("before", self.gpus_before), ("after", self.gpus_after)):
            lines += [f"- GPU {when}: {', '.join(f'{name} {value}' for name, value in gpu.items())}" for gpu in gpus]
        lines += [f"- {', '.join(f'{name} {value}' for name, value in self.settings.items())}"]
        for table in self.tables:
            header = table.header()
            lines += ["", f"**{table.title}**", "", markdown_row(header), markdown_row(["---"] * len(header))]
            lines += [markdown_row(row) for row in table.lines()]
        if self.notes:
            lines += ["", *(f"{note}  " for note in self.notes)]
        return "\n".join(lines) + "\n"


def plain(cell: Cell) -> Any:
    if not isinstance(cell, Summary):
        return cell
    return {
        "median": cell.median,
        "min": cell.min,
        "max": cell.max,
        "spread_percent": cell.spread,
        "flagged": cell.flagged,
        "values": list(cell.values),
    }


def finite(value: Any) -> Any:
    """JSON has no infinity: such numbers become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def text_table(table: Table) -> str:
    lines = [table.header(), *table.lines()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([table.title, *rows])


def markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def check_writable(path: str | Path) -> None:
    """Raises ConfigError unless ``write`` could make this file. What lies there stays."""
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: cannot be written; give a file in an existing directory")


def write(path: str | Path, text: str) -> None:
    """Writes ``text`` so that the file is complete or not there. Raises OSError."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
