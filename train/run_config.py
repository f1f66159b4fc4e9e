"""RunConfig: everything that decides a training run, as one structure that config.json keeps."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from crucible_train.compute import Precision
from crucible_train.errors import TrainingError
from crucible_train.manifest import MANIFEST_FILE

LEARNING_RATES = {"tiny": 3e-3, "nano": 2e-3, "30m": 1e-3, "120m": 6e-4, "350m": 3e-4}
"""Peak learning rates where none is given: smaller for larger models, after GPT-3's table (arXiv:2005.14165)."""
FINE_TUNING_SHARE = 0.1
"""Of that rate, for a run that starts from trained weights."""

MAX_SEED = 2**63 - 1

COUNTS = ("steps", "schedule_steps", "batch", "grad_accum", "context_length")
INTERVALS = ("warmup_steps", "eval_every", "eval_tokens", "save_every", "sample_every")

ARCHITECTURE = ("preset", "attention", "position", "activation", "norm", "placement", "tied")
"""Fields that --init-from replaces by the checkpoint's own."""

WITHOUT_EFFECT = frozenset({"data", "out", "device", "compile", "zero1", "save_every", "sample_every", "tensorboard"})
"""Fields that leave the losses as they are, up to rounding; ``data`` is compared by content, not by path."""


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run. Sizes in tokens unless said; ``batch`` is sequences a micro-batch and device.

    schedule_steps: length of the learning-rate schedule, None for ``steps``; a run that will be continued gets its
    full length here. data_seed: orders the data, None for ``seed``. compile: None for yes on a GPU and no on a CPU.
    ``auto`` is resolved when the run starts.
    """

    data: str
    out: str = "runs/run"
    preset: str = "nano"
    attention: Literal["mha", "gqa", "mqa"] = "gqa"
    position: Literal["rope", "alibi", "learned", "none"] = "rope"
    activation: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    placement: Literal["pre", "post"] = "pre"
    tied: bool = True
    context_length: int | None = None
    steps: int = 1000
    schedule_steps: int | None = None
    batch: int = 8
    grad_accum: int = 1
    lr: float | None = None
    min_lr_ratio: float = 0.1
    warmup_steps: int | None = None
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_fraction: float = 0.2
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    matmul: Precision = "bf16"
    gqa: Literal["fused", "materialised"] = "fused"
    compile: bool | None = None
    seed: int = 0
    data_seed: int | None = None
    eval_every: int = 250
    eval_tokens: int = 262_144
    save_every: int = 250
    sample_every: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    zero1: bool = False
    init_from: str | None = None
    tensorboard: bool = False

    @property
    def peak_lr(self) -> float:
        """``lr``, or the preset's own."""
        if self.lr is not None:
            return self.lr
        return LEARNING_RATES.get(self.preset, 1e-3) * (FINE_TUNING_SHARE if self.init_from is not None else 1.0)

    @property
    def schedule_length(self) -> int:
        """Steps from the first update to the lowest learning rate."""
        return self.steps if self.schedule_steps is None else self.schedule_steps

    @property
    def warmup(self) -> int:
        """``warmup_steps``, or a twentieth of the schedule."""
        return max(1, self.schedule_length // 20) if self.warmup_steps is None else self.warmup_steps

    @property
    def order_seed(self) -> int:
        """The seed of the data order."""
        return self.seed if self.data_seed is None else self.data_seed

    def check(self) -> None:
        """Raises TrainingError naming the first field with an impossible value."""
        for low, names in ((1, COUNTS), (0, INTERVALS)):
            for name in names:
                value = getattr(self, name)
                if value is not None and value < low:
                    raise TrainingError(f"{name} must be at least {low}, got {value}")
        for name in ("seed", "data_seed"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_SEED:
                raise TrainingError(f"{name} must lie in 0 … {MAX_SEED}, got {value}")
        positive = {"lr": self.peak_lr, "clip": self.clip}
        for name, number in positive.items():
            if not 0 < number < float("inf"):  # NaN fails too
                raise TrainingError(f"{name} must be a positive number, got {number}")
        shares = {"min_lr_ratio": self.min_lr_ratio, "decay_fraction": self.decay_fraction}
        for name, number in shares.items():
            if not 0 <= number <= 1:
                raise TrainingError(f"{name} must lie between 0 and 1, got {number}")
        if not 0 <= self.weight_decay < float("inf"):
            raise TrainingError(f"weight_decay must be 0 or more, got {self.weight_decay}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise TrainingError(f"betas must lie in 0 … 1 (1 excluded), got {self.betas}")
        if self.schedule_length < self.steps:
            raise TrainingError(f"schedule_steps ({self.schedule_length}) is below steps ({self.steps})")
        if self.warmup > self.schedule_length:
            raise TrainingError(f"warmup_steps ({self.warmup}) is above the schedule's {self.schedule_length} steps")


def effective(config: RunConfig) -> dict[str, Any]:
    """The fields that decide the losses, defaults that depend on other fields filled in; data by its manifest."""
    values = {name: getattr(config, name) for name in config.__struct_fields__ if name not in WITHOUT_EFFECT}
    values |= {
        "lr": config.peak_lr,
        "schedule_steps": config.schedule_length,
        "warmup_steps": config.warmup,
        "data_seed": config.order_seed,
        "betas": list(config.betas),
        "data": data_identity(config.data),
    }
    if config.init_from is not None:  # the architecture is the checkpoint's
        values |= dict.fromkeys(ARCHITECTURE)
    return values


def config_hash(config: RunConfig) -> str:
    """16 hexadecimal digits over everything that changes results: not paths, devices or how often to save."""
    text = json.dumps(effective(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def data_identity(directory: str) -> str:
    """SHA-256 of the manifest of prepared data; the path itself where there is none."""
    try:
        return hashlib.sha256((Path(directory) / MANIFEST_FILE).read_bytes()).hexdigest()
    except OSError:
        return directory


def changed_field(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field of effective() that a resumed run would change, with both values; None if it may go on.

    ``steps`` may grow, and the schedule with it where it follows ``steps``.
    """
    for name, value in after.items():
        old = before.get(name)
        if old == value or (name == "steps" and value > old):
            continue
        if name in ("schedule_steps", "warmup_steps") and before["schedule_steps"] == before["steps"] < after["steps"]:
            continue
        return name, old, value
    return None
