"""``crucible logits``: raw logits of token ids, the ground on which implementations are compared."""

from __future__ import annotations

import argparse
import json

from crucible.commands.options import (
    Subparsers,
    add_device,
    add_model,
    check_device,
    check_token_ids,
    token_list,
    whole,
)
from crucible.errors import ConfigError, RequestError


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "logits",
        help="logits of the last position (JSON)",
        description=(
            "Prints the logits of the last position as a JSON list. With --decode N it goes on greedily for N tokens "
            "and prints an object: tokens, and logits of the position that chose the last one. Needs no tokenizer."
        ),
    )
    add_model(parser)
    parser.add_argument("--tokens", type=token_list, required=True, metavar="IDS", help="token ids separated by commas")
    parser.add_argument("--decode", type=whole, default=0, metavar="N", help="greedy tokens to append (default: 0)")
    parser.add_argument("--quant", choices=("f32", "int8"), default="f32", help="weight type (default: f32)")
    parser.add_argument("--no-cache", action="store_true", help="recompute the whole prefix for every token")
    parser.add_argument(
        "--check", action="store_true", help="compare with transformers in float32; exit 1 if they differ"
    )
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.check and args.quant != "f32":
        raise ConfigError("--check compares with float32; use --quant f32")
    from crucible.checkpoint import open_checkpoint
    from crucible.models import resolve

    path = resolve(args.model)
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
    check_token_ids(args.tokens, config.token_count)
    total = len(args.tokens) + args.decode
    if total > config.context_length:
        raise RequestError(f"{total} tokens are more than the model's context of {config.context_length}", "tokens")

    from crucible.commands.session import Session

    check_device(args.device)
    session = Session(path, quant=args.quant, context=total, threads=args.threads)
    tokens, logits = session.decode(args.tokens, args.decode, cached=not args.no_cache)
    values = [float(value) for value in logits]
    print(json.dumps({"tokens": tokens, "logits": values} if args.decode else values))
    if args.check:
        from crucible.commands.check import compare

        return compare(path, args.tokens, tokens, logits)
    return 0
