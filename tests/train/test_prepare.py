"""prepare: what the shards hold, that nothing but the input decides it, and that it survives being killed."""

from __future__ import annotations

import json
import lzma
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from crucible.tokenizer import Tokenizer
from crucible_train import documents as documents_module
from crucible_train import prepare as prepare_module
from crucible_train import sources
from crucible_train.documents import is_validation
from crucible_train.errors import TrainingError
from crucible_train.manifest import read_manifest
from crucible_train.prepare import default_processes, prepare
from crucible_train.shards import TokenDataset, open_shard
from tests.train.prepared import (
    SEPARATOR_ID,
    byte_vocabulary,
    documents_of,
    quick,
    split_tokens,
    texts,
    tree,
    write_jsonl,
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 500)
    monkeypatch.setattr(prepare_module, "SYNC_SECONDS", 0)


def test_documents_are_ordinary_text_with_the_separator_after_each(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", ["First doc.", "Second <|endoftext|> doc\n", "é\U0001f600 third"])
    prepare([source], tmp_path / "out", val_fraction=0)
    (shard,) = (tmp_path / "out").glob("*.tokens")
    # tiktoken's encode_ordinary of each, and 50256
    expected = [
        5962,
        2205,
        13,
        50256,
        12211,
        1279,
        91,
        437,
        1659,
        5239,
        91,
        29,
        2205,
        198,
        50256,
        2634,
        47249,
        222,
        2368,
    ]
    assert open_shard(shard).tokens.tolist() == [*expected, 50256]
    assert shard.read_bytes()[256:] == b"".join(token.to_bytes(2, "little") for token in [*expected, 50256])


def test_every_document_is_in_one_split_by_its_hash(tmp_path: Path) -> None:
    documents = texts(300)
    manifest = quick([write_jsonl(tmp_path / "d.jsonl", documents)], tmp_path / "out", val_fraction=0.2)
    for split, chosen in (("train", False), ("val", True)):
        own = [text.encode() for text in documents if is_validation(text.encode(), 0.2) is chosen]
        expected = [token for text in own for token in (*text, SEPARATOR_ID)]
        assert split_tokens(tmp_path / "out", split) == expected
        info = manifest.splits[split]
        assert (info.tokens, info.documents, info.bytes) == (len(expected), len(own), sum(map(len, own)))
        dataset = TokenDataset(tmp_path / "out", split)
        assert dataset.bytes_per_token == info.bytes / info.tokens
    assert 30 < manifest.splits["val"].documents < 90
    assert is_validation(b"", 0) is False


def test_splits_do_not_depend_on_the_order_of_the_input(tmp_path: Path) -> None:
    documents = texts(200)
    one = write_jsonl(tmp_path / "one.jsonl", documents)
    random.Random(0).shuffle(documents)
    parts = [write_jsonl(tmp_path / "a.jsonl", documents[:70]), tmp_path / "b.jsonl.xz"]
    parts[1].write_bytes(lzma.compress(write_jsonl(tmp_path / "b.jsonl", documents[70:]).read_bytes()))
    quick([one], tmp_path / "out1", val_fraction=0.3)
    quick(list(reversed(parts)), tmp_path / "out2", val_fraction=0.3)
    for split in ("train", "val"):
        first, second = (split_tokens(tmp_path / out, split) for out in ("out1", "out2"))
        assert first != second
        assert Counter(documents_of(first, SEPARATOR_ID)) == Counter(documents_of(second, SEPARATOR_ID))


def test_shards_cut_the_stream_without_losing_a_token(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts(400))
    quick([source], tmp_path / "one", val_fraction=0.1)
    manifest = quick([source], tmp_path / "many", val_fraction=0.1, shard_tokens=1000)
    for split in ("train", "val"):
        sizes = [shard.tokens for shard in manifest.splits[split].shards]
        assert len(sizes) > 1
        assert set(sizes[:-1]) == {1000}
        assert 0 < sizes[-1] <= 1000
        assert split_tokens(tmp_path / "one", split) == split_tokens(tmp_path / "many", split)
        assert sum(shard.documents for shard in manifest.splits[split].shards) == manifest.splits[split].documents


@pytest.mark.parametrize(("pairs", "dtype"), [(65279, "uint16"), (65280, "uint32"), (65536, "uint32")])
def test_ids_that_need_it_are_written_as_uint32(tmp_path: Path, pairs: int, dtype: str) -> None:
    vocabulary = byte_vocabulary(pairs)
    source = write_jsonl(tmp_path / "d.jsonl", ["ab", "þÿ"])
    manifest = prepare([source], tmp_path / "out", vocabulary=vocabulary, val_fraction=0)
    tokenizer = Tokenizer(vocabulary)
    last = 256 + pairs
    assert manifest.dtype == dtype
    assert manifest.separator_id == last
    assert split_tokens(tmp_path / "out", "train") == [*tokenizer.encode("ab"), last, *tokenizer.encode("þÿ"), last]
    assert TokenDataset(tmp_path / "out", "train").gather([1], 1).tolist() == [[last]]


@pytest.mark.usefixtures("small_blocks")
def test_the_number_of_processes_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts(150))
    quick([source], tmp_path / "one", shard_tokens=3000)
    monkeypatch.setattr(prepare_module, "IN_FLIGHT_BYTES", 700)
    quick([source], tmp_path / "two", shard_tokens=3000, processes=2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_little_text_is_encoded_without_other_processes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts(3))
    assert default_processes(sources.find_sources([source])) == 1


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("limit", [1, 999, 3000, 10**9])
def test_a_limit_ends_with_the_document_that_reaches_it(tmp_path: Path, limit: int) -> None:
    documents = texts(120)
    parts = [write_jsonl(tmp_path / "a.jsonl", documents[:50]), write_jsonl(tmp_path / "b.jsonl", documents[50:])]
    manifest = quick(parts, tmp_path / "out", limit_tokens=limit, val_fraction=0.3)
    count, total = 0, 0
    while total < limit and count < len(documents):
        total += len(documents[count].encode()) + 1
        count += 1
    assert sum(split.tokens for split in manifest.splits.values()) == total
    assert sum(split.documents for split in manifest.splits.values()) == count
    assert sum(source.documents for source in manifest.sources) == count
    assert len(manifest.sources) == 1 + (count > 50)


@pytest.mark.usefixtures("small_blocks")
def test_long_documents_are_cut_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(documents_module, "DOCUMENT_BYTES", 1000)
    text = "".join(f"line {number}\n" for number in range(700))
    (tmp_path / "a.txt").write_text(text)
    write_jsonl(tmp_path / "b.jsonl", [text, ""])
    for name in ("a.txt", "b.jsonl"):
        out = tmp_path / f"out-{name}"
        manifest = quick([tmp_path / name], out, val_fraction=0)
        tokens = split_tokens(out, "train")
        assert bytes(token for token in tokens if token < 256).decode() == text
        assert manifest.cut_documents == manifest.splits["train"].documents - 1 >= 6
        assert manifest.empty_documents == (name == "b.jsonl")


@pytest.mark.usefixtures("small_blocks")
def test_a_stopped_preparation_goes_on_from_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = texts(90)
    parts = [write_jsonl(tmp_path / f"{name}.jsonl", documents[name::3]) for name in range(3)]
    settings = {"shard_tokens": 1500, "val_fraction": 0.1}
    quick(parts, tmp_path / "whole", **settings)
    encoded = 0
    encode = documents_module.encode_block

    def stopping(*args: Any) -> Any:
        nonlocal encoded
        encoded += 1
        if encoded == budget:
            raise KeyboardInterrupt
        return encode(*args)

    monkeypatch.setattr("crucible_train.encoder_pool.encode_block", stopping)
    budget = 10**9
    quick(parts, tmp_path / "count", **settings)
    blocks = encoded
    for stop in (1, 4, blocks // 2, blocks - 1):
        out = tmp_path / f"stop{stop}"
        encoded, budget = 0, stop
        with pytest.raises(KeyboardInterrupt):
            quick(parts, out, **settings)
        assert not (out / "manifest.json").exists()
        with pytest.raises(TrainingError, match="no prepared data"):
            TokenDataset(out, "train")
        encoded, budget = 0, 10**9
        quick(parts, out, **settings)
        assert encoded <= blocks - stop + 2
        assert tree(out) == tree(tmp_path / "whole")


RUN = """
import sys
from pathlib import Path
from crucible_train import prepare, sources
sources.BLOCK_BYTES = 30000
prepare.SYNC_SECONDS = 0
prepare.prepare([sys.argv[1]], sys.argv[2], processes=int(sys.argv[3]), shard_tokens=50000)
"""


def test_a_killed_preparation_goes_on(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts(4000))
    command = [sys.executable, "-c", RUN, str(source)]
    begun = time.monotonic()
    subprocess.run([*command, str(tmp_path / "whole"), "1"], check=True)
    seconds = time.monotonic() - begun
    out = tmp_path / "out"
    chance = random.Random(3)
    for attempt in range(3):
        process = subprocess.Popen([*command, str(out), "1" if attempt else "2"])
        time.sleep(chance.uniform(0.3, 1.0) * seconds)
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGKILL)
        process.wait()
        psutil.wait_procs(children, timeout=10)
        assert not any(child.is_running() for child in children)
    subprocess.run([*command, str(out), "2"], check=True)
    assert tree(out) == tree(tmp_path / "whole")


def test_finished_work_is_left_alone(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts())
    first = quick([source], tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert quick([source], tmp_path / "out") == first == read_manifest(tmp_path / "out")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert set(before) == {"manifest.json", "tokenizer.vocab", "train-00000.tokens", "val-00000.tokens"}
    text = source.read_text()
    source.write_text(text.replace("alpha", "gamma"))
    with pytest.raises(TrainingError, match="changed since"):
        quick([source], tmp_path / "out")


def test_the_manifest_names_its_sources(tmp_path: Path) -> None:
    import hashlib

    source = write_jsonl(tmp_path / "d.jsonl", texts())
    quick([source], tmp_path / "out", shard_tokens=700)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    data = source.read_bytes()
    assert manifest["sources"] == [
        {
            "name": str(source),
            "format": "jsonl",
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "documents": 60,
        }
    ]
    for shard in manifest["splits"]["train"]["shards"]:
        assert hashlib.sha256((tmp_path / "out" / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]
    vocabulary = (tmp_path / "out" / "tokenizer.vocab").read_bytes()
    assert hashlib.sha256(vocabulary).hexdigest() == manifest["settings"]["vocabulary_sha256"]
