"""int8 checkpoints: stored as packing makes them, loaded as they are, refused where they mean nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crucible import reference
from crucible.checkpoint import expected_tensors, matrices, open_checkpoint, save_checkpoint
from crucible.errors import CheckpointError
from crucible.importers import import_model
from crucible.inspect_model import describe
from crucible.kernels.constants import QUANT_GROUP, SCALE_TRIALS
from crucible.model.cpu_ops import CpuMatrix, CpuOps
from crucible.model.quantize import quantize, quantize_checkpoint
from crucible.model.reference_ops import ReferenceOps
from crucible.model.weights import Weights, load_weights
from crucible.quantized import QuantizedTensor, scale_shape
from tests.checkpoints import (
    Biases,
    Learned,
    Norm,
    make_checkpoint,
    make_hf_directory,
    random_tensors,
    tiny_config,
)
from tests.direct_model import Model

IDS = np.random.default_rng(3).integers(0, 96, 40).tolist()
EMBEDDING, Q_PROJ = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"

AXES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tied_embeddings": False},
    "learned-gelu-biases": {
        "position": Learned(),
        "activation": "gelu",
        "norm": Norm(type="layernorm", placement="pre", eps=1e-5, bias=True),
        "biases": Biases(qkv=True, attention_output=True, mlp=True),
    },
    "odd-sizes": {
        "hidden_size": 33, "intermediate_size": 65, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10,
        "biases": Biases(qkv=False, attention_output=False, mlp=True),
    },
}  # fmt: skip


def load(path: Path, quant: str) -> Weights:
    with open_checkpoint(path) as checkpoint:
        return load_weights(checkpoint, CpuOps(checkpoint.config, 64), quant)


def packed(weights: Weights) -> list[CpuMatrix]:
    layers = [(layer.qkv, layer.attention_output, layer.mlp_in, layer.mlp_out) for layer in weights.layers]
    return [weights.embedding, weights.head, *(matrix for layer in layers for matrix in layer)]  # type: ignore[list-item]


def assert_equal(left: Weights, right: Weights) -> None:
    for ours, theirs in zip(packed(left), packed(right), strict=True):
        assert ours.w.dtype == theirs.w.dtype
        for name in ("w", "scale", "bias"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def any_quantized(shape: tuple[int, ...], generator: np.random.Generator) -> QuantizedTensor:
    """What no search for scales would have made: small values, any scale near 1/100, some groups zero."""
    values = generator.integers(-9, 10, shape).astype(np.int8)
    scales = generator.integers(0x7800, 0x7A00, scale_shape(shape)).astype(np.uint16)
    scales[0, 0] = 0
    values[0, :32] = 0
    return QuantizedTensor(values, scales)


def mixed_checkpoint(path: Path, *names: str, seed: int = 0, **changes: Any) -> dict[str, QuantizedTensor]:
    """A checkpoint in which ``names`` (default: every matrix) are int8 that was not searched for; returns those."""
    config = tiny_config(**changes)
    generator = np.random.default_rng(seed)
    shapes = matrices(config)
    stored = {name: any_quantized(shapes[name], generator) for name in names or shapes}
    dtypes = {name: "int8" if name in stored else "float32" for name in expected_tensors(config)}
    save_checkpoint(path, config, (random_tensors(config) | stored).items(), dtype=dtypes)
    return stored


@pytest.mark.parametrize("axis", AXES)
def test_a_quantised_checkpoint_loads_to_the_bits_of_its_source(axis: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "f32", **AXES[axis])
    target = quantize_checkpoint(source, tmp_path / "int8")
    assert_equal(load(source, "int8"), load(target, "int8"))
    run = (IDS, 0, [5, 3, 8])
    np.testing.assert_array_equal(
        Model(target, quant="int8").run(run, all_rows=True).view(np.uint32),
        Model(source, quant="int8").run(run, all_rows=True).view(np.uint32),
    )


@pytest.mark.parametrize("axis", AXES)
def test_loaded_as_float32_it_is_what_the_oracle_rounds_to(axis: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "f32", **AXES[axis])
    config = tiny_config(**AXES[axis])
    target = quantize_checkpoint(source, tmp_path / "int8")
    tensors = random_tensors(config)
    for name in matrices(config):
        tensors[name] = reference.quantize_groups(tensors[name], QUANT_GROUP, SCALE_TRIALS).astype(np.float32)
    with open_checkpoint(target) as checkpoint:
        for name, value in tensors.items():
            read = checkpoint.read(name)
            assert read.dtype == np.float32
            assert read.flags.c_contiguous
            np.testing.assert_array_equal(read, value)
    save_checkpoint(tmp_path / "rounded", config, tensors.items())
    assert_equal(load(target, "f32"), load(tmp_path / "rounded", "f32"))


def test_stored_values_and_scales_are_packed_as_they_are(tmp_path: Path) -> None:
    """Scales that packing would not have chosen: weights quantised once more would get others."""
    stored = mixed_checkpoint(tmp_path / "m", hidden_size=64, num_heads=8, vocab_size=130, token_count=130)
    weights = load(tmp_path / "m", "int8")

    def rows(matrix: Any, first_block: int, step: int, outputs: int) -> QuantizedTensor:
        """Back from blocks of 64 outputs."""
        parts = (matrix.w[first_block::step], matrix.scale[first_block::step])
        values, scales = (part.transpose(0, 2, 1).reshape(-1, part.shape[1])[:outputs] for part in parts)
        return QuantizedTensor(values, scales)

    def check(got: QuantizedTensor, *names: str) -> None:
        want = QuantizedTensor.concatenate([stored[name] for name in names])
        np.testing.assert_array_equal(got.values, want.values)
        np.testing.assert_array_equal(got.scales, want.scales)

    check(rows(weights.embedding, 0, 1, 130), EMBEDDING)
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        check(rows(layer.qkv, 0, 1, 96), *(f"{prefix}self_attn.{name}_proj.weight" for name in "qkv"))
        check(rows(layer.attention_output, 0, 1, 64), f"{prefix}self_attn.o_proj.weight")
        check(rows(layer.mlp_in, 0, 2, 48), f"{prefix}mlp.gate_proj.weight")
        check(rows(layer.mlp_in, 1, 2, 48), f"{prefix}mlp.up_proj.weight")
        check(rows(layer.mlp_out, 0, 1, 64), f"{prefix}mlp.down_proj.weight")


@pytest.mark.parametrize("quant", ["int8", "f32"])
def test_the_float64_model_agrees(quant: str, tmp_path: Path) -> None:
    mixed_checkpoint(tmp_path / "m", tied_embeddings=False)
    run = (IDS, 0, [5, 3, 8])
    got = Model(tmp_path / "m", quant=quant).run(run, all_rows=True)
    want = Model(tmp_path / "m", ReferenceOps, quant=quant).run(run, all_rows=True)
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


def test_matrices_that_are_packed_together_may_be_stored_differently(tmp_path: Path) -> None:
    """The float ones are quantised, those that are int8 stay what they are."""
    stored = mixed_checkpoint(tmp_path / "m", Q_PROJ, "model.layers.1.mlp.up_proj.weight")
    for name in matrices(tiny_config()):
        stored.setdefault(name, quantize(random_tensors(tiny_config())[name]))
    dtypes = {name: "int8" if name in stored else "float32" for name in expected_tensors(tiny_config())}
    tensors = random_tensors(tiny_config()) | stored
    save_checkpoint(tmp_path / "all", tiny_config(), tensors.items(), dtype=dtypes)
    for quant in ("int8", "f32"):
        mixed, whole = load(tmp_path / "m", quant), load(tmp_path / "all", quant)
        if quant == "int8":
            assert_equal(mixed, whole)
        for left, right in zip(packed(mixed), packed(whole), strict=True):
            assert left.w.dtype == right.w.dtype


def test_size_on_disk_and_what_inspect_says(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=64, intermediate_size=160, num_heads=8, vocab_size=512)
    source = make_checkpoint(tmp_path / "f32", hidden_size=64, intermediate_size=160, num_heads=8, vocab_size=512)
    target = quantize_checkpoint(source, tmp_path / "int8")
    shapes = matrices(config)
    expected = sum(math.prod(shape) + 2 * math.prod(scale_shape(shape)) for shape in shapes.values())
    vectors = sum(4 * math.prod(shape) for name, shape in expected_tensors(config).items() if name not in shapes)
    size = (target / "model.safetensors").stat().st_size
    assert expected + vectors <= size <= expected + vectors + 6000  # the header
    before, after = describe(source).splitlines(), describe(target).splitlines()
    assert [line for line in after if line.startswith("stored")] == [
        f"stored        float32 and int8, {size / 1024:.1f} KiB"
    ]
    for heading in ("parameters", "embedding", "attention", "mlp", "weights", "KV cache"):
        assert [line for line in before if line.startswith(heading)] == [
            line for line in after if line.startswith(heading)
        ]
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.native
        assert checkpoint.dtype == "float32"  # what holds every tensor exactly


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_source_is_quantised_and_carried(dtype: str, tmp_path: Path) -> None:
    source = make_hf_directory(tmp_path / "hf", dtype=dtype, shards=2)
    texts = {"chat_template.jinja": "{{ messages }}", "tokenizer_config.json": "{}", "README.md": "# Card",
             "LICENSE": "Apache", "LICENSE.gpt2": "MIT", "notes.txt": "private"}  # fmt: skip
    for name, text in texts.items():
        (source / name).write_text(text)
    (source / "LICENSE.d").mkdir()
    target = quantize_checkpoint(source, tmp_path / "int8")
    carried = {path.name for path in target.iterdir()} - {"config.json", "model.safetensors"}
    assert carried == texts.keys() - {"notes.txt"}
    assert all((target / name).read_text() == texts[name] for name in carried)
    with open_checkpoint(target) as after, open_checkpoint(source) as before:
        assert after.native
        assert after.config == before.config
        names = matrices(before.config)
        assert after.dtypes() == {name: "int8" if name in names else dtype for name in before.names()}
    assert_equal(load(source, "int8"), load(target, "int8"))


def test_import_keeps_int8_as_it_is(tmp_path: Path) -> None:
    mixed_checkpoint(tmp_path / "m", EMBEDDING, DOWN)
    import_model(tmp_path / "m", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "m/model.safetensors").read_bytes()


@given(st.floats(2.0**100, float(np.finfo(np.float32).max), width=32), st.integers(0, 2**32 - 1))
def test_the_largest_weights_stay_finite(top: float, seed: int) -> None:
    rows = np.random.default_rng(seed).uniform(-top, top, (3, 40)).astype(np.float32)
    rows[1, 3], rows[2, 39] = top, -top
    quantized = quantize(rows)
    assert quantized.fault() is None
    assert quantized.values[1, 3] == -quantized.values[2, 39] == 127


def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "f32")
    target = quantize_checkpoint(source, tmp_path / "int8")
    with pytest.raises(CheckpointError, match="int8: already int8; quantize the checkpoint that it was made from"):
        quantize_checkpoint(target, tmp_path / "twice")
    with pytest.raises(CheckpointError, match="int8: already exists"):
        quantize_checkpoint(source, target)
    with pytest.raises(CheckpointError, match="no such model directory"):
        quantize_checkpoint(tmp_path / "absent", tmp_path / "twice")
    tensors = random_tensors(tiny_config())
    tensors[DOWN][3, 5] = np.nan
    broken = make_hf_directory(tmp_path / "broken", tensors=tensors)
    with pytest.raises(CheckpointError, match=rf"'{DOWN}' holds nan at index \[3, 5\]"):
        quantize_checkpoint(broken, tmp_path / "twice")
    assert not [path for path in tmp_path.iterdir() if "twice" in path.name]
