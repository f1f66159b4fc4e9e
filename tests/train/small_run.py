"""A little prepared text and runs on it that take seconds on a CPU."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crucible_train.prepare import prepare
from crucible_train.run_config import RunConfig
from crucible_train.trainer_state import TRAINER_FILE

WORDS = ("alpha", "beta", "river", "stone", "light", "seven", "under", "because")
VOCABULARY = 512


def make_data(directory: Path, *, documents: int = 300, val_fraction: float = 0.1) -> Path:
    """Documents of random words in a vocabulary of 513 ids, prepared in ``directory``."""
    draw = random.Random(1)
    directory.mkdir(parents=True)
    text = directory / "documents.jsonl"
    with text.open("w") as file:
        for _ in range(documents):
            words = " ".join(draw.choice(WORDS) for _ in range(draw.randint(5, 80)))
            file.write(json.dumps({"text": words}) + "\n")
    data = directory / "data"
    prepare([str(text)], data, vocabulary_size=VOCABULARY, val_fraction=val_fraction, processes=1)
    return data


def run_config(data: Path, out: Path, **changes: Any) -> RunConfig:
    """Twelve steps of the tiny preset in float32 on the CPU."""
    values: dict[str, Any] = {
        "preset": "tiny", "context_length": 32, "steps": 12, "batch": 4, "eval_every": 4, "save_every": 4,
        "eval_tokens": 1024, "dtype": "float32", "device": "cpu", "seed": 3,
    }  # fmt: skip
    return RunConfig(data=str(data), out=str(out), **{**values, **changes})


def flags(config: RunConfig) -> list[str]:
    """The command line that says what ``config`` says."""
    words = []
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if value is None:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, bool):
            words.append(str(int(value)))
        else:
            words += [str(item) for item in value] if isinstance(value, tuple) else [str(value)]
    return words


def losses(out: Path) -> dict[int, str]:
    """The loss column as written, by step; fails on a step that is there twice."""
    rows = list(csv.DictReader((out / "log.csv").open()))
    result = {int(row["step"]): row["loss"] for row in rows}
    assert len(result) == len(rows)
    return result


def weights(out: Path, which: str = "last") -> bytes:
    """The bytes of the weights of a run's checkpoint."""
    return (out / "checkpoints" / which / "model" / "model.safetensors").read_bytes()


def optimizer_state(out: Path) -> dict[str, np.ndarray]:
    """Every tensor of the optimizer in a run's last checkpoint."""
    saved = torch.load(out / "checkpoints" / "last" / TRAINER_FILE, weights_only=True)["optimizer"]
    return {f"{name}.{key}": value.numpy() for name, values in saved.items() for key, value in values.items()}
