"""``crucible pull``: fetch a model into the cache."""

from __future__ import annotations

import argparse

from crucible.commands.options import Subparsers, stderr_is_terminal


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "pull",
        help="fetch a model into the cache",
        description=(
            "Fetches a model, converts it once and prints where it lies. NAME is smollm2-135m-instruct, or hf:ORG/NAME "
            "where the Hugging Face hub can be reached (needs the 'hub' extra)."
        ),
    )
    parser.add_argument("name", metavar="NAME", help="smollm2-135m-instruct or hf:ORG/NAME")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from crucible.pull import pull

    print(pull(args.name, progress=stderr_is_terminal()))
