"""Can this machine train and serve on its GPU, and with native code? One line a check; exit code 1 if one fails.

    python scripts/verify_gpu.py

A PyTorch without kernels for the GPU's architecture still works where it holds PTX to translate at start, slower and
easy to miss: so the list of architectures is looked at, instead of trusting that CUDA "works".
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

import torch
from gpu_timing import describe, query_gpu, seconds

MIN_CUDA = {(12, 0): (12, 8), (10, 0): (12, 8), (9, 0): (11, 8)}
"""The first CUDA that knows each compute capability, where that is not long ago."""


class CheckError(Exception):
    """What a check found wrong, and what to do."""


def native_code(capability: tuple[int, int], architectures: list[str]) -> str:
    """How kernels for ``capability`` come out of a build for ``architectures`` (torch.cuda.get_arch_list()).

    Machine code runs on the same major version from its minor version on; PTX on everything newer.
    """
    major, minor = capability
    found = re.compile(r"(sm|compute)_(\d+)(\d)[a-z]?$")
    entries = [(match[1], int(match[2]), int(match[3])) for name in architectures if (match := found.match(name))]
    if any(kind == "sm" and m == major and n <= minor for kind, m, n in entries):
        return "native"
    if any(kind == "compute" and (m, n) <= (major, minor) for kind, m, n in entries):
        return "ptx"
    return "none"


def check_architecture(device: torch.device) -> str:
    capability, architectures = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    name = f"sm_{capability[0]}{capability[1]}"
    how = native_code(capability, architectures)
    if how != "native":
        translated = "is translated from PTX at every start" if how == "ptx" else "cannot run"
        listed = " ".join(architectures)
        raise CheckError(f"code for {name} {translated}: torch was built for {listed}; install a build that has {name}")
    return f"{name} is native in {' '.join(architectures)}"


def check_cuda(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    needed = MIN_CUDA.get(capability)
    have = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if needed and have < needed:
        wanted = ".".join(map(str, needed))
        raise CheckError(f"CUDA {torch.version.cuda} is too old for this GPU; install torch for CUDA {wanted} or newer")
    return f"CUDA {torch.version.cuda}"


def check_bf16(device: torch.device) -> str:
    left, right = (torch.randn(256, 256, device=device) for _ in range(2))
    exact = left.double() @ right.double()
    error = float(((left.bfloat16() @ right.bfloat16()).double() - exact).norm() / exact.norm())
    if not error < 0.02:
        raise CheckError(f"a bf16 product is off by {error:.3g}; the GPU or its driver is broken")
    return f"bf16 product within {error:.1e}"


def check_fp8(device: torch.device) -> str:
    """torch._scaled_mm on e4m3, compared with float64; needs sm_89 or newer."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "FP8: not on this architecture (sm_89 or newer); use bf16"
    left, right = (torch.randn(256, 256, device=device) for _ in range(2))
    a, b = left.to(torch.float8_e4m3fn), right.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    try:
        product = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise CheckError(f"FP8 products do not work: {str(error).splitlines()[0]}") from None
    exact = a.double() @ b.double()
    error = float((product.double() - exact).norm() / exact.norm())
    if not error < 0.02:
        raise CheckError(f"an FP8 product is off by {error:.3g}")
    return f"FP8 e4m3 product within {error:.1e}"


def check_power(device: torch.device) -> str:
    sample = query_gpu(device.index or 0)
    if sample is None:
        return "power: nvidia-smi does not answer, so measurements cannot record their power limit"
    limit, top, *_ = (float("nan") if value is None else value for value in sample)
    return f"enforced power limit {limit:.0f} W, maximum SM clock {top:.0f} MHz"


def check_speed(device: torch.device) -> str:
    size = 4096
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds(lambda: left @ right, 20, device)
    return f"bf16 {size}³: {2 * size**3 / seconds(lambda: left @ right, 50, device) / 1e12:.0f} TFLOP/s (once, roughly)"


CHECKS: tuple[Callable[[torch.device], str], ...] = (
    check_cuda, check_architecture, check_bf16, check_fp8, check_power, check_speed,
)  # fmt: skip


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else f" (this torch, {torch.__version__}, was built without CUDA)"
        print(f"FAIL no GPU is visible to PyTorch{built}", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    print(describe(device))
    failed = 0
    for check in CHECKS:
        try:
            print(f"ok   {check(device)}")
        except CheckError as error:
            failed += 1
            print(f"FAIL {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
