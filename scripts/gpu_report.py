"""What gpu_run.py makes of the output of its commands, and the page that it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = {
    "quant": "weights", "batch": "batch", "sampling": "sampling", "tokens": "tokens", "requests": "requests",
    "way": "way", "tok_s": "tokens/s", "step_ms": "step, ms", "step_us": "step, µs", "submit_us": "submission, µs",
    "ttft_ms": "first token, ms", "bytes": "bytes to host",
}  # fmt: skip

INTRODUCTION = """\
# GPU runs

What ran on a GPU last. Hosted CI has none: it compiles every kernel for every architecture and runs them in the host
emulator. Made by scripts/gpu_run.py from docs/gpu-runs.json.
"""

OTHERS = Path(__file__).resolve().parents[1] / "docs" / "other-engines.json"
"""What other engines reached on the 120M shape, where and how that was measured."""


def test_counts(output: str) -> str:
    """pytest's last line without its time: "138 passed, 2 skipped"."""
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed)\b", (output.splitlines() or [""])[-1])
    return ", ".join(f"{int(count):,} {what}" for count, what in found) or last_line(output)


def worst_errors(output: str) -> list[list[str]]:
    """Of each family of kernels: how many cases, and the error that came nearest to its bound."""
    families: dict[str, list[tuple[float, float]]] = {}
    for match in re.finditer(r"^ +\d+ (\w+) .*? +([\d.e+-]+|inf) +([\d.e+-]+)  (?:ok|FAILED)", output, re.MULTILINE):
        families.setdefault(family(match[1]), []).append((float(match[2]), float(match[3])))
    rows = []
    for name, pairs in families.items():
        error, bound = max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0])
        rows.append([name, f"{len(pairs):,}", f"{error:.1e}", f"{bound:.1e}" if bound else "equal"])
    return rows


def family(kernel: str) -> str:
    """linear_small8_int8_store and linear_big64_int8_qkv are ``linear, tensor cores, int8``."""
    match = re.fullmatch(r"linear_(small\d+|big\d+|scalar)_(int8|f16|f32)_\w+", kernel)
    if match is None:
        return re.sub(r"_(64|128)$", "", kernel)
    return f"linear, {'scalar' if match[1] == 'scalar' else 'tensor cores'}, {match[2]}"


def check_counts(output: str) -> str:
    """The sums over the checks' lines."""
    found = re.findall(r"^\w+: (\d+) cases, (\d+) rows of logits, (all equal|\d+ DIFFERENT)", output, re.MULTILINE)
    if not found:
        return last_line(output)
    cases, rows = (sum(int(match[i]) for match in found) for i in (0, 1))
    different = sum(int(match[2].split()[0]) for match in found if match[2] != "all equal")
    bits = f"{different:,} cases DIFFERENT" if different else "all bits equal"
    requests = sum(map(int, re.findall(r"^  .* (\d+) +\d+  (?:equal|DIFFERENT)", output, re.MULTILINE)))
    return f"{len(found)} checks, {cases:,} cases, {requests:,} sequences, {rows:,} rows of logits, {bits}"


def bench_tables(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A benchmark's tables: medians, and the spread of the trials."""
    tables = []
    for table in report["tables"]:
        keys = [key for key in COLUMNS if any(row.get(key) is not None for row in table["rows"])]
        rows = [[cell(row.get(key)) for key in keys] + [spread(row)] for row in table["rows"]]
        samplings = {row.get("sampling") for row in table["rows"]}
        kind = " by sampling" if len(samplings) > 1 else " step by step" if "way" in keys else ""
        title = f"{report['mode']}{kind}: medians of {report['trials']} trials"
        tables.append({"title": title, "columns": [*(COLUMNS[key] for key in keys), "spread"], "rows": rows})
    return tables


def cell(value: Any) -> str:
    number = value["median"] if isinstance(value, dict) else value
    if number is None or isinstance(number, str):
        return number or "–"
    return f"{number:,.0f}" if abs(number) >= 100 or number == int(number) else f"{number:,.3g}"


def spread(row: Mapping[str, Any]) -> str:
    value = row.get("tok_s")
    return f"{value['spread_percent']:.0f} %" if isinstance(value, dict) else ""


def merged(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tables of the same title and columns as one."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for table in tables:
        key = (table["title"], *table["columns"])
        found.setdefault(key, {**table, "rows": []})["rows"] += table["rows"]
    return list(found.values())


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


@dataclass(frozen=True)
class Scores:
    """A line of ``crucible eval``, and that of --against cpu. mean: of ``difference``, as text with its error."""

    tokens: int
    nats: float
    cpu: str = ""
    difference: str | None = None
    mean: float = 0.0
    choices: str = ""


def scores(output: str, quant: str) -> Scores | None:
    line = re.search(rf"^{quant} +(\d+) +(\S+) ", output, re.MULTILINE)
    if line is None:
        return None
    tokens, nats = int(line[1]), float(line[2])
    against = re.search(
        r"^against cpu .*?: nats/token (\S+) \(difference ((\S+) ± \S+)\).*(top 1 equal at .*)$", output, re.MULTILINE
    )
    if against is None:
        return Scores(tokens, nats)
    return Scores(tokens, nats, against[1], against[2], float(against[3]), against[4])


def sanitizer_summary(output: str) -> str:
    """compute-sanitizer's summaries, one a process, and pytest's counts: empty without a summary."""
    found = dict.fromkeys(re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", output))
    counts = re.findall(r"^.*\b\d+ (?:passed|failed|errors?)\b.* in .*$", output, re.MULTILINE)
    return "; ".join([*found, *(test_counts(line) for line in counts)]) if found else ""


# ---- docs/gpu-runs.md


def render(document: Mapping[str, Any]) -> str:
    """The page. ``results`` is the first table; ``tables`` have title, columns and rows of text; ``notes`` are text."""
    device = document["device"]
    inside = [f"sm_{device['arch']}"]
    for key, form in (("power_limit_w", "{} W"), ("driver", "driver {}"), ("cuda", "CUDA {}"), ("cupy", "CuPy {}")):
        if device.get(key):
            inside.append(form.format(device[key]))
    lines = [INTRODUCTION, f"## {document['date'][:10]}, {device['name']} ({', '.join(inside)})", ""]
    commit = document.get("commit")
    if commit:
        lines += [f"Commit {commit}. Model: {document['model']}.", ""]
    lines += markdown_table(
        ["what", "result"],
        [[entry["what"], entry["result"] if entry["ok"] else f"FAILED: {entry['result']}"]
         for entry in document["results"]],
    )  # fmt: skip
    notes, note = list(document.get("notes", [])), beside_note()
    for table in document.get("tables", []):
        columns, rows = beside(table) if "120m" in document["model"].lower() else (table["columns"], table["rows"])
        if len(columns) > len(table["columns"]) and note not in notes:
            notes.append(note)
        lines += ["", f"{table['title']}:", "", *markdown_table(columns, rows)]
    for note in notes:
        lines += ["", note]
    return "\n".join(lines) + "\n"


def beside(table: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of decode or prefill with what others reached; any other as it is."""
    columns, rows = list(table["columns"]), [list(row) for row in table["rows"]]
    others = json.loads(OTHERS.read_text(encoding="utf-8")).get(table["title"].partition(":")[0], {})
    key = "batch" if "batch" in columns else "tokens"
    if not others or not {key, "tokens/s"} <= set(columns):
        return columns, rows
    for name, figures in others.items():
        texts = []
        for row in rows:
            values = dict(zip(columns, row, strict=False))
            plain = values.get("sampling", "greedy") == "greedy" and values.get("requests", "1") == "1"
            figure = figures.get(values[key].replace(",", "")) if plain else None
            texts.append("" if figure is None else f"{figure:,}")
        columns.append(name)
        rows = [[*row, text] for row, text in zip(rows, texts, strict=True)]
    return columns, rows


def beside_note() -> str:
    """Where the other engines' figures come from."""
    others = json.loads(OTHERS.read_text(encoding="utf-8"))
    return " ".join([others["about"], *(f"{name}: {source}." for name, source in others["sources"].items())])


def markdown_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Columns of numbers are set to the right."""

    def numbers(index: int) -> bool:
        texts = [row[index] for row in rows if row[index]]
        return bool(texts) and all(re.match(r"[\d–]", text) for text in texts)

    rules = ["---:" if numbers(i) else "---" for i in range(len(columns))]
    escaped = [[text.replace("|", "\\|") for text in row] for row in [columns, rules, *rows]]
    return [f"| {' | '.join(row)} |" for row in escaped]
