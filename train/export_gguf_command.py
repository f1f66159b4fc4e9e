"""``crucible-train export-gguf``: a run or checkpoint to a GGUF file."""

from __future__ import annotations

import argparse

from crucible_train.export_options import add_source, add_target, target

HELP = "a run or checkpoint to a GGUF file for llama.cpp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_target(parser, "file")
    parser.add_argument(
        "--outtype", choices=("f32", "f16", "q8_0"), default="f32", help="type of the matrices (default: f32)"
    )


def run(args: argparse.Namespace) -> int:
    from crucible_train.export_gguf import export_gguf

    print(export_gguf(args.source, target(args), outtype=args.outtype, which=args.checkpoint))
    return 0
