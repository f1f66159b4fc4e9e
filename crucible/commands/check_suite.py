"""``crucible check``: the exactness suite on a model of one's own."""

from __future__ import annotations

import argparse

from crucible.commands.options import (
    Subparsers,
    add_device,
    add_quant,
    announce_compilation,
    engine_config,
    positive,
    whole,
)
from crucible.errors import ConfigError

NAMES = ("paged", "batch", "sampling", "prefill", "packed", "prefix", "graphs", "attention")
FUZZ = 20


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "check",
        help="compare logit bits between ways of computing the same",
        description=(
            "Compares the bits of logits. paged: pages in any order, and no cache; batch: requests together; sampling: "
            "greedy and sampled ones; prefill: chunks of any size; packed: several prompts in a step; prefix: the "
            "prefix cache on; graphs (on a GPU): replayed steps; attention: random caches with NaN where nothing was "
            "written. The other side is always the request alone, its prompt at once. Exit code 1 and the first "
            "differing logit when they differ. Needs no tokenizer."
        ),
    )
    parser.add_argument("check", choices=(*NAMES, "all"), metavar="CHECK", help=", ".join((*NAMES, "all")))
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model directory or name of a pulled model")
    add_quant(parser, default="int8")
    parser.add_argument("--cases", type=positive, default=3, metavar="N", help="random cases a check (default: 3)")
    parser.add_argument(
        "--fuzz", type=positive, default=FUZZ, metavar="N", help=f"random cases of attention (default: {FUZZ})"
    )
    parser.add_argument("--seed", type=whole, default=0, metavar="S", help="of the random cases (default: 0)")
    add_device(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args, default_quant="int8")
    import numpy as np

    from crucible.engine.checks.lab import Lab
    from crucible.engine.checks.suite import CHECKS
    from crucible.engine.settings import choose_device
    from crucible.models import resolve

    path = resolve(args.model)
    device = choose_device(config.device)
    if args.check == "graphs" and device != "cuda":
        raise ConfigError("check graphs compares captured graphs, which only a GPU has; use --device cuda")
    if device == "cpu":
        announce_compilation()
    lab = Lab.load(path, device=device, quant=config.quant, threads=config.threads)
    failed = 0
    every = [name for name in NAMES if name != "graphs" or device == "cuda"]
    for name in every if args.check == "all" else (args.check,):
        cases = rows = differing = 0
        print(f"{name}: {path.name}, {device}, {config.quant}, context {lab.context}, seed {args.seed}")
        print(f"  {'case':<52}{'requests':>9}{'rows':>7}  bits")
        cases_wanted = args.fuzz if name == "attention" else args.cases
        for outcome in CHECKS[name](lab, cases_wanted, np.random.default_rng(args.seed)):
            cases, rows = cases + 1, rows + outcome.rows
            differing += outcome.difference is not None
            verdict = "equal" if outcome.difference is None else f"DIFFERENT: {outcome.difference}"
            print(f"  {outcome.case:<52}{outcome.requests:>9}{outcome.rows:>7}  {verdict}", flush=True)
        print(f"{name}: {cases} cases, {rows} rows of logits, {f'{differing} DIFFERENT' if differing else 'all equal'}")
        failed += differing
    return 1 if failed else 0
