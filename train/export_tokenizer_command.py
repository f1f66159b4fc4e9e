"""``crucible-train export-tokenizer``: a vocabulary as tokenizer.json, tiktoken ranks or tokenizer.vocab."""

from __future__ import annotations

import argparse

from crucible_train.export_options import add_target, target

HELP = "a vocabulary as tokenizer.json, tiktoken ranks or tokenizer.vocab"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="gpt2, a run, model or data directory, or a vocabulary file")
    add_target(parser, "file")
    parser.add_argument(
        "--format", choices=("json", "tiktoken", "vocab"), help="default: what OUT's suffix .json, … stands for"
    )


def run(args: argparse.Namespace) -> int:
    from crucible_train.export_tokenizer import export_tokenizer

    print(export_tokenizer(args.source, target(args), args.format))
    return 0
