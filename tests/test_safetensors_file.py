"""The safetensors reader against the reference library, and against files that lie."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.errors import CheckpointError
from crucible.safetensors_file import SafetensorsFile, to_bfloat16, to_float32, write_safetensors

VALUES = {
    "a": np.arange(1, 7, dtype=np.float32).reshape(2, 3) / 7,
    "b": np.linspace(-3, 3, 5, dtype=np.float32),
}


def pack(header: dict[str, Any] | bytes, data: bytes, padding: int = 0) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    encoded += b" " * padding
    return struct.pack("<Q", len(encoded)) + encoded + data


def parts() -> tuple[dict[str, Any], bytes]:
    """Header and data of a file with VALUES: a at 0 … 24, b at 24 … 44."""
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "F32", "shape": [5], "data_offsets": [24, 44]},
    }
    return header, VALUES["a"].tobytes() + VALUES["b"].tobytes()


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < len(str(path)) + 300
    return message


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_reads_views_of_the_map(tmp_path: Path, padding: int) -> None:
    header, data = parts()
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(header, data, padding))
    file = SafetensorsFile(path)
    for name, expected in VALUES.items():
        array = file.read(name)
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.flags.aligned
        assert not array.flags.writeable or array.flags.owndata
        np.testing.assert_array_equal(array, expected)
    held = file.read("a")
    file.release("a")
    file.close()  # with a view alive
    np.testing.assert_array_equal(held, VALUES["a"])


def test_valid_but_unusual_files(tmp_path: Path) -> None:
    header, data = parts()
    header["empty"] = {"dtype": "I64", "shape": [0, 4], "data_offsets": [24, 24]}
    header["scalar"] = {"dtype": "F16", "shape": [], "data_offsets": [44, 46]}
    header["__metadata__"] = {"format": "pt", "note": "é"}
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(dict(reversed(header.items())), data + np.float16(0.5).tobytes(), 3))
    file = SafetensorsFile(path)
    assert file.metadata["note"] == "é"
    assert file.entries["empty"].shape == (0, 4)
    assert file.read("scalar") == 0.5
    np.testing.assert_array_equal(file.read("b"), VALUES["b"])
    (tmp_path / "none.safetensors").write_bytes(pack({}, b""))
    assert SafetensorsFile(tmp_path / "none.safetensors").entries == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated: 0 bytes"),
        (b"abcde", "truncated: 5 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "header of 9223372036854775808 bytes does not fit"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "header of 18446744073709551615 bytes does not fit"),
        (struct.pack("<Q", 10**9) + b"{}", "header of 1000000000 bytes does not fit"),
        (struct.pack("<Q", 0) + b"{}", "impossible safetensors header length 0"),
        (pack(*parts())[:60], "does not fit in a file of 60; truncated"),
        (pack(b'{"a": ', b""), "safetensors header: not valid JSON"),
        (pack(b"[1, 2, 3] ", b""), "header is not a JSON object"),
        (pack(b" {}", b""), "header is not a JSON object"),
        (pack(b'{"\xff\xfe": 1}', b""), "safetensors header: not UTF-8 at byte 2"),
        (pack(b'{"a":' * 100_000, b""), "nested too deeply"),
        (pack(b'{"__metadata__": {"n": 1}}', b""), "__metadata__ must map names to strings"),
        (pack(b'{"a": 1}', b""), "the header must give dtype, shape and data_offsets"),
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refused(tmp_path / "x.safetensors", data)


@pytest.mark.parametrize("cut", [1, 4, 20, 30])
def test_truncated_data_is_refused(tmp_path: Path, cut: int) -> None:
    assert "truncated: tensor" in refused(tmp_path / "x.safetensors", pack(*parts())[:-cut])


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    header, data = parts()
    text = json.dumps(header)[:-1] + ', "a": ' + json.dumps(header["a"]) + "}"
    assert "duplicate key 'a'" in refused(tmp_path / "x.safetensors", pack(text.encode(), data))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("data_offsets", [0, 20], "overlaps another: offset 0 instead of 20"),
        ("data_offsets", [20, 40], "tensor 'b' overlaps another: offset 20 instead of 24"),
        ("data_offsets", [28, 48], "truncated: tensor 'b' ends at offset 48 of 44"),
        ("data_offsets", [2**62, 2**62 + 20], "truncated: tensor 'b'"),
        ("data_offsets", [44, 24], "data_offsets must be [start, end]"),
        ("data_offsets", [24], "data_offsets must be [start, end]"),
        ("data_offsets", [-20, 0], "data_offsets must be a list of non-negative integers"),
        ("data_offsets", [24, 40], "size mismatch: F32 [5] needs 20 bytes, data_offsets span 16"),
        ("shape", [6], "size mismatch: F32 [6] needs 24 bytes"),
        ("shape", [-5], "shape must be a list of non-negative integers"),
        ("shape", [5.0], "shape must be a list of non-negative integers"),
        ("shape", [5, True], "shape must be a list of non-negative integers"),
        ("shape", "5", "shape must be a list of non-negative integers"),
        ("shape", [2**62, 2**62, 2**62], "size mismatch"),
        ("shape", [2**64], "shape must be a list of non-negative integers"),
        ("shape", [1] * 100, "shape has 100 dimensions"),
        ("dtype", "F16", "size mismatch: F16 [5] needs 10 bytes"),
        ("dtype", "float32", "unknown dtype 'float32'"),
        ("dtype", ["F32"], "unknown dtype ['F32']"),
        ("extra", 1, "the header must give dtype, shape and data_offsets"),
    ],
)
def test_a_lying_entry_is_refused(tmp_path: Path, field: str, value: Any, words: str) -> None:
    header, data = parts()
    header["b"][field] = value
    assert words in refused(tmp_path / "x.safetensors", pack(header, data))


def test_gaps_and_trailing_bytes_are_refused(tmp_path: Path) -> None:
    header, data = parts()
    assert "size mismatch: 3 bytes after the last tensor" in refused(tmp_path / "x", pack(header, data + b"abc"))
    header["b"]["data_offsets"] = [28, 48]
    assert "leaves a gap before it: offset 28 instead of 24" in refused(tmp_path / "x", pack(header, data + bytes(4)))
    header["b"]["data_offsets"] = [24, 44]
    del header["a"]
    assert "leaves a gap before it" in refused(tmp_path / "x", pack(header, data))


def test_what_is_not_a_readable_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, words in (("fifo", "not a regular file"), (".", "Is a directory"), ("absent", "No such file")):
        with pytest.raises(CheckpointError, match=words):
            SafetensorsFile(tmp_path / name)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 300), replacement=st.binary(min_size=1, max_size=9))
def test_any_damage_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, replacement: bytes
) -> None:
    good = pack(*parts())
    position %= len(good)
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(good[:position] + replacement + good[position + len(replacement) :])
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        lines = str(error).splitlines()
        assert len(lines) == 1
        return
    for name, entry in file.entries.items():
        if entry.dtype in ("F32", "F16", "BF16"):
            assert file.read(name).shape == entry.shape
    file.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_writes_what_the_reference_library_reads(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    path = tmp_path / "x.safetensors"
    shapes = {name: value.shape for name, value in VALUES.items()}
    write_safetensors(path, shapes, reversed(VALUES.items()), dtype=dtype, metadata={"format": "pt"})
    loaded = load_file(path)
    file = SafetensorsFile(path)
    assert set(loaded) == set(VALUES)
    for name, value in VALUES.items():
        expected = torch.from_numpy(value).to(getattr(torch, dtype))
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name], expected)
        np.testing.assert_array_equal(file.read(name), expected.float().numpy())


def test_a_dtype_for_each_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    shapes = {name: VALUES[name].shape for name in ("b", "a")}  # five float16 first would misalign what follows
    write_safetensors(path, shapes, VALUES.items(), dtype={"b": "float16", "a": "float32"})
    theirs = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(theirs["b"], VALUES["b"].astype(np.float16))
    np.testing.assert_array_equal(theirs["a"], VALUES["a"])
    assert SafetensorsFile(path).raw("a").flags.aligned
    words = "dtype of 'a' must be one of float32, bfloat16, float16, int8, uint16, got None"
    with pytest.raises(CheckpointError, match=words):
        write_safetensors(path, shapes, VALUES.items(), dtype={"b": "float16"})


def test_integers_are_stored_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    values = {"q": np.arange(-3, 0, dtype=np.int8), "s": np.array([1, 65535], np.uint16)}
    shapes = {name: value.shape for name, value in values.items()}
    write_safetensors(path, shapes, values.items(), dtype={"q": "int8", "s": "uint16"})
    theirs, file = safetensors.numpy.load_file(path), SafetensorsFile(path)
    for name, value in values.items():
        for read in (theirs[name], file.raw(name), file.aligned(name)):
            assert read.dtype == value.dtype
            np.testing.assert_array_equal(read, value)
        with pytest.raises(CheckpointError, match=f"'{name}' has dtype (I8|U16); use F32, BF16, F16"):
            file.read(name)
    for wrong in ("uint16", "int8"):
        with pytest.raises(CheckpointError, match=f"has dtype u?int[0-9]+, but is to be stored as {wrong}"):
            write_safetensors(path, shapes, values.items(), dtype=dict.fromkeys(shapes, wrong))


def test_reads_what_the_reference_library_writes(tmp_path: Path) -> None:
    safetensors.numpy.save_file({**VALUES, "half": VALUES["a"].astype(np.float16)}, tmp_path / "x", metadata={"k": "v"})
    file = SafetensorsFile(tmp_path / "x")
    assert file.metadata == {"k": "v"}
    np.testing.assert_array_equal(file.read("b"), VALUES["b"])
    np.testing.assert_array_equal(file.read("half"), VALUES["a"].astype(np.float16).astype(np.float32))


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch

    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    special = np.array([0, 0x80000000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    actual = to_float32(to_bfloat16(values))
    np.testing.assert_array_equal(actual[~np.isnan(values)], expected[~np.isnan(values)])
    assert np.isnan(actual[np.isnan(values)]).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda items: items[:1], "tensor 'b' is missing"),
        (lambda items: [*items, items[0]], "tensor 'a' was given twice"),
        (lambda items: [*items, ("c", items[0][1])], "tensor 'c' is unexpected"),
        (lambda items: [("a", items[0][1].T), items[1]], "tensor 'a' has shape [3, 2], expected [2, 3]"),
        (lambda items: [("a", items[0][1] * 1e6), items[1]], "tensor 'a' holds 857143, too large for float16"),
    ],
)
def test_the_writer_refuses_wrong_tensors(tmp_path: Path, change: Callable[[Any], Any], words: str) -> None:
    shapes = {name: value.shape for name, value in VALUES.items()}
    with pytest.raises(CheckpointError) as caught:
        write_safetensors(tmp_path / "x", shapes, change(list(VALUES.items())), dtype="float16")
    assert words in str(caught.value)
    with pytest.raises(CheckpointError, match="dtype must be one of"):
        write_safetensors(tmp_path / "x", shapes, [], dtype="int8")
