"""``crucible detokenize``: token ids to bytes."""

from __future__ import annotations

import argparse
import json
import sys

from crucible.commands.options import MODEL_HELP, Subparsers, check_token_ids, standard_input
from crucible.commands.tokenize import open_tokenizer
from crucible.errors import TokenizerError


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "detokenize",
        help="token ids (JSON) to text",
        description=(
            "Writes the bytes of a JSON list of token ids, given as IDS or on standard input. They are written as they "
            "are: a cut character stays cut."
        ),
    )
    parser.add_argument("ids", nargs="?", metavar="IDS", help="JSON list of ids (default: standard input)")
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP % "the GPT-2 vocabulary")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    ids = parse_ids(standard_input().read() if args.ids is None else args.ids)
    tokenizer = open_tokenizer(args.model)
    check_token_ids(ids, tokenizer.token_count)
    sys.stdout.buffer.write(tokenizer.decode_bytes(ids))
    sys.stdout.buffer.flush()


def parse_ids(text: bytes | str) -> list[int]:
    """A JSON list of ids. Raises TokenizerError."""
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        raise TokenizerError("the ids are not JSON; give a list such as [464, 2159]") from None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise TokenizerError("the ids must be a JSON list of whole numbers such as [464, 2159]")
    return ids
