"""``crucible profile``: the parser; the measuring is in crucible.bench.profile."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from crucible.bench.command_line import command_line, counts, prompt_plans
from crucible.commands.options import (
    Status,
    Subparsers,
    add_device,
    add_model,
    add_quant,
    announce_compilation,
    engine_config,
    gpu_settings,
    positive,
    whole,
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="where a step's time goes, op by op",
        description=(
            "Times each operation of the forward pass and compares their sum with the whole step. On a GPU also with "
            "the step replayed as a graph, and by what each op adds to that. See docs/benchmarks.md."
        ),
    )
    add_model(parser)
    parser.add_argument("--warm", type=whole, default=256, metavar="N", help="tokens before decode (default: 256)")
    parser.add_argument("--batch", type=counts, metavar="B,…", help="decode batches (default: 1, none with --prefill)")
    parser.add_argument("--prefill", type=prompt_plans, metavar="N,…", help="prompts: tokens, or 4x256 for four")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="timed steps (default: 20)")
    parser.add_argument("--seed", type=whole, default=1, metavar="S", help="of the prompts (default: 1)")
    add_quant(parser, default="int8")
    add_device(parser)
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--markdown", metavar="FILE", help="write the results as a section of Markdown there")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> None:
    from crucible.bench.profile import CHUNK, Step, profile
    from crucible.bench.report import check_writable, write
    from crucible.checkpoint import open_checkpoint
    from crucible.engine.settings import choose_device
    from crucible.model.direct import Direct
    from crucible.models import resolve

    settings = engine_config(args, default_quant="int8")
    decode = args.batch or ([] if args.prefill else [1])
    steps = [*map(Step, decode), *(Step(*plan) for plan in args.prefill or ())]
    for path in (args.json, args.markdown):
        if path is not None:
            check_writable(path)
    device = choose_device(settings.device)
    directory = resolve(args.model)
    status = Status()
    try:
        listening = announce_compilation(status) if device == "cpu" else nullcontext()
        with listening, open_checkpoint(directory) as checkpoint:
            longest = max(args.warm + 1 if step.tokens is None else step.tokens for step in steps)
            status("loading weights")
            model = Direct.load(
                checkpoint,
                device=device,
                quant=settings.quant,
                context=min(longest, checkpoint.config.context_length),
                max_rows=max(min(CHUNK, args.warm), *(step.rows for step in steps), 1),
                head_rows=max(step.sequences for step in steps),
                threads=settings.threads,
                **gpu_settings(settings),
                say=status,
            )
            report = profile(
                model,
                command_line(args.parser, args),
                status,
                decode=decode,
                prefill=args.prefill or (),
                warm=args.warm,
                steps=args.steps,
                seed=args.seed,
            )
        report.settings |= {"model_path": str(directory), "quant": settings.quant}
        if device == "cuda":
            report.settings |= gpu_settings(settings)["switches"]
    finally:
        status.clear()
    print(report.to_text(), flush=True)
    if args.json is not None:
        write(args.json, report.to_json())
    if args.markdown is not None:
        write(args.markdown, report.to_markdown())
