"""``crucible-train presets``: the sizes there are."""

from __future__ import annotations

import argparse
import json

from crucible_train.errors import TrainingError
from crucible_train.presets import AXES, PRESETS, model_config, parameter_counts

HELP = "list the presets with their parameter counts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for axis, choices in AXES.items():
        parser.add_argument(f"--{axis}", choices=choices, default=choices[0], help=f"(default: {choices[0]})")
    parser.add_argument(
        "--vocabulary-size", type=int, metavar="N", help="rows of the embedding (default: the preset's)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(args: argparse.Namespace) -> int:
    axes = {axis: getattr(args, axis) for axis in AXES}
    if args.vocabulary_size is not None and args.vocabulary_size < 1:
        raise TrainingError(f"--vocabulary-size must be positive, got {args.vocabulary_size}")
    rows = [_row(name, args.vocabulary_size, axes) for name in PRESETS]
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    cells = [
        list(rows[0]),
        *([f"{value:,}" if type(value) is int else value for value in row.values()] for row in rows),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        print(
            "  ".join(
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
        )
    return 0


def _row(name: str, vocab_size: int | None, axes: dict[str, str]) -> dict[str, int | str]:
    config = model_config(name, vocab_size=vocab_size, **axes)  # type: ignore[arg-type]
    counts = parameter_counts(config)
    return {
        "preset": name,
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "feed_forward": config.intermediate_size,
        "context": config.context_length,
        "vocabulary": config.vocab_size,
        "total": counts.total,
        "non_embedding": counts.non_embedding,
    }
