"""Variants of the training step that ``python -m crucible_train.throughput`` compares."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from crucible_train.compute import Compute
from crucible_train.errors import TrainingError

MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "none")
"""Modes of torch.compile; ``none`` runs uncompiled."""

REFERENCE = Compute(fused_projections=False, loss="plain", residual="float32", attention_backend="default", gqa="fused")
"""What a plain training loop does: a matrix a projection, whole logits, autocast, torch's choice of attention."""


@dataclass(frozen=True)
class Variant:
    """How a step computes, and how it is compiled."""

    compute: Compute
    mode: str = "default"


NAMED: dict[str, Variant] = {
    "reference": Variant(REFERENCE),
    "reference+projections": Variant(REFERENCE.replace(fused_projections=True)),
    "reference+loss": Variant(REFERENCE.replace(loss="fused")),
    "reference+residual": Variant(REFERENCE.replace(residual="compute")),
    "reference+cudnn": Variant(REFERENCE.replace(attention_backend="cudnn")),
    "reference+flash": Variant(REFERENCE.replace(attention_backend="flash")),
    "ours": Variant(Compute()),
    "ours-flash": Variant(Compute(attention_backend="flash")),
    "ours-materialised": Variant(Compute(gqa="materialised")),
    "ours-plain-loss": Variant(Compute(loss="plain")),
    "ours-plain-mlp": Variant(Compute(mlp="plain")),
    "ours-plain-qkv": Variant(Compute(qkv="plain")),
    "ours-fp8-head": Variant(Compute(head_matmul="fp8")),
    "ours-fp8-linear": Variant(Compute(matmul="fp8")),
    "fast": Variant(Compute(matmul="fp8", head_matmul="fp8")),
    "fast-plain-mlp": Variant(Compute(matmul="fp8", head_matmul="fp8", mlp="plain")),
    "fast-plain-qkv": Variant(Compute(matmul="fp8", head_matmul="fp8", qkv="plain")),
    "fast-two": Variant(Compute(matmul="fp8", head_matmul="fp8-two")),
    "fast-after": Variant(Compute(matmul="fp8-after", head_matmul="fp8")),
    "fast-tensor": Variant(Compute(matmul="fp8-tensor", head_matmul="fp8")),
    "ours-graphs": Variant(Compute(), "reduce-overhead"),
    "ours-autotune": Variant(Compute(), "max-autotune-no-cudagraphs"),
}

_WHOLE_NUMBERS = ("chunk",)
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def parse_variant(text: str) -> Variant:
    """A name of NAMED, followed by any number of ``:switch=value`` such as ``ours:chunk=4096:mode=none``.

    Raises TrainingError for a name, switch or value that does not exist.
    """
    name, *changes = text.split(":")
    if name not in NAMED:
        raise TrainingError(f"variant must be one of {', '.join(NAMED)}, got {name!r}")
    variant = NAMED[name]
    for change in changes:
        switch, separator, value = change.partition("=")
        if not separator:
            raise TrainingError(f"a change to a variant is switch=value, got {change!r}")
        variant = _changed(variant, switch, value)
    return variant


def _changed(variant: Variant, switch: str, value: str) -> Variant:
    if switch == "mode":
        if value not in MODES:
            raise TrainingError(f"mode must be one of {', '.join(MODES)}, got {value!r}")
        return dataclasses.replace(variant, mode=value)
    parsed: object = value
    if switch == "fused_projections":
        if value not in _TRUTHS:
            raise TrainingError(f"fused_projections must be true or false, got {value!r}")
        parsed = _TRUTHS[value]
    if switch in _WHOLE_NUMBERS:
        if not value.isdecimal():
            raise TrainingError(f"{switch} must be a whole number, got {value!r}")
        parsed = int(value)
    return dataclasses.replace(variant, compute=variant.compute.replace(**{switch: parsed}))
