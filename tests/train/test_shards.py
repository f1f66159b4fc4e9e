"""The shard format and the dataset over it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crucible_train.errors import TrainingError
from crucible_train.manifest import read_manifest
from crucible_train.shard_writer import ShardWriter
from crucible_train.shards import HEADER_BYTES, ShardHeader, TokenDataset, open_shard, token_dtype
from tests.train.prepared import SEPARATOR_ID, dataset_of

HEADER = ShardHeader(np.dtype("<u2"), 3, 257, 256, 10, 2, bytes(range(32)))


def writer(directory: Path, *, written: int = 0, shard_tokens: int = 10, id_count: int = 257) -> ShardWriter:
    return ShardWriter(
        directory,
        "train",
        id_count=id_count,
        separator_id=SEPARATOR_ID,
        vocabulary_sha256=bytes(32),
        shard_tokens=shard_tokens,
        written=written,
    )


@pytest.mark.parametrize(("ids", "width"), [(257, 2), (65536, 2), (65537, 4), (128256, 4)])
def test_the_width_holds_every_id(ids: int, width: int) -> None:
    dtype = token_dtype(ids)
    assert dtype.itemsize == width
    assert dtype.type(ids - 1) == ids - 1


def test_header_comes_back() -> None:
    data = HEADER.to_bytes()
    assert len(data) == HEADER_BYTES
    assert ShardHeader.from_bytes(data, "x") == HEADER


def test_header_names_what_is_wrong() -> None:
    data = HEADER.to_bytes()
    with pytest.raises(TrainingError, match="x: not a token shard"):
        ShardHeader.from_bytes(b"\x93NUMPY" + data[6:], "x")
    with pytest.raises(TrainingError, match="x: not a token shard"):
        ShardHeader.from_bytes(data[:200], "x")
    for position in (12, 40, 100, 255):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(TrainingError, match="damaged"):
            ShardHeader.from_bytes(bytes(damaged), "x")
    with pytest.raises(TrainingError, match="8 bytes an id"):
        ShardHeader.from_bytes(replace(HEADER, dtype=np.dtype("<u8")).to_bytes(), "x")


def test_shards_are_full_but_the_last(tmp_path: Path) -> None:
    out = writer(tmp_path)
    for start in range(0, 25, 5):
        out.append(np.arange(start, start + 5))
    infos = out.finish()
    assert [info.tokens for info in infos] == [10, 10, 5]
    tokens = [open_shard(tmp_path / info.file).tokens.tolist() for info in infos]
    assert tokens == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"train-0000{n}.tokens" for n in range(3)]


def test_an_exact_number_of_shards_leaves_no_empty_one(tmp_path: Path) -> None:
    out = writer(tmp_path)
    out.append(np.full(20, SEPARATOR_ID))
    assert [(info.tokens, info.documents) for info in out.finish()] == [(10, 10), (10, 10)]
    assert writer(tmp_path, written=20).finish()[1].tokens == 10


def test_uint32_keeps_large_ids(tmp_path: Path) -> None:
    out = writer(tmp_path, id_count=70000)
    out.append(np.array([65535, 65536, 69999], np.uint32))
    (info,) = out.finish()
    assert open_shard(tmp_path / info.file).tokens.tolist() == [65535, 65536, 69999]


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("added", [0, 1, 30])
@pytest.mark.parametrize("written", [0, 3, 10, 13, 20, 27])
def test_writing_goes_on_from_what_is_known_to_be_good(
    tmp_path: Path, written: int, added: int, finished: bool
) -> None:
    first = writer(tmp_path)
    first.append(np.arange(28))
    if finished:
        first.finish()
    else:
        first.sync()
        first.abandon()
    second = writer(tmp_path, written=written)
    second.append(np.arange(100, 100 + added))
    infos = second.finish()
    tokens = [int(token) for info in infos for token in open_shard(tmp_path / info.file).tokens]
    assert tokens == [*range(written), *range(100, 100 + added)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [info.file for info in infos]


def test_going_on_without_the_files_is_refused(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.append(np.arange(15))
    first.sync()
    first.abandon()
    with pytest.raises(TrainingError, match=r"train-00001\.tokens.*--restart"):
        writer(tmp_path, written=17)
    (tmp_path / "train-00000.tokens").unlink()
    with pytest.raises(TrainingError, match=r"train-00000\.tokens.*--restart"):
        writer(tmp_path, written=15)


def test_gather_reads_across_shards(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, 95, shard_tokens=10)
    offsets = np.array([0, 5, 9, 10, 70, 72, 3, 3])
    for length in (1, 10, 11, 23):
        got = dataset.gather(offsets, length)
        assert got.dtype == np.int32
        assert (got == offsets[:, None] + np.arange(length)).all()
    assert dataset.all().tolist() == list(range(95))
    assert dataset.read(90, 50).tolist() == list(range(90, 95))
    assert dataset.bytes_per_token == 3


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (92, 4), (95, 1), (0, 0)])
def test_gather_refuses_windows_that_leave_the_split(tmp_path: Path, offset: int, length: int) -> None:
    dataset = dataset_of(tmp_path, 95, shard_tokens=10)
    with pytest.raises(TrainingError, match="leave the 95 tokens"):
        dataset.gather(np.array([0, offset]), length)


def test_a_dataset_checks_its_shards(tmp_path: Path) -> None:
    dataset_of(tmp_path, 25, shard_tokens=10)
    shard = tmp_path / "train-00001.tokens"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(TrainingError, match="header says 10 tokens, the file holds 9"):
        TokenDataset(tmp_path, "train")
    for bad in (whole[:-1], whole + b"ab", whole + b"a"):
        shard.write_bytes(bad)
        with pytest.raises(TrainingError, match="header says 10 tokens"):
            TokenDataset(tmp_path, "train")
    header = ShardHeader.from_bytes(whole, shard)
    shard.write_bytes(replace(header, vocabulary_sha256=bytes(32)).to_bytes() + whole[HEADER_BYTES:])
    with pytest.raises(TrainingError, match="another vocabulary"):
        TokenDataset(tmp_path, "train")
    shard.write_bytes(replace(header, token_count=9).to_bytes() + whole[HEADER_BYTES:-2])
    with pytest.raises(TrainingError, match="not the shard that the manifest describes"):
        TokenDataset(tmp_path, "train")
    shard.unlink()
    with pytest.raises(TrainingError, match=r"train-00001\.tokens: No such file"):
        TokenDataset(tmp_path, "train")


def test_a_directory_without_a_good_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no prepared data"):
        TokenDataset(tmp_path, "train")
    with pytest.raises(TrainingError, match="must be train or val"):
        TokenDataset(tmp_path, "test")
    dataset_of(tmp_path, 25)
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text()
    for bad in (
        "{",
        "[]",
        "\udc80",
        text.replace('"version": 1', '"version": 2'),
        text.replace('"tokens": 25', '"x": 1'),
    ):
        manifest.write_bytes(bad.encode("utf-8", "surrogateescape"))
        with pytest.raises(TrainingError, match=r"manifest\.json") as caught:
            read_manifest(tmp_path)
        assert "\n" not in str(caught.value)
    manifest.write_text(text.replace('"tokens": 25, "documents"', '"tokens": 26, "documents"', 1))
    with pytest.raises(TrainingError, match="hold 25 tokens, not 26"):
        TokenDataset(tmp_path, "train")
