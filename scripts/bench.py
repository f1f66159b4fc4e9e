"""Matrix product throughput at each precision: FP32, TF32, FP16, BF16, FP8 with and without fast accumulation.

    python scripts/bench.py                    # 4096³, 15 rounds of 50 products
    python scripts/bench.py --device cpu --size 512 --trials 3 --iterations 3

Every round measures all precisions, starting with another each time, after the device has been warmed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

import torch
from gpu_timing import Envelope, Summary, choose_device, describe, rounds, warm, warn_of_spread

Work = Callable[[], object]


def works(size: int, device: torch.device) -> tuple[dict[str, Work], dict[str, str]]:
    """The products of ``size``³ that the device can do, and for the others why not."""
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    able: dict[str, Work] = {"FP32": product(left, right, "highest")}
    unable: dict[str, str] = {}
    if device.type == "cuda":
        able["TF32"] = product(left, right, "high")
    else:
        unable["TF32"] = "needs a GPU"
    for name, dtype in (("FP16", torch.float16), ("BF16", torch.bfloat16)):
        able[name] = product(left.to(dtype), right.to(dtype), "highest")
    for name, fast in (("FP8 e4m3", False), ("FP8 e4m3 fast accum", True)):
        work = fp8_product(left, right, fast)
        try:
            if device.type != "cuda":
                raise RuntimeError("needs a GPU")
            work()
            able[name] = work
        except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
            unable[name] = str(error).splitlines()[0]
    return able, unable


def product(left: torch.Tensor, right: torch.Tensor, precision: str) -> Work:
    def work() -> torch.Tensor:
        torch.set_float32_matmul_precision(precision)
        return left @ right

    return work


def fp8_product(left: torch.Tensor, right: torch.Tensor, fast: bool) -> Work:
    """Through torch._scaled_mm: ``@`` has no FP8, and the right operand must be column-major."""
    a, b = left.to(torch.float8_e4m3fn), right.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=left.device)

    def work() -> object:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return work


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--warm", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args()
    device = choose_device(args.device)
    able, unable = works(args.size, device)
    warm(able["BF16"], device, args.warm)
    with Envelope(device) as envelope:
        times = rounds(able, args.trials, args.iterations, device)
    unit, scale = ("TFLOP/s", 1e12) if device.type == "cuda" else ("GFLOP/s", 1e9)
    flop = 2 * args.size**3 / scale
    results = {name: Summary.of([flop / value for value in values]) for name, values in times.items()}
    if args.json:
        speeds = {name: asdict(summary) for name, summary in results.items()}
        about = {"device": describe(device), "envelope": envelope.text()}
        print(json.dumps({**about, "unit": unit, "speed": speeds, "no": unable}))
        return 0
    print(describe(device))
    print(f"{args.size}³ products, {args.trials} rounds of {args.iterations}; {envelope.text()}")
    for name, summary in results.items():
        print(f"{name:20s} {summary.line(unit)}")
    for name, reason in unable.items():
        print(f"{name:20s} not here: {reason}")
    for line in warn_of_spread(results):
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
