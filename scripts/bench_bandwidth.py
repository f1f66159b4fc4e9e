"""Memory bandwidth, and the decode speed that it allows.

    python scripts/bench_bandwidth.py                     # ceilings of the presets
    python scripts/bench_bandwidth.py --model DIRECTORY   # of one checkpoint

A token generated alone reads every matrix once, so tokens/s ≤ bandwidth / bytes of weights. Bandwidth is measured
three ways: a matrix times a vector (what decoding does), a sum (read only) and a copy (read and write).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch
from gpu_timing import Envelope, Summary, choose_device, describe, rounds, warm, warn_of_spread

from crucible.checkpoint import EMBEDDING, expected_tensors, open_checkpoint, parameter_count
from crucible.config.model import ModelConfig
from crucible_train.presets import PRESETS, model_config

BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + 2 / 32}
"""Bytes a weight; int8 has a 16-bit scale for each output and 32 inputs."""


def decode_bytes(config: ModelConfig, dtype: str) -> float:
    """Bytes that one token reads: every matrix once, of the embedding only the head's use of it."""
    shapes = expected_tensors(config)
    if not config.tied_embeddings:
        del shapes[EMBEDDING]
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and "embed_positions" not in name}
    vectors = parameter_count({name: shape for name, shape in shapes.items() if len(shape) == 1})
    return parameter_count(matrices) * BYTES[dtype] + 4 * vectors


def measure(
    megabytes: int, trials: int, iterations: int, device: torch.device, seconds: float
) -> tuple[dict[str, Summary], str]:
    """GB/s by way of reading, and the envelope. Buffers far larger than any cache."""
    columns = 4096
    rows = megabytes * 1_000_000 // (4 * columns)
    matrix = torch.randn(rows, columns, device=device)
    vector, out, copy = torch.randn(columns, device=device), torch.empty(rows, device=device), torch.empty_like(matrix)
    works = {
        "matrix × vector": lambda: torch.mv(matrix, vector, out=out),
        "sum": lambda: matrix.sum(),
        "copy": lambda: copy.copy_(matrix),
    }
    moved = {"matrix × vector": 1, "sum": 1, "copy": 2}
    warm(works["sum"], device, seconds)
    with Envelope(device) as envelope:
        times = rounds(works, trials, iterations, device)
    size = matrix.numel() * matrix.element_size() / 1e9
    results = {name: Summary.of([moved[name] * size / t for t in values]) for name, values in times.items()}
    return results, envelope.text()


def ceilings(configs: dict[str, ModelConfig], bandwidth: float) -> dict[str, dict[str, float]]:
    """Tokens/s by model and weight type at ``bandwidth`` GB/s."""
    return {
        name: {dtype: bandwidth * 1e9 / decode_bytes(config, dtype) for dtype in BYTES}
        for name, config in configs.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the presets)")
    parser.add_argument("--megabytes", type=int, default=1024, help="size of each buffer")
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warm", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args()
    device = choose_device(args.device)
    if args.model:
        with open_checkpoint(args.model) as checkpoint:
            configs = {args.model: checkpoint.config}
    else:
        configs = {name: model_config(name) for name in PRESETS if name != "tiny"}
    results, envelope = measure(args.megabytes, args.trials, args.iterations, device, args.warm)
    best = max(results.values(), key=lambda summary: summary.median).median
    table = ceilings(configs, best)
    if args.json:
        speeds = {name: asdict(summary) for name, summary in results.items()}
        print(json.dumps({"device": describe(device), "envelope": envelope, "gb_s": speeds, "tokens_s": table}))
        return 0
    print(describe(device))
    print(f"{args.megabytes} MB, {args.trials} rounds of {args.iterations}; {envelope}")
    for name, summary in results.items():
        print(f"{name:20s} {summary.line('GB/s')}")
    print(f"\nMost tokens/s of one sequence at {best:.0f} GB/s (GB a token)")
    for name, row in table.items():
        cells = (f"{dtype} {speed:9,.0f} ({best / speed:.3f})" for dtype, speed in row.items())
        print(f"{name:20s} {'   '.join(cells)}")
    for line in warn_of_spread(results):
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
