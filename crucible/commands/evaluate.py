"""``crucible eval``: cross-entropy of a text under a model, by weight type."""

from __future__ import annotations

import argparse
import math
import time

from crucible.commands.options import Subparsers, add_device, add_model, check_device, decode_utf8, positive, read_file
from crucible.errors import RequestError

QUANTS = ("f32", "int8")


def quant_list(text: str) -> list[str]:
    """Weight types separated by commas."""
    quants = text.split(",")
    for quant in quants:
        if quant not in QUANTS:
            raise argparse.ArgumentTypeError(f"must name {' or '.join(QUANTS)}, separated by commas, got {quant!r}")
    return quants


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="cross-entropy of a text under a model",
        description=(
            "Scores a UTF-8 text: cross-entropy in nats a token, perplexity, bits per byte, tokens a second. The text "
            "is cut into windows of the context; the first token of each window is only read, never scored."
        ),
    )
    add_model(parser)
    parser.add_argument("--data", metavar="FILE", required=True, help="UTF-8 text to score; - is standard input")
    parser.add_argument("--tokens", type=positive, metavar="N", help="score the first N tokens (default: all)")
    parser.add_argument(
        "--context", type=positive, metavar="N", help="window length (default: the model's, at most 2048)"
    )
    parser.add_argument(
        "--quant", type=quant_list, default=["f32"], metavar="LIST", help="f32, int8 or f32,int8 (default: f32)"
    )
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from crucible.checkpoint import open_checkpoint
    from crucible.models import resolve
    from crucible.tokenizer import Tokenizer

    check_device(args.device)
    path = resolve(args.model)
    tokenizer = Tokenizer.for_checkpoint(path)
    ids = tokenizer.encode(decode_utf8(read_file(args.data), args.data))
    if args.tokens is not None:
        if args.tokens > len(ids):
            raise RequestError(f"{args.data} has only {len(ids)} tokens, fewer than --tokens {args.tokens}", "tokens")
        ids = ids[: args.tokens]
    if len(ids) < 2:
        raise RequestError(f"{args.data} has {len(ids)} tokens; scoring needs at least 2", "data")

    with open_checkpoint(path) as checkpoint:
        longest = checkpoint.config.context_length
    context = args.context or min(longest, 2048)
    if not 2 <= context <= longest:
        raise RequestError(f"--context must lie in 2 … {longest}, got {context}", "context")

    from crucible.commands.session import Session

    parts = windows(ids, context)
    scored = len(ids) - 1
    size = sum(len(tokenizer.decode_bytes(part[1:])) for part in parts)
    print(f"{'quant':<6}{'tokens':>9}{'nats/token':>13}{'perplexity':>13}{'bits/byte':>12}{'tokens/s':>11}", flush=True)
    for quant in args.quant:
        session = Session(path, quant=quant, context=context, threads=args.threads)
        started = time.perf_counter()
        nats = -sum(float(session.score(part).sum()) for part in parts)
        rate = scored / (time.perf_counter() - started)
        mean, bits = nats / scored, nats / math.log(2) / size
        print(f"{quant:<6}{scored:>9}{mean:>13.6f}{math.exp(mean):>13.4f}{bits:>12.6f}{rate:>11.1f}", flush=True)


def windows(ids: list[int], context: int) -> list[list[int]]:
    """Consecutive windows that share one token, so that every token but the first is scored exactly once."""
    starts = range(0, len(ids) - 1, context - 1)
    return [ids[start : start + context] for start in starts]
