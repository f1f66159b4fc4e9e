"""The safetensors container: a memory-mapped reader that trusts nothing, and a streaming writer.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data, which
the tensors cover exactly (https://github.com/huggingface/safetensors, "Format"). Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.errors import CheckpointError
from crucible.json_file import parse_json, shown

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes an element of each dtype of the format."""

FLOAT_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The dtypes that a float tensor may be stored in, and what they are called elsewhere."""

INTEGER_NAMES = {"I8": "int8", "U16": "uint16"}
"""The dtypes of quantised weights; they are written and read as they are."""

_FLOAT_CODES = {name: code for code, name in FLOAT_NAMES.items()}
_CODES = _FLOAT_CODES | {name: code for code, name in INTEGER_NAMES.items()}
_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "U16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the reference reader's limit
_CHUNK = 1 << 20  # elements converted at a time
_ALIGN = 64  # data start of files written here: float32 views are then aligned for every vector width


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes ``start`` … ``end`` of the data part."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A read-only memory map of one file; ``entries`` maps each tensor name to its TensorEntry."""

    path: Path
    size: int
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]

    def __init__(self, path: str | Path) -> None:
        """Opens and checks the whole layout; no data is read. Raises CheckpointError naming file and fault."""
        self.path = Path(path)
        try:
            with open(self.path, "rb", opener=_open_without_blocking) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise CheckpointError(f"{self.path}: not a regular file")
                self.size = size = status.st_size
                if size < 8:
                    raise CheckpointError(f"{self.path}: truncated: {size} bytes are too short for a safetensors file")
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be opened ({_reason(error)})") from None
        try:
            length = int.from_bytes(self._map[:8], "little")
            if length > size - 8:
                fault = f"safetensors header of {length} bytes does not fit in a file of {size}"
                raise CheckpointError(f"{self.path}: {fault}; truncated or corrupt")
            if not 2 <= length <= _MAX_HEADER:
                raise CheckpointError(f"{self.path}: impossible safetensors header length {length}")
            self._data = 8 + length
            self.entries, self.metadata = _parse_header(self._map[8 : self._data], size - self._data, self.path)
        except CheckpointError:
            self._map.close()
            raise

    def raw(self, name: str) -> NDArray[Any]:
        """The tensor as stored: a read-only view of the map (bfloat16 as its uint16 bit patterns)."""
        entry = self.entries[name]
        array = np.frombuffer(self._map, _NUMPY[entry.dtype], math.prod(entry.shape), self._data + entry.start)
        return array.reshape(entry.shape)

    def read(self, name: str) -> NDArray[np.float32]:
        """A float tensor as C-contiguous float32: a view of the map where possible, a converted copy otherwise."""
        code = self.entries[name].dtype
        if code not in FLOAT_NAMES:
            raise CheckpointError(f"{self.path}: tensor {shown(name)} has dtype {code}; use {', '.join(FLOAT_NAMES)}")
        return self.aligned(name) if code == "F32" else to_float32(self.raw(name))

    def aligned(self, name: str) -> NDArray[Any]:
        """The tensor as stored, a view where possible.

        A header of odd length leaves the data unaligned, which numpy takes and compiled kernels may not.
        """
        raw = self.raw(name)
        return raw if raw.flags.aligned else raw.copy()

    def release(self, name: str) -> None:
        """Lets the kernel drop the pages of this tensor from the process; reading it again faults them back in."""
        entry = self.entries[name]
        if hasattr(mmap, "MADV_DONTNEED") and entry.end > entry.start:
            start = (self._data + entry.start) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, self._data + entry.end - start)

    def close(self) -> None:
        """Unmaps the file, or leaves that to the garbage collector while arrays still view it."""
        with suppress(BufferError):
            self._map.close()


def locate(files: list[SafetensorsFile], shard_of: dict[str, Path] | None, index: Path) -> dict[str, SafetensorsFile]:
    """Which of ``files`` holds each tensor.

    shard_of: the file that ``index`` names for each tensor; it and the shards must agree. Raises CheckpointError.
    """
    holders: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.entries:
            if name in holders:
                raise CheckpointError(f"{file.path}: tensor {shown(name)} is also in {holders[name].path.name}")
            if shard_of is not None and shard_of.get(name) != file.path:
                raise CheckpointError(f"{file.path}: tensor {shown(name)} is not listed for this shard in {index.name}")
            holders[name] = file
    for name, shard in (shard_of or {}).items():
        if name not in holders:
            raise CheckpointError(f"{shard}: tensor {shown(name)} is missing, though {index.name} lists it")
    return holders


def _open_without_blocking(path: str, flags: int) -> int:
    """Opening a FIFO for reading would otherwise wait for a writer forever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _parse_header(data: bytes, data_bytes: int, path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    if data[:1] != b"{":
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    header = parse_json(data, f"{path}: safetensors header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")
    entries = {name: _parse_entry(name, fields, path) for name, fields in header.items()}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > data_bytes:
            fault = f"tensor {shown(name)} ends at offset {entry.end} of {data_bytes} bytes of data"
            raise CheckpointError(f"{path}: truncated: {fault}")
        if entry.start != position:
            fault = "overlaps another" if entry.start < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {shown(name)} {fault}: offset {entry.start} instead of {position}")
        position = entry.end
    if position != data_bytes:
        raise CheckpointError(f"{path}: size mismatch: {data_bytes - position} bytes after the last tensor")
    return entries, metadata


def _parse_entry(name: str, fields: Any, path: Path) -> TensorEntry:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: the header must give dtype, shape and data_offsets, got {shown(fields)}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: unknown dtype {shown(dtype)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        # bool is an int to Python, and 2.0 == 2: only real, non-negative integers pass
        if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise CheckpointError(f"{where}: {what} must be a list of non-negative integers, got {shown(numbers)}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets must be [start, end], got {shown(offsets)}")
    if len(shape) > 64:
        raise CheckpointError(f"{where}: shape has {len(shape)} dimensions")
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if needed != offsets[1] - offsets[0]:
        fault = f"{dtype} {shown(shape)} needs {shown(needed)} bytes, data_offsets span {offsets[1] - offsets[0]}"
        raise CheckpointError(f"{where}: size mismatch: {fault}")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def to_float32(raw: NDArray[Any]) -> NDArray[np.float32]:
    """float16, or bfloat16 given as uint16 bit patterns, as a new float32 array (exact)."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 rounded to the nearest bfloat16 (ties to even), as uint16 bit patterns; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, NDArray[Any]]],
    *,
    dtype: str | Mapping[str, str] = "float32",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes ``path`` while ``tensors`` arrive, in any order; only a slice of one is ever converted at a time.

    ``shapes`` names every tensor of the file. dtype: float32, bfloat16 or float16; or one of these, int8 or uint16 for
    each name, where integers must be given as such. The file is flushed to the disk. Raises CheckpointError for a
    tensor that is missing, unknown, repeated, of another shape, or not of its integer type.
    """
    codes: dict[str, str] = {}
    known = _FLOAT_CODES if isinstance(dtype, str) else _CODES
    for name in shapes:
        wanted = dtype if isinstance(dtype, str) else dtype.get(name)
        if wanted not in known:
            which = "dtype" if isinstance(dtype, str) else f"dtype of {shown(name)}"
            raise CheckpointError(f"{which} must be one of {', '.join(known)}, got {wanted!r}")
        codes[name] = known[wanted]
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    position = 0
    for name in sorted(shapes, key=lambda name: -ITEM_BYTES[codes[name]]):  # the widest first: then all are aligned
        starts[name] = position
        position += math.prod(shapes[name]) * ITEM_BYTES[codes[name]]
        header[name] = {"dtype": codes[name], "shape": list(shapes[name]), "data_offsets": [starts[name], position]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % _ALIGN)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, values in tensors:
            if name not in shapes:
                raise CheckpointError(f"tensor {shown(name)} is unexpected")
            if name not in starts:
                raise CheckpointError(f"tensor {shown(name)} was given twice")
            if values.shape != shapes[name]:
                fault = f"has shape {list(values.shape)}, expected {list(shapes[name])}"
                raise CheckpointError(f"tensor {shown(name)} {fault}")
            file.seek(8 + len(encoded) + starts.pop(name))
            flat = np.ascontiguousarray(values).reshape(-1)
            for first in range(0, flat.size, _CHUNK):
                file.write(_convert(name, flat[first : first + _CHUNK], codes[name]).data)
        if starts:
            raise CheckpointError(f"tensor {shown(next(iter(starts)))} is missing")
        file.flush()
        os.fsync(file.fileno())


def _convert(name: str, values: NDArray[Any], code: str) -> NDArray[Any]:
    if code in INTEGER_NAMES:
        if values.dtype != _NUMPY[code]:
            fault = f"has dtype {values.dtype}, but is to be stored as {INTEGER_NAMES[code]}"
            raise CheckpointError(f"tensor {shown(name)} {fault}")
        return values
    values = np.ascontiguousarray(values, dtype=np.float32)
    if code == "BF16":
        return to_bfloat16(values)
    with np.errstate(over="ignore"):
        stored = values.astype(_NUMPY[code], copy=False)
    if code == "F16" and (np.isinf(stored) & np.isfinite(values)).any():
        fault = f"holds {np.abs(values).max():g}, too large for float16; use bfloat16"
        raise CheckpointError(f"tensor {shown(name)} {fault}")
    return stored
