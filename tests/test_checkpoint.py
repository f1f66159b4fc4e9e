"""Checkpoints: which tensors a config asks for, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from crucible.checkpoint import check_finite, expected_tensors, open_checkpoint, parameter_count, save_checkpoint
from crucible.errors import CheckpointError
from tests.checkpoints import (
    Alibi,
    Biases,
    Learned,
    Norm,
    make_checkpoint,
    make_hf_directory,
    random_tensors,
    tiny_config,
    write_tensors,
)

AXES: list[dict[str, Any]] = [
    {},
    {"tied_embeddings": False},
    {"position": Alibi(), "activation": "gelu"},
    {
        "position": Learned(),
        "norm": Norm(type="layernorm", placement="post", eps=1e-5, bias=True),
        "activation": "gelu_tanh",
        "biases": Biases(qkv=True, attention_output=True, mlp=True),
    },
    {"head_dim": 16, "num_kv_heads": 4},
]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def rewrite(directory: Path, tensors: dict[str, NDArray[Any]]) -> Path:
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def test_expected_tensors_are_named_as_hugging_face_names_them() -> None:
    biases = Biases(qkv=True, attention_output=False, mlp=False)
    shapes = expected_tensors(tiny_config(tied_embeddings=False, biases=biases))
    assert shapes["model.embed_tokens.weight"] == (96, 32)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (16,)
    assert "model.layers.1.self_attn.o_proj.bias" not in shapes
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (32, 48)
    assert shapes["lm_head.weight"] == (96, 32)
    assert parameter_count(expected_tensors(tiny_config())) == 96 * 32 + 2 * (32 * 32 * 3 + 32 * 48 * 3 + 64) + 32
    learned = expected_tensors(tiny_config(position=Learned(), activation="gelu"))
    assert learned["model.embed_positions.weight"] == (256, 32)
    assert not any("gate_proj" in name for name in learned)
    normed = expected_tensors(tiny_config(norm=Norm(type="layernorm", placement="pre", eps=1e-5, bias=True)))
    assert normed["model.norm.bias"] == normed["model.layers.0.input_layernorm.bias"] == (32,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axis", range(len(AXES)))
def test_a_saved_checkpoint_reads_back(tmp_path: Path, axis: int, dtype: str) -> None:
    path = make_checkpoint(tmp_path / "m", dtype=dtype, files={"tokenizer.vocab": b"words"}, **AXES[axis])
    config = tiny_config(**AXES[axis])
    tensors = random_tensors(config)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config == config
        assert checkpoint.dtype == dtype
        assert checkpoint.native
        assert checkpoint.names() == list(expected_tensors(config))
        for name, value in tensors.items():
            stored = checkpoint.read(name)
            checkpoint.release(name)
            assert stored.dtype == np.float32
            assert stored.flags.c_contiguous
            # half an ulp of the stored type
            tolerance = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
            np.testing.assert_allclose(stored, value, rtol=tolerance, atol=1e-7 if tolerance else 0)
        check_finite(checkpoint)
    assert (path / "tokenizer.vocab").read_bytes() == b"words"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize(
    ("matrix", "norm", "dtype"),
    [
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_holds_every_tensor_exactly(tmp_path: Path, matrix: str, norm: str, dtype: str) -> None:
    """Vectors count too: bfloat16 matrices with float32 norms are a common mix."""
    config = tiny_config()
    dtypes = {name: matrix if len(shape) == 2 else norm for name, shape in expected_tensors(config).items()}
    save_checkpoint(tmp_path / "m", config, random_tensors(config).items(), dtype=dtypes)
    with open_checkpoint(tmp_path / "m") as checkpoint:
        assert checkpoint.dtype == dtype
        assert checkpoint.dtypes() == dtypes
        again = {name: checkpoint.read(name) for name in checkpoint.names()}
        save_checkpoint(tmp_path / "n", config, again.items(), dtype=checkpoint.dtype)
    with open_checkpoint(tmp_path / "n") as checkpoint:
        for name, value in again.items():
            np.testing.assert_array_equal(checkpoint.read(name), value)


def test_float32_is_a_read_only_view(tmp_path: Path) -> None:
    with open_checkpoint(make_checkpoint(tmp_path / "m")) as checkpoint:
        array = checkpoint.read("model.norm.weight")
        assert not array.flags.owndata
        assert not array.flags.writeable
        assert array.ctypes.data % 64 == 0


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", tied_embeddings=False)
    tensors = random_tensors(tiny_config(tied_embeddings=False))
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        rest = {key: value for key, value in tensors.items() if key != name}
        assert f"tensor '{name}' is missing" in refusal(rewrite(path, rest))
    assert "(and 20 more)" in refusal(rewrite(path, {}))
    for name in ("model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "spare"):
        message = refusal(rewrite(path, {**tensors, name: np.zeros(3, np.float32)}))
        assert f"tensor '{name}' is unexpected" in message


def test_wrong_shapes_and_dtypes_are_named(tmp_path: Path) -> None:
    import safetensors.numpy

    path = make_checkpoint(tmp_path / "m")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = random_tensors(tiny_config())
    message = refusal(rewrite(path, {**tensors, name: np.ascontiguousarray(tensors[name].T)}))
    assert f"tensor '{name}' has shape [48, 32], config.json asks for [32, 48]" in message
    safetensors.numpy.save_file({**tensors, name: tensors[name].astype(np.float64)}, path / "model.safetensors")
    assert f"tensor '{name}' has dtype F64" in refusal(path)


def test_a_tied_model_may_repeat_its_head_but_not_change_it(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m")
    tensors = random_tensors(tiny_config())
    embedding = tensors["model.embed_tokens.weight"]
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    rewrite(path, {**tensors, **inverse, "lm_head.weight": embedding})
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.names() == list(expected_tensors(tiny_config()))
    other = embedding.copy()
    other[95, 31] = np.nextafter(other[95, 31], 1)
    assert "differs from the embedding" in refusal(rewrite(path, {**tensors, "lm_head.weight": other}))
    assert "shape" in refusal(rewrite(path, {**tensors, "lm_head.weight": embedding[:-1]}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_number_that_is_none_is_named(tmp_path: Path, dtype: str, value: float) -> None:
    path = make_checkpoint(tmp_path / "m")
    tensors = random_tensors(tiny_config())
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][31, 47] = tensors[name][5, 7] = value
    write_tensors(path / "model.safetensors", tensors, dtype)
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(CheckpointError) as caught:
            check_finite(checkpoint)
        assert f"{path / 'model.safetensors'}: tensor '{name}' holds {value} at index [5, 7]" in str(caught.value)
        tensors[name][5, 7] = tensors[name][31, 47] = 6e4  # large is not infinite
    write_tensors(path / "model.safetensors", tensors, dtype)
    with open_checkpoint(path) as checkpoint:
        check_finite(checkpoint)


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    assert "no such model directory" in refusal(tmp_path / "absent")
    assert "config.json: cannot be read (No such file or directory)" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "neither model_type nor crucible_format" in refusal(tmp_path)
    path = make_checkpoint(tmp_path / "m")
    (path / "model.safetensors").unlink()
    assert "model.safetensors: no such file" in refusal(path)
    (path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin is a pickle" in refusal(path)


def test_an_existing_target_is_kept(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", seed=1, files={"note": b"old"})
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="already exists"):
        make_checkpoint(path, seed=2)
    assert (path / "note").exists()
    assert (path / "model.safetensors").read_bytes() == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="already exists"):
        make_checkpoint(tmp_path / "empty")


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m"
    config = tiny_config()

    def failing() -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield from list(random_tensors(config, 2).items())[:3]
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError):
        save_checkpoint(path, config, failing())
    with pytest.raises(CheckpointError, match=r"m: tensor '.*' is missing"):
        save_checkpoint(path, config, [])
    with pytest.raises(CheckpointError, match="cannot be an extra file"):
        save_checkpoint(tmp_path / "n", config, [], files={"../evil": b""})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(tmp_path / "file" / "n", config, [])
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_failed_save_names_the_file_at_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    source, target = tmp_path / "source.bin", tmp_path / "m"

    def reading() -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield "model.norm.weight", np.frombuffer(source.read_bytes(), np.float32)

    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(target, config, reading())
    assert str(caught.value) == f"{source}: cannot be read (No such file or directory)"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(target, config, random_tensors(config).items())
    assert str(caught.value) == f"{target}: cannot be written (No space left on device)"
    assert not list(tmp_path.iterdir())


class TestShards:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_equal_the_single_file(self, tmp_path: Path, dtype: str) -> None:
        single = open_checkpoint(make_hf_directory(tmp_path / "one", dtype=dtype))
        sharded = open_checkpoint(make_hf_directory(tmp_path / "three", dtype=dtype, shards=3))
        assert not sharded.native
        assert sharded.dtype == dtype
        for name in single.names():
            np.testing.assert_array_equal(single.read(name), sharded.read(name))
        assert {sharded.file_of(name).name for name in sharded.names()} == {
            f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)
        }

    def test_a_stray_file_is_not_merged_in(self, tmp_path: Path) -> None:
        path = make_hf_directory(tmp_path / "m", shards=2)
        zeros = {name: np.zeros_like(value) for name, value in random_tensors(tiny_config()).items()}
        write_tensors(path / "model-old.safetensors", zeros)
        write_tensors(path / "model.safetensors", zeros)
        assert open_checkpoint(path).read("model.norm.weight").all()

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("../outside.safetensors", "leads outside"),
            ("sub/../../outside.safetensors", "leads outside"),
            ("/etc/passwd", "leads outside"),
            ("", "leads outside"),
            ("a\0b", "leads outside"),
            ("link.safetensors", "is a link that leads outside"),
            ("absent.safetensors", "does not exist"),
            ("loop.safetensors", "does not exist"),
            (5, "must be a file name, got 5"),
            (".", "Is a directory"),
        ],
    )
    def test_an_index_cannot_reach_other_files(self, tmp_path: Path, name: Any, words: str) -> None:
        write_tensors(tmp_path / "outside.safetensors", random_tensors(tiny_config()))
        path = make_hf_directory(tmp_path / "m")
        (path / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
        (path / "loop.safetensors").symlink_to(path / "loop.safetensors")
        self.write_index(path, dict.fromkeys(expected_tensors(tiny_config()), name))
        message = refusal(path)
        assert words in message

    def test_links_of_the_hub_cache_are_followed(self, tmp_path: Path) -> None:
        path = make_hf_directory(tmp_path / "models--a--b" / "snapshots" / "0123", shards=2)
        blobs = tmp_path / "models--a--b" / "blobs"
        blobs.mkdir()
        for number, shard in enumerate(sorted(path.glob("*.safetensors"))):
            shard.rename(blobs / f"hash{number}")
            shard.symlink_to(f"../../blobs/hash{number}")
        assert open_checkpoint(path).read("model.norm.weight").all()

    def test_index_and_shards_must_agree(self, tmp_path: Path) -> None:
        path = make_hf_directory(tmp_path / "m", shards=2)
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        first, second = sorted(set(index.values()))
        name = next(key for key, value in index.items() if value == first)
        self.write_index(path, {**index, name: second})
        assert f"{first}: tensor '{name}' is not listed for this shard" in refusal(path)
        self.write_index(path, {**index, "spare": first})
        assert f"{first}: tensor 'spare' is missing, though" in refusal(path)
        self.write_index(path, {key: value for key, value in index.items() if key != name})
        assert f"tensor '{name}' is not listed" in refusal(path)
        self.write_index(path, index)
        tensors = random_tensors(tiny_config())
        both = {key: tensors[key] for key in index if index[key] == second or key == name}
        write_tensors(path / second, both)
        assert f"tensor '{name}' is also in {first}" in refusal(path)
        for text, words in (("[]", "a JSON object was expected"), ('{"weight_map": []}', "weight_map must map"),
                            ('{"weight_map": {}}', "weight_map must map"), ("{", "not valid JSON")):  # fmt: skip
            (path / "model.safetensors.index.json").write_text(text)
            assert words in refusal(path)

    @staticmethod
    def write_index(path: Path, weight_map: dict[str, Any]) -> None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
