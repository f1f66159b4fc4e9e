"""``crucible eval``: cross-entropy of texts under a model, by weight type."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from crucible.choices import QUANTS
from crucible.commands.options import (
    Subparsers,
    add_device,
    add_model,
    decode_utf8,
    engine_config,
    gpu_settings,
    positive,
    progress,
    read_file,
)
from crucible.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from crucible.commands.comparison import Comparison
    from crucible.commands.session import Session
    from crucible.tokenizer import Tokenizer


def quant_list(text: str) -> list[str]:
    """Weight types separated by commas."""
    quants = text.split(",")
    for quant in quants:
        if quant not in QUANTS:
            raise argparse.ArgumentTypeError(f"must name {' or '.join(QUANTS)}, separated by commas, got {quant!r}")
    if len(set(quants)) < len(quants):
        raise argparse.ArgumentTypeError(f"names a weight type twice: {text}")
    return quants


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="cross-entropy of texts under a model",
        description=(
            "Scores UTF-8 texts, all together: cross-entropy in nats a token, perplexity, bits per byte, tokens a "
            "second. Each text is cut into windows of the context; the first token of each window is only read, never "
            "scored. The line of a later weight type ends with what it costs over the first: the mean difference of a "
            "token's nats ± its standard error."
        ),
    )
    add_model(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        required=True,
        help="UTF-8 texts to score (MODEL goes before --data); - is standard input",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="score at most the first N tokens of each text; a single text must have as many (default: all)",
    )
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
        help="f32, int8 or f32,int8; on a GPU also f16 (default: $CRUCIBLE_QUANT, else f32)",
    )
    parser.add_argument(
        "--against",
        choices=("cpu",),
        help=(
            "compute every window on the CPU too, with the same weight type (with f32 for f16, which a CPU has not), "
            "and compare; exit 1 if they choose different tokens where the CPU's two largest logits lie further apart "
            "than 10 times the bound for rounding: 1e-4 of the largest |logit| for f32, 1e-3 for int8 and f16"
        ),
    )
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from crucible.checkpoint import open_checkpoint
    from crucible.config.engine import require_quant
    from crucible.engine.settings import choose_device
    from crucible.model_text import ModelText
    from crucible.models import resolve

    quant = None if args.quant is None else args.quant[0]
    settings = engine_config(args, default_quant="f32", quant=quant)
    if args.context is not None and args.prefill_ctx is not None:
        raise ConfigError("--context and --prefill-ctx both say how long a window is; give one of them")
    if args.data.count("-") > 1:
        raise ConfigError("--data names standard input (-) twice, and it can be read once")
    device = choose_device(settings.device)
    if args.against == device == "cpu" != settings.device:
        raise ConfigError(
            "--against cpu would compare the CPU with itself: --device auto finds no GPU (--device cpu does it)"
        )
    quants = args.quant or [settings.quant]
    for quant in quants:
        require_quant(quant, device)
    path = resolve(args.model)
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
    tokenizer = ModelText(path, config).required()
    texts = [read_ids(name, tokenizer, args.tokens, alone=len(args.data) == 1) for name in args.data]

    longest = config.context_length
    context = args.prefill_ctx or args.context or min(longest, 2048)
    if not 2 <= context <= longest:
        name = "--context" if args.prefill_ctx is None else "--prefill-ctx"
        raise RequestError(f"{name} must lie in 2 … {longest}, got {context}", "context")

    from crucible.commands.comparison import CPU_QUANTS, Comparison
    from crucible.commands.session import CHUNK_TOKENS, Session

    def load(quant: str, device: str, chunk: int = CHUNK_TOKENS) -> Session:
        return Session(
            path,
            quant=quant,
            context=context,
            threads=settings.threads,
            device=device,
            **gpu_settings(settings),
            chunk=chunk,
        )

    cut = [(name, windows(ids, context)) for name, ids in zip(args.data, texts, strict=True)]
    size = sum(len(tokenizer.decode_bytes(ids[1:])) for ids in texts)
    table = Table(quants, size)
    code = 0
    for quant in quants:
        comparison = None
        if args.against is not None:
            comparison = Comparison(load(CPU_QUANTS[quant], args.against), device=device, quant=quant)
        scores, seconds = score(load(quant, device, args.prefill_ctx or CHUNK_TOKENS), cut, comparison)
        print(table.line(quant, scores, seconds), flush=True)
        if comparison is not None:
            print(comparison.line(scores), flush=True)
            if comparison.fault is not None:
                progress(comparison.fault)
                code = 1
    return code


def read_ids(name: str, tokenizer: Tokenizer, limit: int | None, *, alone: bool) -> list[int]:
    """The file's tokens, at most ``limit``; a file that is ``alone`` must have so many. Raises RequestError."""
    ids = tokenizer.encode_prompt(decode_utf8(read_file(name), name))
    name = "standard input" if name == "-" else name
    if limit is not None and limit > len(ids) and alone:
        raise RequestError(f"{name} has only {len(ids)} tokens, fewer than --tokens {limit}", "tokens")
    ids = ids[:limit]
    if len(ids) < 2:
        raise RequestError(f"{name} has {len(ids)} tokens; scoring needs at least 2", "data")
    return ids


def score(
    session: Session, texts: Sequence[tuple[str, list[list[int]]]], comparison: Comparison | None
) -> tuple[npt.NDArray[np.float64], float]:
    """Log-probability float64 [tokens] of all scored tokens of named texts in windows, and the seconds it took."""
    import numpy as np

    found = []
    started = time.perf_counter()
    for name, parts in texts:
        start = 0
        for part in parts:
            found.append(session.score(part, None if comparison is None else comparison.watch(part, name, start)))
            start += len(part) - 1
    seconds = time.perf_counter() - started
    return np.concatenate(found), seconds - (0 if comparison is None else comparison.seconds)


class Table:
    """The lines of ``quants`` for texts whose scored tokens are ``size`` bytes; the first comes with the titles."""

    def __init__(self, quants: Sequence[str], size: int) -> None:
        self._titles = f"{'quant':<6}{'tokens':>9}{'nats/token':>13}{'perplexity':>13}{'bits/byte':>12}{'tokens/s':>11}"
        if len(quants) > 1:
            self._titles += f"  over {quants[0]}"
        self._size = size
        self._first: npt.NDArray[np.float64] | None = None

    def line(self, quant: str, scores: npt.NDArray[np.float64], seconds: float) -> str:
        """``scores``: log-probabilities float64 [tokens], of the same tokens for every weight type."""
        from crucible.commands.paired_difference import PairedDifference

        nats = -float(scores.sum())
        mean, bits = nats / len(scores), nats / math.log(2) / self._size
        rate = len(scores) / seconds
        line = f"{quant:<6}{len(scores):>9}{mean:>13.6f}{perplexity(mean):>13.4f}{bits:>12.6f}{rate:>11.1f}"
        if self._first is None:
            self._first = scores
            return f"{self._titles}\n{line}"
        return f"{line}  {PairedDifference.of(-scores, -self._first)}"


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
