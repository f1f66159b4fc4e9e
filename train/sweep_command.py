"""``crucible-train sweep``: train every run of an ablation study, on one machine or a Ray cluster."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crucible_train.errors import TrainingError

if TYPE_CHECKING:
    from crucible_train.executor import Executor
    from crucible_train.study_design import PlannedRun, Study

HELP = "train every run of an ablation study (resumable)"
ALL = "attention,position,activation,norm,placement"
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--axes", default=ALL, metavar="A,B", help=f"axes to vary one by one ({ALL}; pos is position)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds a configuration, 0 … N-1 (5)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help="count the seeds from here (0)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps a run")
    parser.add_argument("--preset", default="30m", help="model size (30m)")
    parser.add_argument("--data", metavar="DIR", help="what prepare wrote")
    parser.add_argument("--out", default="runs/study", metavar="DIR", help="study directory (runs/study)")
    parser.add_argument("--batch", type=int, metavar="B", help="sequences a micro-batch")
    parser.add_argument("--lr", type=float, metavar="R", help="peak learning rate of every variant without its own")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting of train")
    parser.add_argument("--lr-for", action="append", default=[], metavar="VARIANT=R", help="e.g. post=1e-4; repeatable")
    parser.add_argument("--gpus", metavar="0,1", help="GPU ids (default: all visible); '' for the CPU")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once on each GPU (1)")
    parser.add_argument("--executor", choices=("local", "ray"), default="local")
    parser.add_argument("--ray-address", default="auto", metavar="ADDR", help="Ray cluster to join (auto)")
    parser.add_argument("--ray-shared", action="store_true", help="OUT is a directory that every node shares")
    parser.add_argument("--ray-node-dir", metavar="DIR", help="where nodes train without --ray-shared")
    parser.add_argument("--ray-cpus", type=float, metavar="N", help="CPUs a run (default 1; all the share without GPU)")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their state, train nothing")
    parser.add_argument("--report", action="store_true", help="analyze OUT instead of training")


def run(args: argparse.Namespace) -> int:
    directory = Path(args.out)
    if args.report:
        from crucible_train.analyze_command import report

        return report(directory, directory)
    from crucible_train.study_runs import load_study, save_study, state_of

    asked = study_of(args)
    from crucible_train.manifest import read_manifest
    from crucible_train.study_design import merge

    if args.dry_run:
        for planned in asked.runs:
            print(f"{planned.name}  {state_of(planned, directory)}")
        return 0
    read_manifest(asked.base["data"])  # unprepared data would fail every run
    directory.mkdir(parents=True, exist_ok=True)
    executor, slots = _executor(args, directory)
    earlier = load_study(directory)
    study = merge(earlier, asked)
    if earlier is not None and (dropped := len({run.name for run in earlier.runs} - {run.name for run in study.runs})):
        print(f"{dropped} runs of the earlier study have other settings and leave it; their directories stay")
    save_study(directory, study)
    return _sweep(asked.runs, directory, executor, slots, asked.base["steps"])


def study_of(args: argparse.Namespace) -> Study:
    """The study that the command line asks for. Raises TrainingError for settings that cannot work."""
    from crucible_train.study_design import parse_axes, plan

    if args.data is None or args.steps is None:
        raise TrainingError("sweep needs --data DIR (what prepare wrote) and --steps N")
    if args.seeds < 1:
        raise TrainingError(f"--seeds must be at least 1, got {args.seeds}")
    if not Path(args.data).is_dir():
        raise TrainingError(f"--data {args.data}: no such directory; run crucible-train prepare first")
    base: dict[str, Any] = {"preset": args.preset, "data": os.path.abspath(args.data), "steps": args.steps}
    base |= {name: getattr(args, name) for name in ("batch", "lr") if getattr(args, name) is not None}
    base |= dict(_pair(text, "--set", "NAME=VALUE") for text in args.set)
    rates = {name: _rate(value) for name, value in (_pair(text, "--lr-for", "VARIANT=R") for text in args.lr_for)}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    return plan(parse_axes(name.strip() for name in args.axes.split(",") if name.strip()), list(seeds), base, rates)


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise TrainingError(f"{option} takes {form}, got {text!r}")
    return name.replace("-", "_") if option == "--set" else name, value


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise TrainingError(f"--lr-for: not a learning rate: {text!r}") from None


def _executor(args: argparse.Namespace, directory: Path) -> tuple[Executor, int]:
    """The executor asked for, and how many runs it has going at once."""
    if args.executor == "ray":
        from crucible_train.ray_executor import RayExecutor

        executor = RayExecutor(
            directory,
            address=args.ray_address,
            jobs=args.jobs,
            shared=args.ray_shared,
            node_dir=args.ray_node_dir,
            cpus=args.ray_cpus,
        )
        return executor, executor.slots
    from crucible_train.local_executor import LocalExecutor, visible_gpus

    gpus = visible_gpus() if args.gpus is None else [name.strip() for name in args.gpus.split(",") if name.strip()]
    return LocalExecutor(directory, gpus, args.jobs), max(1, len(gpus)) * args.jobs


def _sweep(runs: list[PlannedRun], directory: Path, executor: Executor, slots: int, steps: int) -> int:
    from crucible_train.sweep import Sweep
    from crucible_train.sweep_status import StatusTable

    table = StatusTable(directory, steps, slots, sys.stdout)
    sweep = Sweep(runs, directory, executor, on_event=table.event, on_tick=table.tick)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the runs save and stop
    try:
        failed = sweep.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    for item in failed:
        print(f"failed: {item.run.name}: {item.detail}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} of {len(runs)} runs failed; logs in {directory / 'logs'}", file=sys.stderr)
        return FAILED
    print(f"all {len(runs)} runs are done; see them with: crucible-train analyze {directory}")
    return 0
