"""``crucible-train probe-batch``: the largest useful batch of a preset on this device."""

from __future__ import annotations

import argparse
from typing import get_args

from crucible_train.compute import Precision
from crucible_train.errors import TrainingError

HELP = "find the largest useful batch, by throughput and memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="120m", help="model size (120m)")
    parser.add_argument("--context-length", type=int, metavar="N", help="tokens a sequence (the preset's)")
    parser.add_argument("--vocabulary-size", type=int, metavar="N", help="rows of the embedding (the preset's)")
    parser.add_argument("--start", type=int, default=1, metavar="B", help="first batch to try (1)")
    parser.add_argument("--max-batch", type=int, default=1024, metavar="B", help="last batch to try (1024)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="timed steps a batch (5)")
    parser.add_argument("--memory-gb", type=float, metavar="GB", help="memory there is (default: the device's)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--matmul", choices=get_args(Precision), default="bf16")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")


def run(args: argparse.Namespace) -> int:
    from crucible_train.presets import model_config

    for name in ("context_length", "vocabulary_size", "memory_gb", "steps"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):  # NaN fails too
            raise TrainingError(f"--{name.replace('_', '-')} must be a positive number, got {value}")
    config = model_config(args.preset, vocab_size=args.vocabulary_size, context_length=args.context_length)
    import torch

    from crucible_train.compile_failure import readable_compile_failure
    from crucible_train.distributed import choose_device
    from crucible_train.probe import Probe, capacity_bytes, decide, search
    from crucible_train.run_start import compute_dtype

    device = choose_device(args.device)
    bfloat16 = compute_dtype(args.dtype, device) is torch.bfloat16
    capacity = int(args.memory_gb * 1e9) if args.memory_gb is not None else capacity_bytes(device)
    probe = Probe(config, device, bfloat16=bfloat16, matmul=args.matmul, compiled=args.compile, steps=args.steps)
    with readable_compile_failure("Leave --compile out to go without"):
        points = search(probe, capacity, start=args.start, largest=args.max_batch)
    decision = decide(points, capacity)
    print(f"{'batch':>6} {'ms/step':>10} {'peak GB':>8} {'tok/s':>12}")
    for point in points:
        fault = decision.faults.get(point.batch, "")
        print(f"{point.batch:>6} {point.milliseconds:>10.1f} {point.peak_bytes / 1e9:>8.2f} "
              f"{point.tokens_per_second:>12,.0f}  {fault}".rstrip())  # fmt: skip
    if decision.batch is None:
        raise TrainingError(f"not even batch {points[0].batch} is useful here: {decision.faults[points[0].batch]}")
    tokens = decision.batch * config.context_length
    more = "" if decision.faults else "; the last one tried, --max-batch goes further"
    print(f"largest useful batch: {decision.batch} ({tokens:,} tokens a micro-batch of {args.preset}{more})")
    return 0
