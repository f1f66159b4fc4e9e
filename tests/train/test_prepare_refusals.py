"""What prepare refuses, each in one line: other settings, changed sources, bad text, impossible values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crucible_train.errors import TrainingError
from tests.train.prepared import byte_vocabulary, quick, texts, write_jsonl


def interrupt(inputs: list[Path], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preparation that is stopped at its first block."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("crucible_train.encoder_pool.encode_block", stop)
        with pytest.raises(KeyboardInterrupt):
            quick(inputs, out)


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused(tmp_path: Path, finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts())
    out = tmp_path / "out"
    if finished:
        quick([source], out)
    else:
        interrupt([source], out, monkeypatch)
    for changes, message in (
        ({"val_fraction": 0.5}, "val_fraction 0.01, not 0.5"),
        ({"shard_tokens": 7}, "shard_tokens 100000000, not 7"),
        ({"vocabulary": byte_vocabulary(2)}, "vocabulary_sha256"),
        ({"limit_tokens": 9}, "limit_tokens None, not 9"),
    ):
        with pytest.raises(TrainingError, match=f"other settings .*{message}"):
            quick([source], out, **changes)
    other = write_jsonl(tmp_path / "e.jsonl", texts())
    with pytest.raises(TrainingError, match="inputs that differ"):
        quick([other], out)
    if not finished:
        assert quick([source], out, val_fraction=0.5, restart=True).settings.val_fraction == 0.5


def test_a_source_that_changed_under_unfinished_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts())
    interrupt([source], tmp_path / "out", monkeypatch)
    source.write_text(source.read_text().replace("alpha", "gamma"))
    with pytest.raises(TrainingError, match="changed since it was begun with"):
        quick([source], tmp_path / "out")
    (tmp_path / "out" / ".prepare.json").write_text("{")
    with pytest.raises(TrainingError, match="unreadable; begin again with --restart"):
        quick([source], tmp_path / "out")
    quick([source], tmp_path / "out", restart=True)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts())
    with pytest.raises(TrainingError, match="not empty and not prepared data"):
        quick([source], tmp_path)
    with pytest.raises(TrainingError, match=r"d\.jsonl: File exists"):
        quick([source], source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.jsonl"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"val_fraction": 1.0}, "--val-fraction 1.0"),
        ({"val_fraction": -0.1}, "--val-fraction -0.1"),
        ({"val_fraction": float("nan")}, "--val-fraction nan"),
        ({"shard_tokens": 0}, "--shard-tokens 0"),
        ({"limit_tokens": 0}, "--tokens 0"),
        ({"processes": 0}, "--processes 0"),
        ({"separator": "</s>"}, "--separator </s>"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts())
    with pytest.raises(TrainingError, match=message):
        quick([source], tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_bad_lines_are_told_with_their_number(tmp_path: Path, processes: int) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts())
    source.write_text(source.read_text() + "{\n")
    with pytest.raises(TrainingError, match=r"d\.jsonl:61: not valid JSON"):
        quick([source], tmp_path / "out", processes=processes)
    assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(TrainingError, match="no text in it"):
        quick([tmp_path / "blank.jsonl"], tmp_path / "out2", processes=processes)
    with pytest.raises(TrainingError, match="nothing to prepare"):
        quick([], tmp_path / "out3")


def test_two_at_a_time_in_one_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts())

    def inside(*_: Any) -> Any:
        quick([source], tmp_path / "out")

    monkeypatch.setattr("crucible_train.encoder_pool.encode_block", inside)
    with pytest.raises(TrainingError, match="another prepare is writing there"):
        quick([source], tmp_path / "out")
