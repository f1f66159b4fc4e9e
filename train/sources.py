"""Where text comes from: .txt, .jsonl and .parquet files, plain or compressed, directories of them, and Hub datasets.

A source is read as blocks of whole documents: bytes of .txt and .jsonl, which a worker takes apart
(crucible_train.documents), or lists of texts. What a block holds depends on the content alone, so counting blocks is
enough to go on where an earlier run stopped.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from crucible_train.errors import TrainingError
from crucible_train.files import file_sha256

SEPARATOR_TEXT = b"<|endoftext|>"
"""A line that holds only this parts the documents of a .txt file."""
BLOCK_BYTES = 1 << 20
DOCUMENT_BYTES = 16 << 20
"""A longer document is cut, at a line end where there is one: memory stays bounded whatever the input."""
MAX_LINE_BYTES = 32 << 20
PARQUET_ROWS = 64
FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".xz", ".zst")
NEWLINE = 0x0A
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Some whole documents of a source.

    ``data``: bytes of a .txt or .jsonl file that begin at byte ``offset`` and line ``line`` (from 1) of its text, or
    the texts themselves, the first of which is number ``line``. ``position``: bytes of the file read so far.
    ``cut``: the last document goes on in the next block, as one of its own.
    """

    source: str
    format: str
    data: bytes | list[str | None]
    line: int
    offset: int
    position: int
    cut: bool = False

    @property
    def size(self) -> int:
        """How much text it holds: bytes, or characters."""
        return len(self.data) if isinstance(self.data, bytes) else sum(len(text or "") for text in self.data)


class Source(Protocol):
    """Something that yields blocks, the same ones every time. ``size``: bytes to read, 0 where that is unknown.

    ``stamp`` changes when the content may have: a run that goes on checks it.
    """

    name: str
    format: str
    size: int
    stamp: int

    def blocks(self) -> Iterator[Block]: ...

    def sha256(self) -> str: ...


def find_sources(inputs: Sequence[str | Path], text_field: str = "text") -> list[FileSource]:
    """The files of ``inputs`` in order, a directory's sorted by path (hidden and unknown files left out).

    Raises TrainingError for an input that is missing, empty, of an unknown format or given twice.
    """
    found: dict[Path, FileSource] = {}
    for given in map(Path, inputs):
        if given.is_dir():
            paths = [path for path in sorted(given.rglob("*")) if path.is_file() and _is_data(path, given)]
            if not paths:
                raise TrainingError(f"{given}: no {_known()} file in this directory")
        else:
            paths = [given]
        for path in paths:
            source = FileSource(path, text_field)
            if path.resolve() in found:
                raise TrainingError(f"{path}: given twice; its text would count twice")
            found[path.resolve()] = source
    return list(found.values())


def _is_data(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and _format_of(path) is not None


def _format_of(path: Path) -> tuple[str, str] | None:
    suffix, compression = path.suffix.lower(), ""
    if suffix in COMPRESSIONS:
        suffix, compression = Path(path.stem).suffix.lower(), suffix
    form = FORMATS.get(suffix)
    return None if form is None or (form == "parquet" and compression) else (form, compression)


def _known() -> str:
    return f"{', '.join(FORMATS)} (also {', '.join(COMPRESSIONS)})"


class FileSource:
    """One file on the disk."""

    def __init__(self, path: Path, text_field: str = "text") -> None:
        self.path = path
        self.name = str(path)
        self._text_field = text_field
        try:
            status = path.stat()
        except OSError as error:
            raise TrainingError(f"{path}: {error.strerror}") from None
        self.size, self.stamp = status.st_size, status.st_mtime_ns
        known = _format_of(path)
        if known is None:
            raise TrainingError(f"{path}: unknown kind of file; known are {_known()}")
        self.format, self._compression = known
        if not self.size:
            raise TrainingError(f"{path}: the file is empty; leave it out")

    def sha256(self) -> str:
        """Of the file as it lies there, in hexadecimal."""
        return file_sha256(self.path)

    def blocks(self) -> Iterator[Block]:
        """Raises TrainingError, naming the file, where it cannot be read."""
        try:
            with self.path.open("rb") as raw:
                if self.format == "parquet":
                    yield from self._parquet_blocks(raw)
                else:
                    yield from self._byte_blocks(raw)
        except OSError as error:  # also what gzip says of data that is not its own
            raise TrainingError(f"{self.path}: {error.strerror or f'damaged ({error})'}") from None
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise TrainingError(f"{self.path}: damaged {self._compression} data ({error}); copy it again") from None

    def _byte_blocks(self, raw: BinaryIO) -> Iterator[Block]:
        read = _reader(raw, self._compression, self.path)
        cut_at = _cut_text if self.format == "txt" else self._cut_lines
        pending = read(BLOCK_BYTES)
        line, offset = 1, 0
        if pending.startswith(BYTE_ORDER_MARK):
            pending, offset = pending[len(BYTE_ORDER_MARK) :], len(BYTE_ORDER_MARK)
        while chunk := read(BLOCK_BYTES):
            end, cut = cut_at(pending, line)
            if end:
                data, pending = pending[:end], pending[end:]
                yield Block(self.name, self.format, data, line, offset, raw.tell(), cut)
                line += data.count(b"\n")
                offset += end
            pending += chunk
        while pending:
            end, cut = cut_at(pending, line) if len(pending) > DOCUMENT_BYTES else (0, False)
            end = end or len(pending)
            data, pending = pending[:end], pending[end:]
            yield Block(self.name, self.format, data, line, offset, raw.tell(), cut)
            line += data.count(b"\n")
            offset += end

    def _cut_lines(self, data: bytes, line: int) -> tuple[int, bool]:
        end = data.rfind(b"\n") + 1
        if not end and len(data) > MAX_LINE_BYTES:
            raise TrainingError(f"{self.path}:{line}: a line of more than {MAX_LINE_BYTES >> 20} MiB is not read")
        return end, False

    def _parquet_blocks(self, raw: BinaryIO) -> Iterator[Block]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise TrainingError(f"{self.path}: reading Parquet needs pyarrow; install it") from None
        try:
            file = pyarrow.parquet.ParquetFile(raw)
            if self._text_field not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise TrainingError(f"{self.path}: no column {self._text_field!r} (--text-field); it has {names}")
            column = file.schema_arrow.field(self._text_field).type
            if not (pyarrow.types.is_string(column) or pyarrow.types.is_large_string(column)):
                raise TrainingError(f"{self.path}: column {self._text_field!r} holds {column}, not text")
            batches = file.iter_batches(PARQUET_ROWS, columns=[self._text_field], use_threads=False)
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            done, rows = 0, max(file.metadata.num_rows, 1)
            for block in text_blocks(self.name, self.format, texts):
                done += len(block.data)
                yield replace(block, position=self.size * done // rows)
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise TrainingError(f"{self.path}: not readable as Parquet ({str(error).splitlines()[0]})") from None


def text_blocks(name: str, form: str, texts: Iterable[str | None], first: int = 1) -> Iterator[Block]:
    """Blocks of about BLOCK_BYTES characters out of single texts, of which the first is number ``first``."""
    waiting: list[str | None] = []
    size = 0
    for text in texts:
        waiting.append(text)
        size += len(text or "")
        if size >= BLOCK_BYTES:
            yield Block(name, form, waiting, first, 0, 0)
            first += len(waiting)
            waiting, size = [], 0
    if waiting:
        yield Block(name, form, waiting, first, 0, 0)


def separator_end(data: bytes, start: int) -> int:
    """Where the line ends that SEPARATOR_TEXT at ``start`` has to itself; 0 when it has not."""
    if start and data[start - 1] != NEWLINE:
        return 0
    end = start + len(SEPARATOR_TEXT)
    if data[end : end + 1] == b"\r":
        end += 1
    return end if end == len(data) else end + 1 if data[end] == NEWLINE else 0


def _cut_text(data: bytes, line: int) -> tuple[int, bool]:
    """Where a block of a .txt file may end, 0 for not yet, and whether that cuts a document."""
    start = len(data)
    while (start := data.rfind(SEPARATOR_TEXT, 0, start)) >= 0:
        end = separator_end(data, start)
        if end and data[end - 1] == NEWLINE:
            return end, False
    if len(data) <= DOCUMENT_BYTES:
        return 0, False
    end = data.rfind(b"\n", 0, DOCUMENT_BYTES) + 1 or DOCUMENT_BYTES
    while end > DOCUMENT_BYTES - 4 and data[end] & 0xC0 == 0x80:  # in the middle of a character
        end -= 1
    return end, True


def _reader(raw: BinaryIO, compression: str, path: Path) -> Callable[[int], bytes]:
    """A function that returns exactly so many bytes of the text, fewer only at its end."""
    if compression == ".gz":
        return gzip.GzipFile(fileobj=raw).read
    if compression == ".xz":
        return lzma.LZMAFile(raw).read
    if compression == ".zst":
        return _ZstandardReader(raw, path).read
    return raw.read


class _ZstandardReader:
    """All frames of a .zst file. zstandard's own reader takes a file that was cut short for a whole one."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise TrainingError(f"{path}: reading .zst needs zstandard; install it") from None
        self._raw, self._path = raw, path
        self._zstandard = zstandard
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._input = b""
        self._output = bytearray()

    def read(self, size: int) -> bytes:
        while len(self._output) < size and self._more():
            pass
        data = bytes(self._output[:size])
        del self._output[:size]
        return data

    def _more(self) -> bool:
        data = self._input or self._raw.read(1 << 14)
        self._input = b""
        if not data:
            if self._begun:
                raise TrainingError(f"{self._path}: damaged .zst data (it ends in the middle); copy it again")
            return False
        try:
            self._output += self._frame.decompress(data)
        except self._zstandard.ZstdError as error:
            raise TrainingError(f"{self._path}: damaged .zst data ({error}); copy it again") from None
        self._begun = not self._frame.eof
        if self._frame.eof:
            self._input = self._frame.unused_data
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        return True
