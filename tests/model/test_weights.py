"""Loading weights: what is refused, and that progress and memory are reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from crucible.checkpoint import open_checkpoint, save_checkpoint
from crucible.errors import CheckpointError, ConfigError
from crucible.model.cpu_ops import CpuOps
from crucible.model.weights import load_weights
from tests.checkpoints import make_checkpoint, random_tensors, tiny_config


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name_and_index(bad: float, tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = bad
    save_checkpoint(tmp_path / "m", config, tensors.items())
    with open_checkpoint(tmp_path / "m") as checkpoint, pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, CpuOps(config, 16), "int8")
    assert "model.layers.1.mlp.down_proj.weight" in str(caught.value)
    assert "[3, 5]" in str(caught.value)


@pytest.mark.parametrize(("quant", "element"), [("f32", 4), ("int8", 1)])
def test_bytes_and_progress(quant: str, element: int, tmp_path: Path) -> None:
    config = tiny_config(hidden_size=64, intermediate_size=64, num_heads=8, vocab_size=128, token_count=128)
    save_checkpoint(tmp_path / "m", config, random_tensors(config).items())
    seen: list[float] = []
    with open_checkpoint(tmp_path / "m") as checkpoint:
        weights = load_weights(checkpoint, CpuOps(config, 16), quant, seen.append)
    assert seen == [0.5, 1.0]
    assert weights.head is weights.embedding
    # 128 embedding rows and 96 + 64 + 64 + 64 + 64 rows a layer of 64 inputs (96 packs as 128), scale and bias a row.
    rows = 128 + 2 * (128 + 64 + 128 + 64)
    groups = 2 if quant == "int8" else 1
    assert weights.nbytes == rows * 64 * element + rows * (2 * groups + 4)


def test_weights_in_halves_are_refused_on_a_cpu(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    with open_checkpoint(path) as checkpoint, pytest.raises(ConfigError, match="quant f16 needs device cuda; use int8"):
        load_weights(checkpoint, CpuOps(checkpoint.config, 16), "f16")
