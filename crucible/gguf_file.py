"""The GGUF container (v2, v3, little-endian): metadata, tensor table and data, memory-mapped, nothing trusted.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Counts and lengths are checked against the bytes
that are left before anything is allocated. Block formats are dequantised by PyPI ``gguf``. Knows nothing of models.
"""

from __future__ import annotations

import math
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.errors import CheckpointError
from crucible.json_file import shown

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """``shape`` in numpy's order (rows first); ``start`` is a file offset; ``kind`` a gguf.GGMLQuantizationType."""

    kind: Any
    shape: tuple[int, ...]
    start: int
    size: int


class GgufFile:
    """One GGUF file: ``fields`` (metadata; strings, numbers, lists) and ``tensors`` by name."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def __init__(self, path: str | Path) -> None:
        """Reads metadata and tensor table and checks every extent. Raises CheckpointError naming file and fault."""
        self.path = Path(path)
        try:
            if not self.path.is_file():
                raise CheckpointError(f"{self.path}: no such file")
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self.path}: cannot be opened ({reason})") from None
        self._at = 0
        try:
            self._read_header()
        except struct.error:
            self.close()
            raise CheckpointError(f"{self.path}: truncated: the GGUF header does not end in the file") from None
        except CheckpointError as error:
            self.close()
            raise CheckpointError(f"{self.path}: {error}") from None

    def read(self, name: str) -> NDArray[np.float32]:
        """Tensor ``name`` dequantised to float32 [shape]. Raises CheckpointError for a type that PyPI gguf cannot."""
        from gguf import GGMLQuantizationType, dequantize

        tensor = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, tensor.size, tensor.start)
        if tensor.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            stored = data.view("<f4" if tensor.kind == GGMLQuantizationType.F32 else "<f2")
            return stored.astype(np.float32).reshape(tensor.shape)
        rows = data.reshape(*tensor.shape[:-1], -1)
        try:
            with np.errstate(all="ignore"):
                values = dequantize(rows, tensor.kind)
        except NotImplementedError:
            fault = f"{tensor.kind.name} cannot be dequantised by this gguf package"
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: {fault}") from None
        return np.ascontiguousarray(values, dtype=np.float32).reshape(tensor.shape)

    def close(self) -> None:
        """Unmaps the file (or leaves that to the garbage collector while arrays view it)."""
        with suppress(BufferError):
            self._map.close()

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise CheckpointError(f"not a GGUF file (it starts with {shown(self._map[:4])})")
        self._at = 4
        version = self._unpack("I")
        if version not in (2, 3):
            other = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise CheckpointError(f"GGUF version {version}{other} is not supported; 2 and 3 are")
        tensor_count, field_count = self._unpack("Q"), self._unpack("Q")
        self._check_count(tensor_count, 24, "tensors")
        self._check_count(field_count, 13, "metadata fields")
        self.fields = {}
        for _ in range(field_count):
            name = self._string()
            if name in self.fields:
                raise CheckpointError(f"duplicate metadata field {shown(name)}")
            self.fields[name] = self._value(self._unpack("I"), name)
        table = [self._tensor_row() for _ in range(tensor_count)]
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            raise CheckpointError(f"general.alignment must be a multiple of 8, got {shown(alignment)}")
        self.tensors = {}
        data_start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in table:
            if name in self.tensors:
                raise CheckpointError(f"duplicate tensor {shown(name)}")
            self.tensors[name] = self._place(name, kind, shape, data_start + offset, alignment)
        self._check_overlaps()

    def _tensor_row(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._string(), self._unpack("I")
        if not 1 <= dimensions <= 4:
            raise CheckpointError(f"tensor {shown(name)} has {dimensions} dimensions")
        sizes = tuple(self._unpack("Q") for _ in range(dimensions))
        return name, self._unpack("I"), sizes[::-1], self._unpack("Q")  # the file puts the fastest axis first

    def _place(self, name: str, code: int, shape: tuple[int, ...], start: int, alignment: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(code)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise CheckpointError(f"tensor {shown(name)} has type {code}, unknown to this gguf package") from None
        if 0 in shape:
            raise CheckpointError(f"tensor {shown(name)} is empty: its shape is {list(shape)}")
        if shape[-1] % block:
            raise CheckpointError(f"tensor {shown(name)}: {kind.name} rows hold multiples of {block}, got {shape[-1]}")
        size = math.prod(shape) // block * block_bytes
        if start % alignment:
            raise CheckpointError(f"tensor {shown(name)}: offset {start} is not aligned to {alignment}")
        if start + size > len(self._map):
            raise CheckpointError(f"truncated: tensor {shown(name)} ends at {start + size} of {len(self._map)} bytes")
        return GgufTensor(kind, shape, start, size)

    def _check_overlaps(self) -> None:
        end = 0
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise CheckpointError(f"tensor {shown(name)} overlaps another at offset {tensor.start}")
            end = tensor.start + tensor.size

    def _value(self, kind: int, name: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 3:
            raise CheckpointError(f"metadata field {shown(name)} has unknown type {kind}")
        item, count = self._unpack("I"), self._unpack("Q")
        if item in _SCALARS:
            self._check_count(count, struct.calcsize("<" + _SCALARS[item]), f"values in {shown(name)}")
            values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self._map, self._at)
            self._at += struct.calcsize(f"<{count}{_SCALARS[item]}")
            return list(values)
        self._check_count(count, 8, f"values in {shown(name)}")
        return [self._value(item, name, depth + 1) for _ in range(count)]

    def _unpack(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._unpack("Q")
        self._check_count(length, 1, "bytes in a string")
        data = self._map[self._at : self._at + length]
        self._at += length
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"a metadata string is not UTF-8: {shown(data)}") from None

    def _check_count(self, count: int, item_bytes: int, what: str) -> None:
        """Fails before a lying count costs memory or time."""
        left = len(self._map) - self._at
        if count * item_bytes > left:
            raise CheckpointError(f"truncated or corrupt: {count} {what}, but only {left} bytes are left")
