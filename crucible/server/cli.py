"""The ``crucible-serve`` command. Heavy modules are imported once the arguments are known to be good."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from crucible import __version__
from crucible.choices import DEVICES, QUANTS
from crucible.config import EngineConfig
from crucible.config.engine import parse_size
from crucible.errors import CrucibleError

ERROR = 2


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(ERROR, f"crucible-serve: error: {message} (see --help)\n")


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """An argparse type: a whole number between ``low`` and ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must lie between {low} and {high}, got {value}")
        return value

    return parse


def size(text: str) -> int:
    try:
        return parse_size(text)
    except CrucibleError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def build_parser() -> argparse.ArgumentParser:
    """Every flag. Those without a default here follow CRUCIBLE_<NAME> and then EngineConfig."""
    parser = Parser(
        prog="crucible-serve",
        description="Serve a model over HTTP: POST /v1/generate and /v1/generate/stream, GET /health and /metrics.",
        epilog="There is no authentication: binding to other than a loopback address is a deliberate act. Flags of "
        "the engine can also be given as environment variables: --max-batch as CRUCIBLE_MAX_BATCH, and so on.",
    )
    defaults = EngineConfig()
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a model directory or the name of a pulled model (default model)")
    add("--version", action="version", version=f"crucible {__version__}")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=whole(0, 65535), default=8080, help="port; 0 picks a free one (%(default)s)")
    add("--model-id", metavar="ID", help="the model's name in answers (the directory's name)")
    add("--http-workers", type=whole(1, 256), default=1, metavar="N", help="http processes (%(default)s)")
    add("--drain-timeout", type=whole(0, 86400), default=30, metavar="S",
        help="seconds live requests may take after SIGTERM or Ctrl-C (%(default)s)")
    add("--stall-timeout", type=whole(1, 86400), default=60, metavar="S",
        help="seconds a step may take before /health calls the engine stalled (%(default)s)")
    add("--max-batch", type=whole(1), metavar="N", help=f"requests running at once ({defaults.max_batch})")
    add("--max-queue", type=whole(0), metavar="N", help=f"requests waiting before 429 ({defaults.max_queue})")
    add("--device", choices=DEVICES, help=f"({defaults.device})")
    add("--quant", choices=QUANTS, help=f"type of the weights ({defaults.quant})")
    add("--context", type=whole(2), metavar="N",
        help="most tokens of a request, prompt and answer (the model's; on a CPU at most 2048)")
    pages = parser.add_mutually_exclusive_group()
    pages.add_argument("--kv-memory", type=size, metavar="SIZE", help="memory for keys and values, such as 512M")
    pages.add_argument("--kv-pages", type=whole(1), metavar="N", help="the same in pages of 16 tokens")
    add("--prefill-budget", type=whole(1), metavar="N", help="prompt tokens computed a step, over all requests")
    add("--prefill-chunk-tokens", type=whole(1), metavar="N", help="most prompt tokens of one request a step")
    switch = argparse.BooleanOptionalAction
    add("--batched-prefill", action=switch,
        help=f"compute prompts of several requests in one step ({defaults.batched_prefill})")
    add("--min-packed-prompts", type=whole(2), metavar="N",
        help=f"do so only when a step reaches so many prompts ({defaults.min_packed_prompts})")
    add("--prefix-cache", action=switch,
        help=f"keep the keys and values of prompts for requests that begin alike ({defaults.prefix_cache})")
    add("--threads", type=whole(1, 1024), metavar="N", help="CPU threads of the engine")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code: 0 after a drain, 2 for what cannot work, 1 when the service failed."""
    try:
        args = build_parser().parse_args(arguments)
        config = EngineConfig.from_environment(
            device=args.device,
            quant=args.quant,
            max_batch=args.max_batch,
            max_queue=args.max_queue,
            context=args.context,
            kv_pages=args.kv_pages,
            kv_memory=args.kv_memory,
            prefill_budget=args.prefill_budget,
            prefill_chunk_tokens=args.prefill_chunk_tokens,
            batched_prefill=args.batched_prefill,
            min_packed_prompts=args.min_packed_prompts,
            prefix_cache=args.prefix_cache,
            threads=args.threads,
        )
        from crucible.models import resolve
        from crucible.server.service import Service, print_line

        path = resolve(args.model)
        service = Service(
            model_path=str(path),
            model_id=args.model_id or path.resolve().name,
            config=config,
            host=args.host,
            port=args.port,
            http_workers=args.http_workers,
            drain_s=float(args.drain_timeout),
            stalled_s=float(args.stall_timeout),
        )
        return service.run(say=print_line, announce=lambda line: print(line, flush=True))
    except CrucibleError as error:
        line = " ".join(str(error).split())
        print(f"crucible-serve: error: {line}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
