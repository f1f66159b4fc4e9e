"""Times of the kernels and FP8 products on a GPU, for choosing their launch parameters: a JSON line each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch

from crucible_train import fp8, swiglu

ROWS, VOCABULARY, WIDTH, INNER = 16384, 50304, 768, 2048
SOFTMAX_LAUNCHES = ((2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 32))
"""Block, warps."""
TILES = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 64, 8))
"""Rows, columns, warps."""

Report = Callable[[dict[str, Any]], None]


def kernel_times(report: Report) -> None:
    """Reports {"kernel", "ms", "gb_per_s" or "tflops"} of each, or its ``error``."""
    for part in (_softmax, _swiglu, _products):
        part(report)
        torch.cuda.empty_cache()


def _timed(report: Report, name: str, function: Callable[[], object], *, giga: float = 0.0, tera: float = 0.0) -> None:
    from triton.testing import do_bench

    try:
        ms = float(do_bench(function, warmup=5, rep=30))
    except Exception as error:  # launch parameters that a device refuses
        report({"kernel": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
        return
    rate = {"gb_per_s": round(giga / ms * 1000)} if giga else {"tflops": round(tera / ms * 1000)}
    report({"kernel": name, "ms": round(ms, 4), **rate})


def _softmax(report: Report) -> None:
    """Values turn to gradients of gradients after the first call in place: the time does not depend on them."""
    from crucible_train.softmax_kernel import losses_and_gradient
    from crucible_train.transpose_kernel import transpose

    logits = torch.randn(ROWS, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(VOCABULARY, (ROWS,), device="cuda")
    rounded = torch.empty(logits.shape, device="cuda", dtype=fp8.E5M2)
    size = logits.numel() / 1e9
    for block, warps in SOFTMAX_LAUNCHES:
        run = partial(losses_and_gradient, logits, targets, block=block, warps=warps)
        name = f"softmax block {block} warps {warps}"
        _timed(report, f"{name} e5m2", partial(run, in_place=False, rounded=rounded), giga=3 * size)
        _timed(report, f"{name} in place", partial(run, in_place=True), giga=4 * size)
    for tile in TILES:
        _timed(report, f"transpose {tile}", partial(transpose, rounded, *tile), giga=2 * size)
    _timed(report, "transpose torch", lambda: rounded.view(torch.uint8).t().contiguous(), giga=2 * size)


def _swiglu(report: Report) -> None:
    both = torch.randn(4 * ROWS, 2 * INNER, device="cuda", dtype=torch.bfloat16)
    d_inner = torch.randn(4 * ROWS, INNER, device="cuda", dtype=torch.bfloat16)
    size = d_inner.numel() / 1e9
    for name, use_fp8 in (("bf16", False), ("fp8", True)):
        _timed(report, f"swiglu {name}", partial(swiglu.product, both, use_fp8), giga=(6 - use_fp8) * size)
        backward = partial(swiglu.product_gradient, both, d_inner, use_fp8)
        _timed(report, f"swiglu backward {name}", backward, giga=(12 + 2 * use_fp8) * size)


def _products(report: Report) -> None:
    rows = 4 * ROWS
    for outputs, inputs in ((2 * INNER, WIDTH), (WIDTH, INNER), (WIDTH + WIDTH // 2, WIDTH), (WIDTH, 2 * INNER)):
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        w8, w_scale = fp8.quantise(w, fp8.E4M3)
        shape, tera = f"{rows}x{inputs}x{outputs}", 2 * rows * inputs * outputs / 1e12
        _timed(report, f"{shape} bf16", partial(torch.mm, x, w.t()), tera=tera)
        for kind in (fp8.E4M3, fp8.E5M2):
            for scales in get_args(fp8.Scales):
                x8, x_scale = fp8.quantise_as(x, kind, scales)
                run = partial(fp8.scaled_matmul, x8, w8.t(), x_scale, w_scale, torch.bfloat16)
                name = f"{shape} {kind} {scales}"
                _timed(report, name, partial(run, fast=kind == fp8.E4M3, scales=scales), tera=tera)
