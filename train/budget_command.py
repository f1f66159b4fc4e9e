"""``crucible-train budget``: the compute-optimal table."""

from __future__ import annotations

import argparse
from pathlib import Path

from crucible_train.errors import TrainingError

HELP = "which preset a number of GPU hours is right for"
HEADER = ("preset", "non-embedding", "tok/s", "tokens", "tokens/param", "vs Chinchilla", "hours to 100 %", "epochs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hours", type=float, default=8.0, metavar="H", help="GPU hours to spend (8)")
    parser.add_argument("--runs", nargs="+", default=[], metavar="DIR", help="measure throughput from these runs' logs")
    parser.add_argument(
        "--throughput", action="append", default=[], metavar="PRESET=TOK/S", help="measured by hand; repeatable"
    )
    parser.add_argument("--data-tokens", type=float, metavar="N", help="training tokens there are, for the epochs")


def run(args: argparse.Namespace) -> int:
    from crucible_train.budget import OPTIMAL, best_fit, budget, measured_throughput

    given = dict(_throughput(text) for text in args.throughput)
    if not given and not args.runs:
        raise TrainingError("budget needs a measured throughput: --runs DIR, or --throughput 30m=250000")
    throughput = (measured_throughput([Path(name) for name in args.runs]) if args.runs else {}) | given
    rows = budget(throughput, args.hours, args.data_tokens)
    cells: list[tuple[str, ...]] = [HEADER if args.data_tokens else HEADER[:-1]]
    for row in rows:
        line = (
            row.preset,
            f"{row.parameters / 1e6:.1f}M",
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens / 1e9:.2f}B",
            f"{row.tokens_per_parameter:.1f}",
            f"{row.share:.0%}",
            f"{row.hours_needed:.3g}",
        )
        cells.append(line if row.epochs is None else (*line, f"{row.epochs:.1f}"))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in
                                                     zip(line[1:], widths[1:], strict=True))]))  # fmt: skip
    best = best_fit(rows)
    print(f"{args.hours:g} h: {best.preset} comes nearest to {OPTIMAL:g} tokens a parameter ({best.share:.0%})")
    return 0


def _throughput(text: str) -> tuple[str, float]:
    preset, _, value = text.partition("=")
    try:
        return preset, float(value.replace(",", "").replace("_", ""))
    except ValueError:
        raise TrainingError(f"--throughput takes PRESET=TOK/S, got {text!r}") from None
