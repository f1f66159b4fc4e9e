"""``crucible import``: another format to a native checkpoint. (``import`` itself is a Python keyword.)"""

from __future__ import annotations

import argparse

from crucible.commands.options import Subparsers, stderr_is_terminal


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "import",
        help="a Hugging Face directory or GGUF file to a native checkpoint",
        description=("Converts a Hugging Face Llama directory or a GGUF Llama file to a native checkpoint directory."),
    )
    parser.add_argument("source", metavar="SOURCE", help="Hugging Face directory or .gguf file")
    parser.add_argument("destination", metavar="DEST", help="directory to create; it must not exist")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from crucible.importers import import_model

    print(import_model(args.source, args.destination, progress=stderr_is_terminal()))
