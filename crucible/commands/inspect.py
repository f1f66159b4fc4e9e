"""``crucible inspect``: what a model is and what it costs."""

from __future__ import annotations

import argparse

from crucible.commands.options import Subparsers, add_model


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="architecture, parameters and memory of a model",
        description=(
            "Validates a model directory and prints its architecture, parameters and memory. Needs no tokenizer."
        ),
    )
    add_model(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from crucible.inspect_model import describe
    from crucible.models import resolve

    print(describe(resolve(args.model)))
