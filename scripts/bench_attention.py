"""Is one way of attention faster than another? A whole training step of each, in paired rounds.

    python scripts/bench_attention.py --preset 120m --batch 16 --context 1024 [--compile]

MHA; GQA and MQA with K and V shared inside the kernel (fused) or repeated first (materialised). All variants run in
every round, starting with another each time: a difference counts only where it is beyond the spread.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain

import torch
from gpu_timing import Envelope, Summary, choose_device, describe, rounds, synchronise, warm, warn_of_spread

from crucible_train.presets import PRESETS, model_config
from crucible_train.transformer import Transformer

VARIANTS = {
    "MHA": ("mha", "fused"),
    "GQA materialised": ("gqa", "materialised"),
    "GQA fused": ("gqa", "fused"),
    "MQA materialised": ("mqa", "materialised"),
    "MQA fused": ("mqa", "fused"),
}


def step_of(name: str, args: argparse.Namespace, device: torch.device) -> Callable[[], object]:
    """Forward and backward of one micro-batch."""
    attention, gqa = VARIANTS[name]
    torch.manual_seed(0)
    config = model_config(args.preset, context_length=args.context, attention=attention)
    model = Transformer(config, gqa=gqa).to(device)
    loss = torch.compile(model.loss) if args.compile else model.loss
    tokens = torch.randint(config.token_count, (args.batch, args.context), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss(tokens, tokens).backward()
        model.zero_grad(set_to_none=True)

    return step


def peak_gigabytes(step: Callable[[], object], device: torch.device) -> float | None:
    """Peak memory of ``step`` above what the variants hold already; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronise(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronise(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9


def verdict(summaries: dict[str, Summary]) -> str:
    """The range of the medians against the noise floor: the widest spread of one variant."""
    medians = [summary.median for summary in summaries.values()]
    total = max(medians) / min(medians) - 1
    noise = max(summary.spread for summary in summaries.values())
    said = "no variant is faster than another here" if total <= noise else "the extremes differ by more than noise"
    return f"range of medians {total:.1%}, noise floor {noise:.1%}: {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="30m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warm", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args()
    device = choose_device(args.device)
    steps = {name: step_of(name, args, device) for name in VARIANTS}
    for step in chain(steps.values(), steps.values()):  # compiles, and lets the allocator settle
        step()
    memory = {name: peak_gigabytes(step, device) for name, step in steps.items()}
    warm(steps["MHA"], device, args.warm)
    with Envelope(device) as envelope:
        times = rounds(steps, args.trials, args.iterations, device)
    results = {name: Summary.of([1e3 * second for second in values]) for name, values in times.items()}
    if args.json:
        rows = {name: {**asdict(summary), "peak_gb": memory[name]} for name, summary in results.items()}
        print(json.dumps({"device": describe(device), "envelope": envelope.text(), "ms": rows}))
        return 0
    print(describe(device))
    print(f"{args.preset}, {args.batch} × {args.context}, {'compiled' if args.compile else 'eager'}; {envelope.text()}")
    for name, summary in results.items():
        held = "" if memory[name] is None else f"   peak {memory[name]:.2f} GB"
        print(f"{name:18s} {summary.line('ms/step')}{held}")
    print(verdict(results))
    for line in warn_of_spread(results):
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
