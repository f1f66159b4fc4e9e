"""Arguments that the export commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from crucible_train.errors import TrainingError

DTYPES = ("float32", "bfloat16", "float16")


def add_source(parser: argparse.ArgumentParser) -> None:
    """SOURCE and ``--checkpoint``."""
    parser.add_argument("source", metavar="SOURCE", help="run directory, or model directory (native or Llama)")
    parser.add_argument("--checkpoint", choices=("best", "last"), help="which of a run (default: best, else last)")


def add_target(parser: argparse.ArgumentParser, what: str) -> None:
    """The target, positional or as ``--out``."""
    parser.add_argument("target", nargs="?", metavar="OUT", help=f"{what} to write; an older export is replaced")
    parser.add_argument("--out", metavar="OUT", help="the same, as an option")


def target(args: argparse.Namespace) -> Path:
    """What ``add_target`` parsed. Raises TrainingError unless it was given once."""
    if (args.target is None) == (args.out is None):
        raise TrainingError("give the place to write to once: SOURCE OUT, or SOURCE --out OUT")
    return Path(args.target or args.out)
