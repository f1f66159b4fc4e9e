"""Streaming from the Hub, against a stand-in for PyPI datasets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crucible_train import sources
from crucible_train.errors import TrainingError
from crucible_train.hub_source import HubSource
from crucible_train.prepare import prepare
from tests.train.prepared import byte_vocabulary, documents_of, split_tokens, texts, tree


def serve(monkeypatch: pytest.MonkeyPatch, rows: Any) -> list[Any]:
    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        if isinstance(rows, Exception):
            raise rows
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_dataset_is_streamed_up_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 300)
    documents = texts(400)
    taken = 0

    def rows() -> Any:
        nonlocal taken
        for text in documents:
            taken += 1
            yield {"id": taken, "body": text}

    calls = serve(monkeypatch, rows())
    hub = HubSource("team/set", "small", "train", "body")
    manifest = prepare(
        [], tmp_path, hub=hub, vocabulary=byte_vocabulary(), text_field="body", limit_tokens=5000, processes=1
    )
    assert calls == [(("team/set", "small"), {"split": "train", "streaming": True})]
    found = documents_of(split_tokens(tmp_path, "train"), 256)
    total = sum(split.tokens for split in manifest.splits.values())
    number = sum(split.documents for split in manifest.splits.values())
    assert 5000 <= total < 5000 + max(map(len, documents))
    assert sum(len(text.encode()) + 1 for text in documents[: number - 1]) < 5000
    assert number < taken < 60  # it stopped reading, too
    assert found[0] == (*documents[0].encode(), 256)
    assert manifest.sources[0].name == "hub:team/set:small:train"


def test_a_stopped_stream_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 300)
    monkeypatch.setattr("crucible_train.prepare.SYNC_SECONDS", 0)
    documents = [{"text": text} for text in texts(100)]

    def broken() -> Any:
        yield from documents[:50]
        raise ConnectionError("reset\nby peer")

    def run(out: Path) -> None:
        prepare([], out, hub=HubSource("a/b"), vocabulary=byte_vocabulary(), limit_tokens=10**9, processes=1)

    serve(monkeypatch, documents)
    run(tmp_path / "whole")
    serve(monkeypatch, broken())
    with pytest.raises(TrainingError, match=r"hub:a/b:train: cannot be read \(ConnectionError: reset\)"):
        run(tmp_path / "parts")
    assert (tmp_path / "parts" / ".prepare.json").exists()
    serve(monkeypatch, documents)
    run(tmp_path / "parts")
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


def test_what_cannot_be_streamed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, ValueError("BuilderConfig 'x' not found.\nAvailable: …"))
    with pytest.raises(TrainingError, match=r"ValueError: BuilderConfig 'x' not found\.\)"):
        list(HubSource("a/b", "x").blocks())
    serve(monkeypatch, [{"text": "a"}, {"body": "b"}])
    with pytest.raises(TrainingError, match="row 2 has no text in 'text'; it has body"):
        list(HubSource("a/b").blocks())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TrainingError, match="needs the package datasets"):
        list(HubSource("a/b").blocks())
