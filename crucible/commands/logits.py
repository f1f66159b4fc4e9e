"""``crucible logits``: raw logits of token ids, the ground on which implementations are compared."""

from __future__ import annotations

import argparse
import json

from crucible.commands.options import (
    Subparsers,
    add_device,
    add_model,
    add_quant,
    check_token_ids,
    engine_config,
    gpu_settings,
    refuse_switches,
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
    add_quant(parser, default="f32")
    parser.add_argument("--no-cache", action="store_true", help="recompute the whole prefix for every token")
    parser.add_argument(
        "--graph", action="store_true", help="on a GPU: replay a captured graph from the last prompt token on"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare every position with transformers in float32; exit 1 if they differ",
    )
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    settings = engine_config(args, default_quant="f32")
    if args.check and settings.quant != "f32":
        raise ConfigError("--check compares with float32; use --quant f32")
    if args.graph and args.no_cache:
        raise ConfigError("--graph computes one token at a time over a cache; leave --no-cache out")
    from crucible.checkpoint import open_checkpoint
    from crucible.engine.settings import choose_device
    from crucible.models import resolve

    device = choose_device(settings.device)
    refuse_switches(device, graph=args.graph)
    path = resolve(args.model)
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
    check_token_ids(args.tokens, config.token_count)
    total = len(args.tokens) + args.decode
    if total > config.context_length:
        raise RequestError(f"{total} tokens are more than the model's context of {config.context_length}", "tokens")
    if args.check:
        from crucible.commands.check import compare, require

        require(config)

    from crucible.commands.session import Session

    session = Session(
        path,
        quant=settings.quant,
        context=total,
        threads=settings.threads,
        device=device,
        **gpu_settings(settings),
        graph=args.graph,
    )
    tokens, logits = session.decode(args.tokens, args.decode, cached=not args.no_cache)
    values = [float(value) for value in logits]
    print(json.dumps({"tokens": tokens, "logits": values} if args.decode else values, allow_nan=False))
    if args.check:
        rows = session.rows([*args.tokens, *tokens[:-1]])
        rows[-1] = logits  # the printed ones: with a cache, if there was one
        return compare(path, args.tokens, tokens, rows)
    return 0
