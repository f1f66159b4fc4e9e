"""Reading documents out of files, and taking blocks apart."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from crucible_train import documents as documents_module
from crucible_train import sources
from crucible_train.documents import documents
from crucible_train.errors import TrainingError
from crucible_train.sources import FileSource, find_sources

TEXTS = ["one\n", "two <|endoftext|> inside\n", " <|endoftext|>\nnot alone\n", "dréi \U0001f600\r\n\n", "last\n"]


def read(path: Path, field: str = "text") -> list[str]:
    return [text for block in FileSource(path, field).blocks() for text, _ in documents(block, field)]


def as_text(texts: list[str]) -> bytes:
    return "<|endoftext|>\n".join(texts).encode()


def as_jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


@pytest.fixture(params=[17, 64, 1 << 20])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("compression", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("form", ["txt", "jsonl"])
def test_every_format_gives_the_same_documents(tmp_path: Path, form: str, compression: str) -> None:
    zstandard = pytest.importorskip("zstandard") if compression == ".zst" else None
    data = as_text(TEXTS) if form == "txt" else as_jsonl(TEXTS)
    half = len(data) // 2  # two members or frames: both count
    path = tmp_path / f"a.{form}{compression}"
    if compression == ".gz":
        data = gzip.compress(data[:half]) + gzip.compress(data[half:])
    elif compression == ".xz":
        data = lzma.compress(data[:half]) + lzma.compress(data[half:])
    elif zstandard:
        pack = zstandard.ZstdCompressor().compress
        data = pack(data[:half]) + pack(data[half:])
    path.write_bytes(data)
    assert read(path) == TEXTS


@pytest.mark.usefixtures("block_bytes")
def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"n": range(200), "body": TEXTS * 39 + [None, *TEXTS[1:]]})
    parquet.write_table(table, path, row_group_size=90)
    assert read(path, "body") == TEXTS * 39 + ["", *TEXTS[1:]]
    for field, message in (("text", "no column 'text'.*n, body"), ("n", "holds int64, not text")):
        with pytest.raises(TrainingError, match=message):
            read(path, field)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(TrainingError, match="not readable as Parquet") as caught:
        read(path, "body")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\n<|endoftext|>\n", ["a\n"]),
        (b"a\n<|endoftext|>", ["a\n"]),
        (b"a\r\n<|endoftext|>\r\nb", ["a\r\n", "b"]),
        (b"<|endoftext|>\n<|endoftext|>\na", ["", "", "a"]),
        (b"a<|endoftext|>\n<|endoftext|>b\n", ["a<|endoftext|>\n<|endoftext|>b\n"]),
        (b"\xef\xbb\xbfa\n", ["a\n"]),
        (b"no line end", ["no line end"]),
    ],
)
@pytest.mark.usefixtures("block_bytes")
def test_separator_lines(tmp_path: Path, data: bytes, expected: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    assert read(path) == expected


@pytest.mark.usefixtures("block_bytes")
def test_a_long_document_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DOCUMENT_BYTES", 100)
    monkeypatch.setattr(documents_module, "DOCUMENT_BYTES", 100)
    path = tmp_path / "a.txt"
    line = "0123456é\n"  # ten bytes
    path.write_text(f"short\n<|endoftext|>\n{line * 25}<|endoftext|>\nend\n", encoding="utf-8")
    blocks = list(FileSource(path).blocks())
    found = [piece for block in blocks for text, _ in documents(block) for piece in documents_module._pieces(text)]
    assert "".join(found) == f"short\n{line * 25}end\n"
    assert all(len(piece.encode()) <= 110 and piece.endswith("\n") for piece in found)
    path.write_text("x" + "é" * 333, encoding="utf-8")  # no line end: cut between characters
    assert "".join(read(path)) == "x" + "é" * 333


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3: not valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', r"a\.jsonl:2: no field 'text' in this line \(--text-field"),
        ("a.jsonl", b'{"text": 7}\n', r"a\.jsonl:1: the field 'text' is not a string"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: no field 'text'"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2: byte 10 of the line is not UTF-8"),
        ("a.txt", b"a\nb\n<|endoftext|>\nc\nd \xe9\n", r"a\.txt:5: byte 0xe9 at offset 22 of the text is not UTF-8"),
        ("a.txt.gz", b"plain", r"a\.txt\.gz: damaged"),
        ("a.txt.gz", gzip.compress(b"a" * 999)[:-9], r"a\.txt\.gz: damaged"),
        ("a.txt.xz", lzma.compress(b"a" * 999)[:-9], r"a\.txt\.xz: damaged \.xz"),
        ("a.txt.xz", b"plain", r"a\.txt\.xz: damaged \.xz"),
    ],
)
@pytest.mark.usefixtures("block_bytes")
def test_bad_content_is_one_line_with_its_place(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TrainingError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_line_too_long_for_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_jsonl(["a", "b" * 900, "c" * 2000]))
    with pytest.raises(TrainingError, match=r"a\.jsonl:3: a line of more than 0 MiB"):
        read(path)


def test_a_cut_off_zst_file_is_noticed(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    data = zstandard.ZstdCompressor().compress(bytes(range(256)) * 999)
    path = tmp_path / "a.txt.zst"
    for bad in (data[:-3], data[:30], b"plain text"):
        path.write_bytes(bad)
        with pytest.raises(TrainingError, match=r"damaged \.zst"):
            list(FileSource(path).blocks())


def test_half_a_surrogate_pair_is_let_through(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a\\ud83d b", "score": NaN}\n')
    assert read(path) == ["a\ud83d b"]


def test_inputs_are_found_in_order(tmp_path: Path) -> None:
    for name in ("b/x.txt", "b/a.jsonl.gz", "b/.hidden.txt", "b/.git/y.txt", "b/notes.md", "b/c/z.TXT", "a.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [
        str(source.path.relative_to(tmp_path)) for source in find_sources([tmp_path / "b", tmp_path / "a.parquet"])
    ]
    assert found == ["b/a.jsonl.gz", "b/c/z.TXT", "b/x.txt", "a.parquet"]


def test_impossible_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "none").mkdir()
    for given, message in (
        (["a.txt", "../{}/a.txt"], "given twice"),
        (["a.md"], "unknown kind of file"),
        (["a.parquet.gz"], "No such file"),
        (["empty.txt"], "the file is empty"),
        (["none"], r"no \.txt.*file in this directory"),
    ):
        with pytest.raises(TrainingError, match=message):
            find_sources([tmp_path / name.format(tmp_path.name) for name in given])
