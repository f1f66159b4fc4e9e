"""``crucible generate``: a model's answer, streamed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from crucible.commands.options import (
    Status,
    Subparsers,
    add_device,
    add_model,
    check_device,
    number,
    positive,
    progress,
    read_text,
    whole,
)
from crucible.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from crucible.config.sampling import SamplingParams
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
    parser.add_argument("--quant", choices=("f32", "int8"), default="int8", help="weight type (default: int8)")
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from crucible.config.sampling import SamplingParams
    from crucible.llm import LLM
    from crucible.protocol import DEFAULT_MAX_TOKENS

    check_device(args.device)
    refuse_a_prompt_as_model(args.model)
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    SamplingParams(**sampling)  # refused here, before a model is loaded
    if args.prompt is None and sys.stdin.isatty():
        progress("Type the prompt, then Ctrl-D.")
    text = read_text(args.prompt, "the prompt")
    status = Status()
    settings = {"device": args.device, "quant": args.quant, "threads": args.threads, "max_batch": 1}
    with LLM(args.model, on_progress=status, **settings) as llm:
        status.clear()
        ids = llm.encode(text, chat=not args.raw)
        room = llm.context - len(ids)
        if room < 1:
            raise RequestError(f"the prompt has {len(ids)} tokens and the context holds {llm.context}", "prompt")
        params = SamplingParams(max_tokens=args.max_tokens or min(DEFAULT_MAX_TOKENS, room), **sampling)
        deltas = uncached(llm, ids, params) if args.no_cache else llm.stream(ids, params)
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


def uncached(llm: LLM, ids: list[int], params: SamplingParams) -> Iterator[Delta]:
    """The reference path of generation: every token recomputes the whole prefix, nothing is kept between steps."""
    from crucible.commands.session import Session
    from crucible.llm import Delta
    from crucible.native.sampling import select
    from crucible.tokenizer import IncrementalDecoder

    if llm.tokenizer is None or params.max_tokens is None:
        raise ConfigError("--no-cache needs a tokenizer and --max-tokens")
    if len(ids) + params.max_tokens > llm.context:
        raise RequestError(
            f"prompt ({len(ids)} tokens) and max_tokens ({params.max_tokens}) exceed the context of {llm.context}",
            "max_tokens",
        )
    decoder = IncrementalDecoder(llm.tokenizer)
    llm.close()  # its weights and cache make room for the session's
    session = Session(llm.path, quant=llm.config.quant, context=llm.context, threads=llm.config.threads)
    tokens = list(ids)
    for count in range(1, params.max_tokens + 1):
        token = select(
            session.logits(tokens),
            params.temperature or 0.0,
            params.effective_top_k,
            params.effective_seed,
            0,
            len(tokens),
            session.config.token_count,
        )
        if token in session.config.eos_token_ids:
            yield Delta(decoder.flush(), None, count, "stop")
            return
        tokens.append(token)
        yield Delta(decoder.push(token), token, count)
    yield Delta(decoder.flush(), None, params.max_tokens, "length")
