"""``crucible-train export``: a run or checkpoint to the native directory that Crucible serves."""

from __future__ import annotations

import argparse

from crucible_train.export_options import DTYPES, add_source, add_target, target

HELP = "a run or checkpoint to a native model directory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_target(parser, "directory")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the stored weights (default: the checkpoint's)")


def run(args: argparse.Namespace) -> int:
    from crucible_train.export import export_native

    print(export_native(args.source, target(args), dtype=args.dtype, which=args.checkpoint))
    return 0
