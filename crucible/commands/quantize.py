"""``crucible quantize``: any checkpoint to a native one with int8 weights."""

from __future__ import annotations

import argparse

from crucible.commands.options import Subparsers, announce_compilation, stderr_is_terminal


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "quantize",
        help="a checkpoint to one with int8 weights, a quarter of float32's size",
        description=(
            "Writes a model as a native checkpoint directory with int8 weights. Loading it as int8 gives the same bits "
            "as loading SOURCE as int8."
        ),
    )
    parser.add_argument("source", metavar="SOURCE", help="model directory or name of a pulled model")
    parser.add_argument("destination", metavar="DEST", help="directory to create; it must not exist")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from crucible.models import resolve

    source = resolve(args.source)
    from crucible.model.quantize import quantize_checkpoint

    with announce_compilation():
        print(quantize_checkpoint(source, args.destination, progress=stderr_is_terminal()))
