"""The report of crucible inspect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from crucible import inspect_model as module
from crucible.checkpoint import expected_tensors, save_checkpoint
from crucible.errors import CheckpointError
from crucible.inspect_model import available_memory, components_of, describe, inspect_model, size_text
from tests.checkpoints import (
    Alibi,
    Biases,
    Learned,
    LinearScaling,
    Norm,
    Rope,
    make_checkpoint,
    make_hf_directory,
    random_tensors,
    tiny_config,
    write_tensors,
)


def test_parameters_and_memory_by_component() -> None:
    parts = components_of(tiny_config(tied_embeddings=False))
    assert parts["embedding"].parameters == parts["output head"].parameters == 96 * 32
    assert parts["attention"].parameters == 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32)
    assert parts["mlp"].parameters == 2 * 3 * 32 * 48
    assert parts["norms"].parameters == 5 * 32
    assert parts["mlp"].f32 == 4 * parts["mlp"].parameters
    assert parts["mlp"].int8 == parts["mlp"].parameters + 2 * 2 * (48 + 48 + 2 * 32)  # 32 inputs a scale
    assert parts["norms"].int8 == parts["norms"].f32


def test_vectors_and_positions_stay_float32() -> None:
    biased = components_of(tiny_config(biases=Biases(qkv=True, attention_output=True, mlp=True)))["mlp"]
    assert biased.int8 == 2 * 3 * 32 * 48 + 4 * 2 * (48 + 48 + 32) + 2 * 2 * (48 + 48 + 2 * 32)
    embedding = components_of(tiny_config(position=Learned()))["embedding"]
    assert embedding.int8 == 96 * 32 + 2 * 96 + 4 * 256 * 32


def test_the_report_of_a_tied_model(tmp_path: Path) -> None:
    report = inspect_model(make_checkpoint(tmp_path / "m", dtype="bfloat16"))
    assert report.native
    assert report.dtype == "bfloat16"
    assert report.parameters == report.embedding_parameters + report.non_embedding_parameters
    assert report.embedding_parameters == 96 * 32
    assert report.components["output head"].parameters == 0
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4  # K and V, layers, KV heads, head_dim, float32
    assert report.file_bytes == (tmp_path / "m" / "model.safetensors").stat().st_size
    assert report.serving_context == 256
    weights = sum(part.int8 for part in report.components.values())
    assert report.needed("int8") == weights + 16 * 256 * report.kv_bytes_per_token


def test_every_stored_type_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    dtypes = {name: "bfloat16" if len(shape) == 2 else "float32" for name, shape in expected_tensors(config).items()}
    save_checkpoint(tmp_path / "m", config, random_tensors(config).items(), dtype=dtypes)
    assert "stored        bfloat16 and float32, " in describe(tmp_path / "m")


def test_the_text_names_what_matters(tmp_path: Path) -> None:
    scaled = Rope(theta=5e5, pairing="half", scaling=LinearScaling(factor=2.0))
    text = describe(make_hf_directory(tmp_path / "hf", position=scaled, tied_embeddings=False))
    for words in ("Hugging Face Llama", "2 layers", "4 heads / 2 KV heads of 8", "RoPE base 500000", "untied",
                  "linear scaling x2", "vocabulary    96 rows", "256 bytes a token", "output head"):  # fmt: skip
        assert words in text, words
    layernorm = Norm(type="layernorm", placement="post", eps=1e-5, bias=True)
    text = describe(make_checkpoint(tmp_path / "m", position=Alibi(), norm=layernorm, activation="gelu"))
    for words in ("native", "positions: alibi", "post-layernorm", "gelu", "tied embeddings"):
        assert words in text, words
    assert "output head" not in text


def test_whether_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path / "m")
    report = inspect_model(path)
    int8, f32 = report.needed("int8"), report.needed("f32")
    for available, words in ((f32, "yes"), (f32 - 1, "only as int8"), (int8 - 1, "no: "), (None, "unknown")):
        monkeypatch.setattr(module, "available_memory", lambda size=available: size)
        assert f"fits here     {words}" in describe(path)


def test_weights_that_are_no_numbers_are_found(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m")
    tensors = random_tensors(tiny_config())
    tensors["model.norm.weight"][1] = np.nan
    write_tensors(path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' holds nan at index \[1\]"):
        describe(path)


def test_available_memory_is_a_plausible_number() -> None:
    size = available_memory()
    assert size is None or 1 << 20 < size < 1 << 50


def test_available_memory_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc(path: Path, *args: object, **options: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", no_proc)
    assert available_memory() is not None
    monkeypatch.setattr(module.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert available_memory() is None


def test_a_control_group_limits_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n",
        "/sys/fs/cgroup/memory.max": "1000000\n",
        "/sys/fs/cgroup/memory.current": "600000\n",
        "/sys/fs/cgroup/memory.stat": "anon 100\nactive_file 50000\ninactive_file 150000\n",
    }

    def fake(path: Path, *args: object, **options: object) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", fake)
    assert available_memory() == 600_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_memory() == 8_000_000 * 1024


def test_sizes() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 1536 * 1024, 3 << 30)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "3.0 GiB",
    ]  # fmt: skip


def test_int8_keeps_a_scale_for_every_32_inputs() -> None:
    wide = components_of(tiny_config(intermediate_size=130))["mlp"]
    down, gate_and_up = 32, 2 * 130
    assert wide.int8 == wide.parameters + 2 * 2 * (down * 5 + gate_and_up * 1)  # 130 inputs: five groups
