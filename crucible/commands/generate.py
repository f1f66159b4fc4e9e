"""``crucible generate``: a model's answer, streamed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from crucible.commands.options import (
    Status,
    Subparsers,
    add_device,
    add_model,
    add_quant,
    engine_config,
    number,
    positive,
    progress,
    read_text,
    standard_input,
    whole,
)
from crucible.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from crucible.commands.uncached import UncachedModel
    from crucible.llm import LLM, Delta


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="stream a model's answer to a prompt",
        description=(
            "Streams the answer to a prompt. A model with a chat template gets the prompt as a user's message; --raw "
            "and models without one continue the text as it is. Greedy unless --temperature is positive."
        ),
    )
    add_model(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    parser.add_argument("--raw", action="store_true", help="continue the text; apply no chat template")
    parser.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="most tokens to generate (default: 256, or what the context leaves)",
    )
    parser.add_argument("--temperature", type=number, metavar="T", help="divides the logits; 0 is greedy (default: 0)")
    parser.add_argument("--top-k", type=positive, metavar="K", help="candidates kept (default: 40)")
    parser.add_argument("--seed", type=whole, metavar="S", help="of the draw (default: 1234)")
    parser.add_argument(
        "--no-cache", action="store_true", help="recompute the whole prefix for every token (slow, same tokens)"
    )
    add_quant(parser, default="int8")
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from crucible.config.sampling import SamplingParams

    config = engine_config(args, default_quant="int8", max_batch=1)
    refuse_a_prompt_as_model(args.model)
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    SamplingParams(**sampling)  # refused here, before a model is loaded
    if args.prompt is None and standard_input().isatty():
        progress("Type the prompt, then Ctrl-D.")
    text = read_text(args.prompt, "the prompt")
    if args.no_cache:
        from crucible.commands.uncached import UncachedModel

        with UncachedModel(args.model, config) as model:
            answer(args, model, text, sampling)
        return

    from crucible.llm import LLM

    status = Status()
    try:
        llm = LLM(args.model, on_progress=status, **asdict(config))
    finally:
        status.clear()
    with llm:
        answer(args, llm, text, sampling)


def answer(args: argparse.Namespace, model: LLM | UncachedModel, text: str, sampling: dict[str, Any]) -> None:
    """Writes the model's answer to ``text``."""
    from crucible.config.sampling import SamplingParams
    from crucible.protocol import DEFAULT_MAX_TOKENS

    ids = model.encode(text, chat=not args.raw)
    room = model.context - len(ids)
    if room < 1:
        raise RequestError(f"the prompt has {len(ids)} tokens and the context holds {model.context}", "prompt")
    params = SamplingParams(max_tokens=args.max_tokens or min(DEFAULT_MAX_TOKENS, room), **sampling)
    with closing(model.stream(ids, params)) as deltas:  # closed before the engine, which it may have to tell
        report(deltas, prompt_tokens=len(ids))


def refuse_a_prompt_as_model(model: str | None) -> None:
    """``crucible generate "What is …?"`` means --prompt; say so instead of looking for such a model."""
    if model is not None and any(character.isspace() for character in model) and not os.path.exists(model):
        raise ConfigError(f"there is no model {model!r}; to give a prompt write --prompt {model!r}")


def report(deltas: Iterator[Delta], prompt_tokens: int) -> None:
    """Writes the pieces as they come; then, on standard error, how many tokens and how fast."""
    started = time.perf_counter()
    first = last = None
    count = 0
    output = sys.stdout.buffer  # UTF-8 whatever the locale, as pieces of text come
    for delta in deltas:
        output.write(delta.text.encode())
        output.flush()
        count = delta.completion_tokens
        last = time.perf_counter()
        first = last if first is None else first
    if first is None or last is None:
        return
    output.write(b"\n")
    output.flush()
    speed = f", {(count - 1) / (last - first):.1f} tokens/s" if count > 1 and last > first else ""
    progress(f"{prompt_tokens} prompt tokens, {count} generated{speed}, first after {first - started:.2f} s")
