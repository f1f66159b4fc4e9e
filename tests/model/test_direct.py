"""A model without an engine: the same batches on the CPU and, in the emulator, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible.checkpoint import open_checkpoint
from crucible.model.direct import Direct, Part, tiles
from crucible.model.reference_ops import ReferenceOps
from tests.checkpoints import make_checkpoint
from tests.direct_model import Model
from tests.kernels.cuda.stand_in import StandIn


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"head_dim": 64, "num_heads": 3, "num_kv_heads": 1, "hidden_size": 96, "intermediate_size": 112}
    return make_checkpoint(tmp_path_factory.mktemp("direct") / "model", vocab_size=112, token_count=107, **sizes)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crucible.kernels.device.CudaDevice", StandIn)


def load(path: Path, device: str, quant: str = "f32", **settings: Any) -> Direct:
    sizes = {"context": 128, "max_rows": 96, "head_rows": 8}
    with open_checkpoint(path) as checkpoint:
        return Direct.load(checkpoint, device=device, quant=quant, threads=1, **{**sizes, **settings})


def ids(length: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 107, length).astype(np.int32)


@pytest.mark.parametrize(
    ("device", "quant", "bound"), [("cpu", "f32", 2e-5), ("cuda", "f32", 2e-5), ("cuda", "int8", 4e-3)]
)
def test_all_rows_of_a_prompt(device: str, quant: str, bound: float, path: Path, emulated: None) -> None:
    model = load(path, device, quant)
    prompt = ids(70, 1)
    pages = np.array([4, 1, 3, 0, 2], np.int32)
    parts: list[Any] = []
    model.rows(
        model.batch([Part(prompt, 0, pages)], np.arange(70, dtype=np.int32)),
        model.ops.allocate_cache(5),
        lambda first, rows: parts.append((first, rows.copy())),
    )
    assert [first for first, _ in parts] == list(range(0, 70, 8))  # the head never has more rows than asked for
    rows = np.concatenate([rows for _, rows in parts])
    exact = Model(path, ReferenceOps, quant=quant).run((prompt.tolist(), 0, list(range(5))), all_rows=True)
    assert np.abs(rows - exact).max() <= bound * np.abs(exact).max()


def test_decode_rows_and_prompts_in_one_batch(path: Path, emulated: None) -> None:
    """Single tokens first are decode rows; the bits are those of a whole prompt."""
    model = load(path, "cuda", "int8", head_rows=4)
    cache = model.ops.allocate_cache(8)
    one, two = ids(20, 2), ids(33, 3)
    first, second = np.array([0, 1], np.int32), np.array([2, 3, 4], np.int32)
    last = np.array([19], np.int32)
    whole = model.download(model.forward(model.batch([Part(one, 0, first)], last), cache)).copy()
    prompt = model.download(model.forward(model.batch([Part(two, 0, second)], last + 13), cache)).copy()
    batch = model.batch([Part(one[19:], 19, first), Part(two, 0, second)], np.array([0, 33], np.int32))
    assert batch.decode_rows == 1
    assert np.array_equal(model.download(model.forward(batch, cache)), np.concatenate([whole, prompt]))


def test_tiles() -> None:
    first, rows = tiles([1, 1, 65, 3, 128], 2)
    assert first.tolist() == [2, 66, 67, 70, 134]
    assert rows.tolist() == [64, 1, 3, 64, 64]
    assert tiles([1], 1)[0].tolist() == []


def test_a_gpu_without_rows_wanted_computes_no_head(path: Path, emulated: None) -> None:
    model = load(path, "cuda", "int8")
    model.rows(model.batch([Part(ids(5, 1), 0, np.zeros(1, np.int32))], np.zeros(0, np.int32)),
               model.ops.allocate_cache(1), lambda first, rows: pytest.fail("nobody asked"))  # fmt: skip
    assert not any("store" in name for name in model.device.launches)
