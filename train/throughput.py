"""Training throughput of variants of the step, compared in one interleaved run.

``python -m crucible_train.throughput --preset 120m --batch 64 --variants reference,ours,fast --out FILE`` prints
a JSON line a variant. Every variant starts from the same weights and sees the same batches; rounds go through all
variants in turn, so that a clock or a neighbour that changes meets them alike. A variant that fails is reported and
left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from crucible.config.model import ModelConfig
from crucible.errors import CrucibleError
from crucible_train.distributed import choose_device
from crucible_train.hardware import flops_per_token
from crucible_train.kernel_times import kernel_times
from crucible_train.presets import PRESETS, model_config, parameter_counts
from crucible_train.run_meter import matrix_parameters
from crucible_train.throughput_check import check
from crucible_train.throughput_step import Data, Plan, Subject, learnable_data, wait
from crucible_train.throughput_variants import NAMED, Variant, parse_variant


def measure(preset: str, batch: int, context: int, steps: int, variant: str, **options: Any) -> dict[str, Any]:
    """One variant alone, as compare() reports it; ``options`` are those of Plan and ``device``."""
    device = options.pop("device", "auto")
    plan = Plan(batch=batch, context=context, steps=steps, **options)
    return compare(preset, [variant], plan, device=device)[0]


def compare(
    preset: str,
    variants: Sequence[str],
    plan: Plan,
    *,
    device: str = "auto",
    vocab_size: int | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
    profile: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Trains every variant in turn and returns a record for each, in the order given.

    ``report`` is called with each record once all is measured. ``speedup`` is the median over rounds of tokens per
    second by those of the first variant in the same round. ``profile``: variants whose kernels are listed on standard
    error afterwards. A record of a variant that failed holds ``error``.
    """
    settings = {name: parse_variant(name) for name in variants}
    place = choose_device(device)
    config = model_config(preset, vocab_size=vocab_size, context_length=plan.context)
    prepare_torch(len(settings))
    data = learnable_data(config.vocab_size, plan, place)
    subjects: dict[str, Subject] = {}
    errors: dict[str, str] = {}
    end = time.monotonic() + plan.limit_seconds
    for turn in range(plan.rounds):
        for name, variant in settings.items():
            if name in errors or time.monotonic() > end:
                continue
            try:
                if name not in subjects:
                    subjects[name] = Subject(name, variant, config, plan, place)
                subjects[name].round(data, plan)
                rate = plan.steps * plan.batch * plan.context / subjects[name].seconds[-1]
                print(f"round {turn + 1}: {name}: {rate:,.0f} tok/s", file=sys.stderr, flush=True)
            except Exception as error:  # a kernel, a compiler or memory: whatever it is, the others go on
                traceback.print_exc()
                errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
                subjects.pop(name, None)
                release(place)
    records = []
    first = subjects.get(variants[0])
    for name in settings:
        common = describe(name, preset, config, plan, place, settings[name])
        if name not in subjects:
            records.append({**common, "error": errors.get(name, "not run: the time was up")})
        else:
            records.append({**common, **results(subjects[name], first, config, plan)})
        if report is not None:
            report(records[-1])
    for name in profile:
        if name in subjects:
            print_profile(subjects[name], data)
    return records


def describe(
    name: str, preset: str, config: ModelConfig, plan: Plan, device: torch.device, variant: Variant
) -> dict[str, Any]:
    """What a record says of the run rather than of its result."""
    return {
        "variant": name,
        "preset": preset,
        "parameters": parameter_counts(config).total,
        **asdict(plan),
        "mode": variant.mode,
        **asdict(variant.compute),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def results(subject: Subject, first: Subject | None, config: ModelConfig, plan: Plan) -> dict[str, Any]:
    """The numbers of one variant; model FLOPs are those of a run's log (hardware.flops_per_token)."""
    tokens = plan.steps * plan.batch * plan.context
    rates = [tokens / seconds for seconds in subject.seconds]
    median = statistics.median(rates)
    width = config.num_heads * config.head_dim
    flops = flops_per_token(matrix_parameters(config), config.num_layers, width, plan.context)
    losses = torch.stack(subject.losses).tolist()
    record = {
        "tokens_per_second": round(median, 1),
        "slowest": round(min(rates), 1),
        "fastest": round(max(rates), 1),
        "spread": round((max(rates) - min(rates)) / median, 4),
        "tflops": round(median * flops / 1e12, 2),
        "step_ms": round(1000 * statistics.median(subject.seconds) / plan.steps, 3),
        "first_step_seconds": round(subject.first_seconds, 2),
        "peak_memory_gb": round(subject.peak_bytes / 1e9, 3),
        "first_loss": losses[0],
        "final_loss": statistics.fmean(losses[-5:]),
        "trained_steps": subject.steps,
    }
    if first is not None:
        pairs = zip(first.seconds, subject.seconds, strict=False)  # the time may be up amid a round
        record["speedup"] = round(statistics.median(theirs / own for theirs, own in pairs), 4)
    return record


def print_profile(subject: Subject, data: Data, steps: int = 3) -> None:
    """The kernels of a few steps by total time, on standard error."""
    from torch.profiler import ProfilerActivity, profile

    cuda = subject.device.type == "cuda"
    try:
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
            for _ in range(steps):
                subject.step(data)
            wait(subject.device)
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)
        print(f"profile of {subject.name}, {steps} steps\n{table}", file=sys.stderr, flush=True)
    except Exception:  # a profiler that does not work here costs no results
        traceback.print_exc()


def prepare_torch(variants: int) -> None:
    """The process-wide settings of every variant."""
    torch.set_float32_matmul_precision("high")
    # Variants share code objects: each needs its own compilations of them.
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 8 * (variants + 1))


def release(device: torch.device) -> None:
    """Lets go of what a failed variant held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m crucible_train.throughput", description="compare training steps")
    parser.add_argument("--preset", choices=list(PRESETS), default="120m")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle", type=int, default=2, help="untimed steps at the start of a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-seconds", type=float, default=86400.0, help="start no round after this time")
    parser.add_argument("--variants", default="reference,ours", help=f"of {', '.join(NAMED)}; with :switch=value")
    parser.add_argument("--profile", default="", metavar="VARIANTS", help="list the kernels of these")
    parser.add_argument("--check", action="store_true", help="compare gradients with float32's instead of timing")
    parser.add_argument("--kernels", action="store_true", help="time kernels and products alone instead")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the JSON lines here too")
    args = parser.parse_args(arguments)

    def report(record: dict[str, Any]) -> None:
        line = json.dumps(record)
        print(line, flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(line + "\n")

    try:
        plan = Plan(args.batch, args.context, args.steps, args.rounds, args.settle, args.seed, args.limit_seconds)
        if args.kernels:
            kernel_times(report)
            return 0
        if args.check:
            place = choose_device(args.device)
            prepare_torch(len(args.variants.split(",")))
            return int(not check(args.preset, args.variants.split(","), plan, place, report=report))
        profile = [name for name in args.profile.split(",") if name]
        compare(args.preset, args.variants.split(","), plan, device=args.device, report=report, profile=profile)
    except CrucibleError as error:
        print(f"crucible-train: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
