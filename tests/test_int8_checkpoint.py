"""int8 matrices in checkpoints: written and read as they are, and every layout that is refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from crucible.checkpoint import check_finite, matrices, open_checkpoint, save_checkpoint
from crucible.errors import CheckpointError
from crucible.model.cpu_ops import CpuOps
from crucible.model.quantize import quantize
from crucible.model.weights import load_weights
from crucible.quantized import QuantizedTensor, scale_shape
from crucible.safetensors_file import write_safetensors
from tests.checkpoints import Learned, make_checkpoint, make_hf_directory, random_tensors, tiny_config

EMBEDDING, DOWN = "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 20),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_what_is_written_is_read_back(hidden: int, inner: int, seed: int, vectors: str) -> None:
    config = tiny_config(
        hidden_size=hidden, intermediate_size=inner, num_layers=1, vocab_size=5, token_count=5, head_dim=2,
        tied_embeddings=bool(seed % 2),
    )  # fmt: skip
    generator = np.random.default_rng(seed)
    tensors: dict[str, Any] = random_tensors(config)
    for name, shape in matrices(config).items():
        scales = generator.integers(0, 0xF800, scale_shape(shape)).astype(np.uint16)
        values = generator.integers(-127, 128, shape).astype(np.int8)
        values[np.repeat(scales == 0, 32, axis=1)[:, : shape[1]]] = 0
        tensors[name] = QuantizedTensor(values, scales)
    dtypes = {name: "int8" if isinstance(tensor, QuantizedTensor) else vectors for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder, "m"), config, tensors.items(), dtype=dtypes)
        with open_checkpoint(Path(folder, "m")) as checkpoint:
            check_finite(checkpoint)
            assert checkpoint.dtypes() == dtypes
            for name, tensor in tensors.items():
                quantized = checkpoint.read_quantized(name)
                if not isinstance(tensor, QuantizedTensor):
                    assert quantized is None
                    continue
                assert quantized is not None
                assert (quantized.values.dtype, quantized.scales.dtype) == (np.int8, np.uint16)
                np.testing.assert_array_equal(quantized.values, tensor.values)
                np.testing.assert_array_equal(quantized.scales, tensor.scales)
                np.testing.assert_array_equal(checkpoint.read(name), tensor.dequantize())
                checkpoint.release(name)


def test_the_writer_wants_quantised_matrices_where_the_dtype_says_so(tmp_path: Path) -> None:
    config = tiny_config()
    tensors: dict[str, Any] = random_tensors(config)
    dtypes = dict.fromkeys(tensors, "float32")
    norm = "model.norm.weight"
    with pytest.raises(CheckpointError, match=f"tensor '{norm}' cannot be int8; only matrices can"):
        save_checkpoint(tmp_path / "m", config, tensors.items(), dtype=dtypes | {norm: "int8"})
    with pytest.raises(CheckpointError, match=f"'{DOWN}' has dtype float32, but is to be stored as int8"):
        save_checkpoint(tmp_path / "m", config, tensors.items(), dtype=dtypes | {DOWN: "int8"})
    with pytest.raises(CheckpointError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        save_checkpoint(tmp_path / "m", config, tensors.items(), dtype="int8")
    tensors[DOWN] = quantize(tensors[DOWN])
    with pytest.raises(CheckpointError, match=f"'{DOWN}_scale' is unexpected"):
        save_checkpoint(tmp_path / "m", config, tensors.items())
    tensors[DOWN] = QuantizedTensor(tensors[DOWN].values, tensors[DOWN].scales[:, :1])
    with pytest.raises(CheckpointError, match=rf"'{DOWN}_scale' has shape \[32, 1\], expected \[32, 2\]"):
        save_checkpoint(tmp_path / "m", config, tensors.items(), dtype=dtypes | {DOWN: "int8"})
    assert not list(tmp_path.iterdir())


def raw_tensors() -> dict[str, NDArray[Any]]:
    """The tensors of a file whose down projection is int8."""
    tensors: dict[str, NDArray[Any]] = dict(random_tensors(tiny_config()))
    quantized = quantize(tensors[DOWN])
    return tensors | {DOWN: quantized.values, f"{DOWN}_scale": quantized.scales}


def write_raw(directory: Path, tensors: dict[str, NDArray[Any]]) -> Path:
    shapes = {name: value.shape for name, value in tensors.items()}
    dtypes = {name: str(value.dtype) for name, value in tensors.items()}
    write_safetensors(directory / "model.safetensors", shapes, tensors.items(), dtype=dtypes)
    return directory


def test_layouts_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    path = write_raw(make_checkpoint(tmp_path / "m"), raw_tensors())
    open_checkpoint(path).close()
    scale, norm = f"{DOWN}_scale", "model.norm.weight"
    values, scales = raw_tensors()[DOWN], raw_tensors()[scale]
    floats = random_tensors(tiny_config())
    head = {"lm_head.weight": floats[EMBEDDING]}
    embedding = quantize(floats[EMBEDDING])
    whole = {EMBEDDING: embedding.values, f"{EMBEDDING}_scale": embedding.scales}
    cases: list[tuple[dict[str, Any], str]] = [
        ({DOWN: floats[DOWN]}, f"'{scale}' is unexpected; '{DOWN}' is not I8 and has no scales"),
        ({DOWN: ...}, f"tensor '{DOWN}' is missing"),
        ({scale: ...}, f"'{DOWN}' has dtype I8, but '{scale}' is missing"),
        ({scale: scales[:, :1].copy()}, f"is U16 [32, 1]; the scales of '{DOWN}' are U16 [32, 2]"),
        ({scale: np.repeat(scales, 2, axis=1)}, "is U16 [32, 4]"),
        ({scale: scales.reshape(-1)}, "is U16 [64]"),
        ({scale: scales.astype(np.float32)}, "is F32 [32, 2]"),
        ({scale: scales.view(np.int8)}, "is I8 [32, 4]"),
        ({DOWN: values.view(np.uint16)}, f"'{DOWN}' has shape [32, 24]"),
        ({DOWN: values.astype(np.uint16)}, f"'{DOWN}' has dtype U16; use F32, BF16, F16"),
        ({DOWN: values[:16].copy()}, f"'{DOWN}' has shape [16, 48]"),
        ({norm: np.ones(32, np.int8)}, f"'{norm}' has dtype I8; use F32, BF16, F16"),
        ({norm: np.ones(32, np.int8), f"{norm}_scale": np.ones((32, 1), np.uint16)}, "norm.weight"),
        ({f"{norm}_scale": np.ones((32, 1), np.uint16)}, f"'{norm}_scale' is unexpected"),
        ({"lm_head.weight_scale": np.ones((96, 1), np.uint16)}, "'lm_head.weight_scale' is unexpected"),
        ({"lm_head.weight": embedding.values}, "does not have the shape and a dtype of the embedding"),
        (head | whole, "does not have the shape and a dtype of the embedding"),
        ({f"{scale}_scale": np.ones((32, 1), np.uint16)}, f"'{scale}_scale' is unexpected"),
    ]
    for changes, words in cases:
        tensors = {name: value for name, value in (raw_tensors() | changes).items() if value is not ...}
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(write_raw(path, tensors))
        assert words in str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_learned_positions_stay_float(tmp_path: Path) -> None:
    name = "model.embed_positions.weight"
    path = make_checkpoint(tmp_path / "m", position=Learned())
    assert name not in matrices(tiny_config(position=Learned()))
    tensors: dict[str, NDArray[Any]] = dict(random_tensors(tiny_config(position=Learned())))
    quantized = quantize(tensors[name])
    for scales in ({}, {f"{name}_scale": quantized.scales}):
        with pytest.raises(CheckpointError, match=r"embed_positions\.weight.* (has dtype I8|is unexpected)"):
            open_checkpoint(write_raw(path, tensors | {name: quantized.values} | scales))


def test_a_hugging_face_directory_holds_no_int8(tmp_path: Path) -> None:
    path = write_raw(make_hf_directory(tmp_path / "hf"), raw_tensors())
    with pytest.raises(CheckpointError, match=f"'{DOWN}(' has dtype I8; use F32, BF16, F16|_scale' is unexpected)"):
        open_checkpoint(path)
    tensors = raw_tensors()
    del tensors[f"{DOWN}_scale"]
    with pytest.raises(CheckpointError, match=f"'{DOWN}' has dtype I8; use F32, BF16, F16"):
        open_checkpoint(write_raw(path, tensors))


@pytest.mark.parametrize("quant", ["int8", "f32"])
@pytest.mark.parametrize(
    ("value", "scale", "words"),
    [(-128, None, "holds -128"), (7, 0, "where the scale is 0"), (127, 0xFE00, "holds inf"), (0, 0xFF80, "holds nan")],
)
def test_weights_that_are_none_are_refused_everywhere(
    value: int, scale: int | None, words: str, quant: str, tmp_path: Path
) -> None:
    tensors = raw_tensors()
    tensors[DOWN][5, 32:] = 0
    tensors[DOWN][5, 32] = value
    if scale is not None:
        tensors[f"{DOWN}_scale"][5, 1] = scale
    path = write_raw(make_checkpoint(tmp_path / "m"), tensors)
    with open_checkpoint(path) as checkpoint:
        for look in (check_finite, lambda it: load_weights(it, CpuOps(it.config, 16), quant)):
            with pytest.raises(CheckpointError) as caught:
                look(checkpoint)
            assert str(caught.value).startswith(f"{path / 'model.safetensors'}: tensor '{DOWN}' holds ")
            assert words in str(caught.value)
            assert "[5, 32]" in str(caught.value)


def test_scales_may_lie_in_another_shard_and_unaligned(tmp_path: Path) -> None:
    stored = quantize(random_tensors(tiny_config())[EMBEDDING])
    tensors = dict(random_tensors(tiny_config())) | {EMBEDDING: stored.values}
    path = make_checkpoint(tmp_path / "sharded")
    (path / "model.safetensors").unlink()
    scales = stored.scales.tobytes()
    fields = {"dtype": "U16", "shape": [96, 1], "data_offsets": [0, len(scales)]}
    header = json.dumps({f"{EMBEDDING}_scale": fields}).encode()
    header += b" " * (1 - len(header) % 2)
    (path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + scales)
    shapes = {name: value.shape for name, value in tensors.items()}
    dtypes = {name: str(value.dtype) for name, value in tensors.items()}
    write_safetensors(path / "a.safetensors", shapes, tensors.items(), dtype=dtypes)
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {f"{EMBEDDING}_scale": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with open_checkpoint(path) as checkpoint:
        quantized = checkpoint.read_quantized(EMBEDDING)
        assert quantized is not None
        assert quantized.scales.flags.aligned
        np.testing.assert_array_equal(quantized.values, stored.values)
        np.testing.assert_array_equal(quantized.scales, stored.scales)
        checkpoint.release(EMBEDDING)
        np.testing.assert_array_equal(checkpoint.read(EMBEDDING), stored.dequantize())
