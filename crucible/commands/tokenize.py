"""``crucible tokenize``: text to token ids."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from crucible.commands.options import MODEL_HELP, Subparsers, read_text

if TYPE_CHECKING:
    from crucible.tokenizer import Tokenizer


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "tokenize",
        help="text to token ids (JSON)",
        description=(
            "Prints the token ids of TEXT, or of standard input, as a JSON list. Nothing in the text becomes a special "
            "token."
        ),
    )
    parser.add_argument("text", nargs="?", metavar="TEXT", help="text to encode (default: standard input)")
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP % "the GPT-2 vocabulary")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    text = read_text(args.text, "the text")
    print(json.dumps(open_tokenizer(args.model).encode(text)))


def open_tokenizer(model: str | None) -> Tokenizer:
    """The tokenizer of ``model``; without one GPT-2's."""
    from crucible.tokenizer import Tokenizer

    if model is None:
        return Tokenizer.gpt2()
    from crucible.models import resolve

    return Tokenizer.for_checkpoint(resolve(model))
