"""The PyTorch side of a comparison of logits: what the trained model computes for token ids.

    python scripts/reference_logits.py MODEL --tokens 464,2159,318,1719            # a summary
    python scripts/reference_logits.py MODEL --tokens 464,2159,318,1719 --json     # the logits of the last position
    python scripts/reference_logits.py MODEL --tokens 464,2159,318,1719 --compare  # against `crucible logits`

MODEL is a run or a model directory. --compare exits with 1 unless every logit is within 1e-5 of the largest |logit|
and the ten likeliest ids are the same in the same order.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from crucible.checkpoint import open_checkpoint
from crucible.errors import CrucibleError
from crucible_train.export_hf import trained_logits
from crucible_train.export_source import find_checkpoint

TOLERANCE = 1e-5


def reference(model: Path, tokens: list[int]) -> torch.Tensor:
    """Float32 logits [vocabulary] of the last of ``tokens``, by the model that training runs."""
    with open_checkpoint(model) as checkpoint:
        count = checkpoint.config.token_count
        if bad := [token for token in tokens if not 0 <= token < count]:
            raise SystemExit(f"error: token id {bad[0]} is outside the vocabulary of {count}")
        return trained_logits(checkpoint.config, checkpoint.read, torch.tensor([tokens]))[0, -1]


def engine(model: Path, tokens: list[int]) -> torch.Tensor:
    """The same by Crucible's engine, float32 weights on the CPU, in a process of its own."""
    ids = ",".join(map(str, tokens))
    command = [sys.executable, "-m", "crucible.cli", "logits", str(model), "--tokens", ids, "--quant", "f32"]
    result = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"error: crucible logits failed: {result.stderr.strip()}")
    return torch.tensor(json.loads(result.stdout))


def summary(logits: torch.Tensor) -> str:
    """Sum, extremes and the ten likeliest ids."""
    best = logits.topk(min(10, logits.numel()))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    top = "\n".join(f"  {number:8d} {value:12.6f}" for number, value in pairs)
    return f"sum {logits.double().sum():.4f}\nmin {logits.min():.6f}\nmax {logits.max():.6f}\n{top}"


def compare(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[str, bool]:
    """A line about the difference, and whether it is within bounds."""
    scale = float(ours.abs().max())
    worst = float((ours - theirs).abs().max())
    count = min(10, ours.numel())
    ordered = bool((ours.topk(count).indices == theirs.topk(count).indices).all())
    line = f"largest difference {worst:.3g} = {worst / scale:.3g} of the largest |logit| {scale:.6g}; top {count} "
    return line + ("in the same order" if ordered else "in another order"), worst <= TOLERANCE * scale and ordered


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--tokens", required=True, help="token ids separated by commas")
    parser.add_argument("--json", action="store_true", help="print the logits as JSON")
    parser.add_argument("--compare", action="store_true", help="compare with the engine")
    args = parser.parse_args()
    try:
        tokens = [int(part) for part in args.tokens.split(",")]
    except ValueError:
        parser.error(f"--tokens must be ids separated by commas, got {args.tokens!r}")
    try:
        model = find_checkpoint(args.model)
        logits = reference(model, tokens)
    except CrucibleError as error:
        raise SystemExit(f"error: {error}") from None
    if args.json:
        print(json.dumps(logits.tolist()))
    elif not args.compare:
        print(summary(logits))
    if not args.compare:
        return 0
    line, fine = compare(logits, engine(model, tokens))
    print(line, file=sys.stderr if args.json else sys.stdout)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
