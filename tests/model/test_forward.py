"""The forward pass: right on every architecture axis, and the same bits however the work is cut up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crucible.model.forward import forward
from crucible.model.reference_ops import ReferenceOps
from tests.checkpoints import Alibi, Biases, Learned, Llama3Scaling, NoPosition, Norm, Rope, make_checkpoint
from tests.direct_model import Model

IDS = np.random.default_rng(11).integers(0, 96, 300).tolist()

AXES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tied_embeddings": False},
    "mha-interleaved": {"num_kv_heads": 4, "position": Rope(theta=500.0, pairing="interleaved", scaling=None)},
    "mqa-llama3": {
        "num_kv_heads": 1,
        "position": Rope(
            theta=1e4,
            pairing="half",
            scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=32),
        ),
    },
    "alibi": {"position": Alibi()},
    "alibi-12-heads": {"position": Alibi(), "num_heads": 12, "num_kv_heads": 3, "head_dim": 4},
    "learned-gelu-layernorm": {
        "position": Learned(),
        "activation": "gelu",
        "norm": Norm(type="layernorm", placement="pre", eps=1e-5, bias=True),
        "biases": Biases(qkv=True, attention_output=True, mlp=True),
    },
    "none-post": {"position": NoPosition(), "norm": Norm(type="rmsnorm", placement="post", eps=1e-5, bias=False)},
    "post-layernorm-gelu-tanh": {
        "activation": "gelu_tanh",
        "norm": Norm(type="layernorm", placement="post", eps=1e-5, bias=False),
    },
    "biases": {"biases": Biases(qkv=True, attention_output=False, mlp=True)},
    "odd-sizes": {"hidden_size": 33, "intermediate_size": 65, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("forward") / "llama", context_length=512)


@pytest.mark.parametrize("quant", ["f32", "int8"])
@pytest.mark.parametrize("axis", AXES)
def test_every_axis_agrees_with_the_float64_model(axis: str, quant: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", **AXES[axis])
    sequences = ((IDS[:40], 0, [5, 3, 8]), (IDS[60:63], 0, [1]))
    got = Model(path, quant=quant).run(*sequences, all_rows=True)
    want = Model(path, ReferenceOps, quant=quant).run(*sequences, all_rows=True)
    assert got.dtype == np.float32
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()
    # A decode step through the cache agrees too.
    cpu, exact = Model(path, quant=quant), Model(path, ReferenceOps, quant=quant)
    for model in (cpu, exact):
        model.run((IDS[:17], 0, [9, 4]))
    step = [m.run(([IDS[17]], 17, [9, 4])) for m in (cpu, exact)]
    assert np.abs(step[0] - step[1]).max() <= 2e-5 * np.abs(step[1]).max()


@pytest.mark.parametrize("quant", ["f32", "int8"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 127, 128, 129, 300])
def test_paged_equals_contiguous_equals_no_cache_bit_for_bit(llama: Path, length: int, quant: str) -> None:
    consecutive = list(range(20))
    shuffled = np.random.default_rng(length).permutation(64)[:20].tolist()
    ids = IDS[:length]
    whole = Model(llama, quant=quant).run((ids, 0, consecutive))
    model = Model(llama, quant=quant)
    assert np.array_equal(model.run((ids, 0, shuffled)), whole)
    for position, token in enumerate(ids):  # the same pages again, one token at a time
        step = model.run(([token], position, shuffled))
    assert np.array_equal(step, whole)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 250])
def test_chunks_do_not_change_bits(llama: Path, chunk: int) -> None:
    pages = list(range(20))
    whole = Model(llama, quant="int8").run((IDS, 0, pages), all_rows=True)
    model = Model(llama, quant="int8")
    parts = [
        model.run((IDS[start : start + chunk], start, pages), all_rows=True) for start in range(0, len(IDS), chunk)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_neighbours_and_threads_do_not_change_bits(llama: Path, threads: int) -> None:
    alone = Model(llama, quant="int8", threads=1).run((IDS[:30], 0, [7, 2]))[0]
    model = Model(llama, quant="int8", threads=threads)
    model.run((IDS[100:137], 0, [11, 12, 13]))
    batch = [([IDS[5]], 37, [11, 12, 13]), (IDS[:30], 0, [7, 2]), (IDS[40:140], 0, [20, 21, 22, 23, 24, 25, 26])]
    assert np.array_equal(model.run(*batch)[1], alone)
    assert np.array_equal(model.run(*reversed(batch))[1], alone)


def test_an_edited_token_changes_nothing_before_it(llama: Path) -> None:
    model = Model(llama)
    before = model.run((IDS[:50], 0, [0, 1, 2, 3]), all_rows=True)
    edited = [*IDS[:30], (IDS[30] + 1) % 96, *IDS[31:50]]
    after = model.run((edited, 0, [0, 1, 2, 3]), all_rows=True)
    assert np.array_equal(before[:30], after[:30])
    assert (before[30:] != after[30:]).any(axis=1).all()


def test_a_batch_that_wants_no_logits_returns_none(llama: Path) -> None:
    model = Model(llama)
    batch = SimpleNamespace(
        token_ids=np.array(IDS[:3], np.int32),
        positions=np.arange(3, dtype=np.int32),
        row_sequence=np.zeros(3, np.int32),
        page_tables=np.zeros((1, 1), np.int32),
        logit_rows=np.zeros(0, np.int32),
    )
    assert forward(model.weights, model.ops, batch, model.cache).shape == (0, 96)
