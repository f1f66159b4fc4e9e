"""``crucible bench``: the parser of the benchmarks. The modes are in crucible.bench and imported when they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crucible.bench.command_line import command_line, counts, distinct, fraction, positive_number, rates, words
from crucible.choices import QUANTS, SAMPLINGS
from crucible.commands import bench_gpu
from crucible.commands.options import Status, Subparsers, add_device, add_model, positive, whole
from crucible.errors import ConfigError

if TYPE_CHECKING:
    from crucible.bench.report import Report

Runner = Callable[[argparse.Namespace, str, Callable[[str], None]], "Report"]
Modes = Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure the engine or a server",
        description=(
            "Measures an engine in this process, or a running server. Every mode repeats itself (--trials), in "
            "alternating order, and reports median, lowest, highest and spread; see docs/benchmarks.md."
        ),
    )
    modes = parser.add_subparsers(title="modes", metavar="MODE", required=True)
    add_decode(modes)
    add_prefill(modes)
    add_cache(modes)
    add_stall(modes)
    add_serve(modes)
    add_tokenizer(modes)
    add_scheduler(modes)
    bench_gpu.add_modes(modes, add_mode)


def add_mode(modes: Modes, name: str, text: str, runner: Runner, *, trials: int = 3) -> argparse.ArgumentParser:
    """A mode's parser with what all modes share."""
    parser = modes.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.")
    parser.add_argument("--trials", type=positive, default=trials, metavar="N", help=f"repetitions (default: {trials})")
    parser.add_argument(
        "--seed", type=whole, default=1, metavar="S", help="of prompts, lengths and arrivals (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results and every trial's values there")
    parser.add_argument("--markdown", metavar="FILE", help="write the results as a section of Markdown there")
    parser.set_defaults(run=run, runner=runner, parser=parser)
    return parser


def add_engine(parser: argparse.ArgumentParser) -> None:
    """MODEL and the settings of an engine in this process."""
    add_model(parser)
    parser.add_argument("--quant", choices=QUANTS, default="int8", help="weight type (default: int8)")
    parser.add_argument("--prefill-budget", type=positive, metavar="N", help="prompt tokens a step over all requests")
    parser.add_argument(
        "--prefill-chunk-tokens", type=positive, metavar="N", help="prompt tokens a step of one request"
    )
    add_device(parser)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Trials, seed and those settings of an engine that the mode has."""
    names = ("trials", "seed", "device", "threads", "quant", "prefill_budget", "prefill_chunk_tokens")
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def add_decode(modes: Modes) -> None:
    parser = add_mode(modes, "decode", "the engine's decode step by batch size", run_decode)
    add_engine(parser)
    batches = distinct(counts)
    parser.add_argument("--batch", type=batches, default=[1, 2, 4, 8, 16], metavar="N,…", help="default: 1,2,4,8,16")
    parser.add_argument(
        "--prompt-tokens",
        type=counts,
        default=[32, 128, 256, 512],
        metavar="N,…",
        help="prompt lengths, dealt to the batch in turn (default: 32,128,256,512)",
    )
    kinds = "greedy, sampled (top-k 40), wide (top-k 500), mixed (greedy, sampled, wide, greedy); default: greedy"
    sampling = distinct(words(*SAMPLINGS))
    parser.add_argument("--sampling", type=sampling, default=["greedy"], metavar="LIST", help=kinds)
    parser.add_argument("--steps", type=positive, default=64, metavar="N", help="timed steps a trial (default: 64)")
    parser.add_argument("--vs-quant", choices=QUANTS, help="measure this weight type in the same trials, and the ratio")


def run_decode(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    from crucible.bench.decode import decode

    if args.vs_quant == args.quant:
        raise ConfigError(f"--vs-quant {args.vs_quant} is --quant's too; name another")
    return decode(
        args.model,
        command,
        say,
        vs_quant=args.vs_quant,
        batches=args.batch,
        prompts=args.prompt_tokens,
        samplings=args.sampling,
        steps=args.steps,
        **engine_settings(args),
    )


def add_prefill(modes: Modes) -> None:
    parser = add_mode(modes, "prefill", "prompt tokens a second", run_prefill)
    add_engine(parser)
    parser.add_argument("--tokens", type=counts, default=[128, 512, 1024], metavar="N,…", help="default: 128,512,1024")
    parser.add_argument("--requests", type=positive, default=1, metavar="N", help="prompts at once (default: 1)")


def run_prefill(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    from crucible.bench.prefill import prefill

    return prefill(args.model, command, say, lengths=args.tokens, requests=args.requests, **engine_settings(args))


def add_cache(modes: Modes) -> None:
    parser = add_mode(modes, "cache", "what the KV cache saves by length", run_cache)
    add_model(parser)
    parser.add_argument("--quant", choices=QUANTS, default="int8", help="weight type (default: int8)")
    add_device(parser)
    parser.add_argument("--lengths", type=counts, default=[16, 64, 150], metavar="N,…", help="default: 16,64,150")
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="tokens each way a trial (default: 8)")


def run_cache(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    from crucible.bench.cache import cache

    return cache(args.model, command, say, lengths=args.lengths, steps=args.steps, **engine_settings(args))


def add_stall(modes: Modes) -> None:
    parser = add_mode(modes, "stall", "what streams under way feel when a prompt arrives", run_stall)
    add_engine(parser)
    parser.add_argument("--streams", type=counts, default=[1, 4], metavar="N,…", help="default: 1,4")
    parser.add_argument(
        "--prompt-tokens", type=counts, default=[33, 535, 941], metavar="N,…", help="default: 33,535,941"
    )
    parser.add_argument("--url", help="a running server instead of an engine in this process")
    add_api(parser)


def run_stall(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    from crucible.bench.stall import stall

    if args.url is not None and args.model is not None:
        raise ConfigError("give a MODEL or --url, not both: a server has its own model (--api-model names it to it)")
    return stall(
        args.model,
        command,
        say,
        streams=args.streams,
        prompts=args.prompt_tokens,
        url=args.url,
        api=args.api,
        api_model=args.api_model,
        timeout=args.timeout,
        **engine_settings(args),
    )


def add_api(parser: argparse.ArgumentParser) -> None:
    """How to speak to a server."""
    parser.add_argument(
        "--api", choices=("native", "openai"), default="native", help="what it speaks (default: native)"
    )
    parser.add_argument("--api-model", metavar="NAME", help="model name in the requests of --api openai")
    parser.add_argument(
        "--timeout", type=positive_number, default=120.0, metavar="S", help="seconds for a request (default: 120)"
    )


def add_serve(modes: Modes) -> None:
    parser = add_mode(modes, "serve", "load on a running server", run_serve)
    parser.add_argument("--url", required=True, help="the server, such as http://127.0.0.1:8080")
    add_api(parser)
    parser.add_argument("--vs", metavar="URL", help="a second server, B: measured in turns with the first, A")
    parser.add_argument("--vs-api", choices=("native", "openai"), help="what B speaks (default: as --api)")
    parser.add_argument("--vs-model", metavar="NAME", help="model name in B's requests (default: as --api-model)")
    parser.add_argument("--concurrency", type=counts, metavar="N,…", help="closed loop: clients (default: 1,2,4,8,16)")
    parser.add_argument("--rate", type=rates, metavar="R,…", help="open loop: Poisson arrivals a second")
    lengths = "N, LOW:HIGH or lognormal:MEAN:SIGMA"
    parser.add_argument("--prompt-tokens", default="32:384", metavar="L", help=f"{lengths} (default: 32:384)")
    parser.add_argument("--output-tokens", default="64:160", metavar="L", help=f"{lengths} (default: 64:160)")
    parser.add_argument("--dataset", metavar="FILE", help='JSONL of {"prompt", "max_tokens"} instead of drawn lengths')
    parser.add_argument("--text", action="store_true", help="prompts of words instead of token ids")
    parser.add_argument(
        "--id-limit", type=positive, metavar="N", help="prompt ids lie below N (default: from the server, or 20000)"
    )
    parser.add_argument(
        "--requests", type=positive, metavar="N", help="requests a point (default: 4 a client, at least 8)"
    )
    parser.add_argument(
        "--duration",
        type=positive_number,
        default=60.0,
        metavar="S",
        help="seconds a point starts requests (default: 60)",
    )
    parser.add_argument("--warmup", type=whole, default=2, metavar="N", help="uncounted requests a point (default: 2)")
    parser.add_argument(
        "--max-open", type=positive, default=512, metavar="N", help="open loop: connections (default: 512)"
    )
    parser.add_argument(
        "--disconnect", type=fraction, default=0.0, metavar="F", help="fraction of clients that hang up midway"
    )
    parser.add_argument(
        "--slo-ttft", type=positive_number, metavar="MS", help="goodput: longest time to the first token"
    )
    parser.add_argument(
        "--slo-itl", type=positive_number, metavar="MS", help="goodput: longest p99 of a request's pauses"
    )


def run_serve(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    from crucible.bench.points import Slo
    from crucible.bench.serve import Point, ServePlan, Server, serve
    from crucible.bench.workload import Lengths, Workload, read_dataset

    if args.vs is None and (args.vs_api or args.vs_model):
        raise ConfigError("--vs-api and --vs-model say how to speak to a second server; give --vs URL")
    servers = [Server("A" if args.vs else "server", args.url, args.api, args.api_model)]
    if args.vs is not None:
        servers.append(Server("B", args.vs, args.vs_api or args.api, args.vs_model or args.api_model))
    clients = args.concurrency or ([] if args.rate else [1, 2, 4, 8, 16])
    points = [Point(concurrency=count) for count in clients] + [Point(rate=rate) for rate in args.rate or []]
    workload = Workload(
        Lengths.parse(args.prompt_tokens),
        Lengths.parse(args.output_tokens),
        args.id_limit or 0,
        args.text,
        args.disconnect,
        read_dataset(args.dataset) if args.dataset is not None else (),
    )
    limits = [None if limit is None else limit / 1000 for limit in (args.slo_ttft, args.slo_itl)]
    plan = ServePlan(
        servers,
        points,
        workload,
        trials=args.trials,
        requests=args.requests,
        duration=args.duration,
        timeout=args.timeout,
        warmup=args.warmup,
        max_open=args.max_open,
        slo=Slo(*limits),
        seed=args.seed,
    )
    return serve(plan, command, say)


def add_tokenizer(modes: Modes) -> None:
    parser = add_mode(
        modes, "tokenizer", "encoding speed, against tiktoken if it is installed", run_tokenizer, trials=5
    )
    add_model(parser, default="the GPT-2 vocabulary")
    parser.add_argument("--data", metavar="FILE", help="UTF-8 text (default: Python's help topics)")
    parser.add_argument(
        "--megabytes", type=positive_number, default=10.0, metavar="N", help="most of it to encode (default: 10)"
    )


def run_tokenizer(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    from crucible.bench.tokenizer import tokenizer

    return tokenizer(args.model, command, say, data=args.data, megabytes=args.megabytes, trials=args.trials)


def add_scheduler(modes: Modes) -> None:
    parser = add_mode(modes, "scheduler", "microseconds a step without a model", run_scheduler, trials=5)
    parser.add_argument("--batch", type=counts, default=[16, 256], metavar="N,…", help="default: 16,256")
    parser.add_argument("--steps", type=positive, default=1000, metavar="N", help="timed steps a trial (default: 1000)")


def run_scheduler(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    from crucible.bench.scheduler import scheduler

    return scheduler(command, say, batches=args.batch, steps=args.steps, trials=args.trials, seed=args.seed)


def run(args: argparse.Namespace) -> None:
    from crucible.bench.report import check_writable, write

    for path in (args.json, args.markdown):
        if path is not None:
            check_writable(path)  # refused now rather than after minutes of measuring
    status = Status()
    try:
        report: Report = args.runner(args, command_line(args.parser, args), status)
    finally:
        status.clear()
    print(report.to_text())
    sys.stdout.flush()
    if args.json is not None:
        write(args.json, report.to_json())
    if args.markdown is not None:
        write(args.markdown, report.to_markdown())
