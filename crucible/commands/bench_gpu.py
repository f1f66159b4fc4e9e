"""The modes of ``crucible bench`` that measure single kernels on a GPU: their parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from crucible.bench.command_line import counts, words
from crucible.commands.options import Subparsers, positive
from crucible.errors import ConfigError

if TYPE_CHECKING:
    from crucible.bench.report import Report

AddMode = Callable[..., argparse.ArgumentParser]


def add_modes(modes: Subparsers, add_mode: AddMode) -> None:
    """``add_mode`` is commands.bench's: a parser with what all modes share."""
    add_kernels(modes, add_mode)
    add_topk(modes, add_mode)
    add_attention(modes, add_mode)


def add_kernels(modes: Subparsers, add_mode: AddMode) -> None:
    parser = add_mode(modes, "kernels", "projections on a GPU by shape and rows, against its ceilings", run_kernels)
    parser.add_argument("--rows", type=counts, metavar="N,…", help="outputs of each matrix (default: those of 120m)")
    parser.add_argument("--cols", type=counts, metavar="K,…", help="inputs of each matrix, as many as --rows")
    parser.add_argument(
        "--batch",
        type=counts,
        default=[1, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024],
        metavar="N,…",
        help="rows of activations (default: 1,8,16,32,48,64,96,128,256,512,1024)",
    )
    parser.add_argument("--quant", choices=("int8", "f16", "f32"), default="int8", help="weight type (default: int8)")


def run_kernels(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    if (args.rows is None) != (args.cols is None) or len(args.rows or ()) != len(args.cols or ()):
        raise ConfigError("--rows and --cols are lists of one length: outputs and inputs of each matrix")
    from crucible.bench.kernels import SHAPES_OF_120M, kernels

    shapes = SHAPES_OF_120M if args.rows is None else list(zip(args.rows, args.cols, strict=True))
    return kernels(
        command, say, shapes=shapes, batches=args.batch, quant=args.quant, trials=args.trials, seed=args.seed
    )


def add_topk(modes: Subparsers, add_mode: AddMode) -> None:
    parser = add_mode(modes, "topk", "choosing tokens on a GPU, against rows of logits on the host", run_topk)
    parser.add_argument("--batch", type=counts, default=[1, 16, 64, 256], metavar="N,…", help="default: 1,16,64,256")
    parser.add_argument("--k", type=counts, default=[40, 500], metavar="K,…", help="candidates (default: 40,500)")
    parser.add_argument("--vocab", type=positive, default=50304, metavar="N", help="logits a row (default: 50304)")


def run_topk(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    if max(args.k) > args.vocab:
        raise ConfigError(f"--k {max(args.k)} is more than the --vocab of {args.vocab}")
    from crucible.bench.topk import topk

    return topk(command, say, batches=args.batch, ks=args.k, vocabulary=args.vocab, trials=args.trials, seed=args.seed)


def add_attention(modes: Subparsers, add_mode: AddMode) -> None:
    parser = add_mode(modes, "attention", "attention kernels on a GPU by length of the context", run_attention)
    variants = ["decode", "prefill", "reference"]
    parser.add_argument(
        "--variants", type=words(*variants), default=variants, metavar="V,…", help=f"default: {','.join(variants)}"
    )
    parser.add_argument(
        "--contexts", type=counts, default=[128, 512, 1024], metavar="N,…", help="default: 128,512,1024"
    )
    parser.add_argument("--batch", type=counts, default=[1, 16, 64], metavar="N,…", help="decode (default: 1,16,64)")
    parser.add_argument("--heads", type=positive, default=12, metavar="N", help="query heads (default: 12)")
    parser.add_argument("--kv-heads", type=positive, default=3, metavar="N", help="KV heads (default: 3)")
    parser.add_argument("--head-dim", type=positive, default=64, metavar="N", help="64 or 128 (default: 64)")
    parser.add_argument("--iters", type=positive, default=24, metavar="N", help="launches a trial (default: 24)")


def run_attention(args: argparse.Namespace, command: str, say: Callable[[str], None]) -> Report:
    from crucible.bench.attention import Heads, attention

    return attention(
        command,
        say,
        heads=Heads(args.heads, args.kv_heads, args.head_dim),
        variants=args.variants,
        batches=args.batch,
        contexts=args.contexts,
        iters=args.iters,
        trials=args.trials,
        seed=args.seed,
    )
