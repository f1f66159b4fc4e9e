"""``crucible-train export-hf``: a run or checkpoint to a Hugging Face Llama directory."""

from __future__ import annotations

import argparse

from crucible_train.export_options import DTYPES, add_source, add_target, target

HELP = "a run or checkpoint to a Hugging Face Llama directory, logits verified"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_target(parser, "directory")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the stored weights (default: the checkpoint's)")


def run(args: argparse.Namespace) -> int:
    from crucible_train.export_hf import export_hf

    print(export_hf(args.source, target(args), dtype=args.dtype, which=args.checkpoint))
    return 0
