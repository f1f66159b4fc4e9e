"""``crucible eval``: cross-entropy of a text under a model, by weight type."""

from __future__ import annotations

import argparse
import math
import time

from crucible.choices import QUANTS
from crucible.commands.options import (
    Subparsers,
    add_device,
    add_model,
    decode_utf8,
    engine_config,
    gpu_settings,
    positive,
    read_file,
)
from crucible.errors import ConfigError, RequestError


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
        "--prefill-ctx",
        type=positive,
        metavar="N",
        help="windows of N tokens, each computed at once (default: windows of --context, 256 tokens at once)",
    )
    parser.add_argument(
        "--quant",
        type=quant_list,
        metavar="LIST",
        help="f32, int8 or f32,int8 (default: $CRUCIBLE_QUANT, else f32)",
    )
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from crucible.checkpoint import open_checkpoint
    from crucible.engine.settings import choose_device
    from crucible.model_text import ModelText
    from crucible.models import resolve

    quant = None if args.quant is None else args.quant[0]
    settings = engine_config(args, default_quant="f32", quant=quant)
    if args.context is not None and args.prefill_ctx is not None:
        raise ConfigError("--context and --prefill-ctx both say how long a window is; give one of them")
    device = choose_device(settings.device)
    path = resolve(args.model)
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
    tokenizer = ModelText(path, config).required()
    ids = tokenizer.encode_prompt(decode_utf8(read_file(args.data), args.data))
    if args.tokens is not None:
        if args.tokens > len(ids):
            raise RequestError(f"{args.data} has only {len(ids)} tokens, fewer than --tokens {args.tokens}", "tokens")
        ids = ids[: args.tokens]
    if len(ids) < 2:
        raise RequestError(f"{args.data} has {len(ids)} tokens; scoring needs at least 2", "data")

    longest = config.context_length
    context = args.prefill_ctx or args.context or min(longest, 2048)
    if not 2 <= context <= longest:
        name = "--context" if args.prefill_ctx is None else "--prefill-ctx"
        raise RequestError(f"{name} must lie in 2 … {longest}, got {context}", "context")

    from crucible.commands.session import CHUNK_TOKENS, Session

    parts = windows(ids, context)
    scored = len(ids) - 1
    size = sum(len(tokenizer.decode_bytes(part[1:])) for part in parts)
    titles = f"{'quant':<6}{'tokens':>9}{'nats/token':>13}{'perplexity':>13}{'bits/byte':>12}{'tokens/s':>11}\n"
    for quant in args.quant or [settings.quant]:
        session = Session(
            path,
            quant=quant,
            context=context,
            threads=settings.threads,
            device=device,
            **gpu_settings(settings),
            chunk=args.prefill_ctx or CHUNK_TOKENS,
        )
        started = time.perf_counter()
        nats = -sum(float(session.score(part).sum()) for part in parts)
        rate = scored / (time.perf_counter() - started)
        mean, bits = nats / scored, nats / math.log(2) / size
        line = f"{quant:<6}{scored:>9}{mean:>13.6f}{perplexity(mean):>13.4f}{bits:>12.6f}{rate:>11.1f}"
        print(titles + line, flush=True)
        titles = ""


def perplexity(nats: float) -> float:
    """exp(``nats``), infinity where that is beyond every double."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def windows(ids: list[int], context: int) -> list[list[int]]:
    """Consecutive windows that share one token, so that every token but the first is scored exactly once."""
    starts = range(0, len(ids) - 1, context - 1)
    return [ids[start : start + context] for start in starts]
