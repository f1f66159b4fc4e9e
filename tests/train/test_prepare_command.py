"""The command line of prepare."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from crucible_train import prepare_command
from crucible_train.errors import TrainingError
from crucible_train.manifest import read_manifest
from tests.train.prepared import texts, write_jsonl


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    prepare_command.add_arguments(parser)
    return prepare_command.run(parser.parse_args([str(argument) for argument in arguments]))


def test_flags_reach_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts(200))
    flags = ["--vocabulary-size", "300", "--val-fraction", "0.1", "--shard-tokens", "1e3", "--tokens", "4000"]
    assert run("--input", source, "--out", tmp_path / "out", *flags) == 0
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.token_count, manifest.vocab_size, manifest.separator_id) == (301, 320, 300)
    assert (manifest.settings.shard_tokens, manifest.settings.limit_tokens) == (1000, 4000)
    output = capsys.readouterr()
    assert f"train: {manifest.splits['train'].tokens} tokens" in output.out
    assert "as uint16" in output.out


def test_an_empty_validation_split_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts(3))
    assert run("--input", source, "--out", tmp_path / "out", "--val-fraction", "0") == 0
    assert "no document fell into the validation split" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1.5", "x", "inf", "nan", ""])
def test_counts_are_whole_numbers(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--input", "a.txt", "--out", tmp_path, "--tokens", text)
    assert "is not a whole number" in capsys.readouterr().err


def test_a_hub_dataset_needs_a_limit(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="--dataset needs --tokens"):
        run("--dataset", "a/b", "--out", tmp_path / "out")


def test_progress_goes_to_standard_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crucible_train.progress.LINE_SECONDS", 0)
    monkeypatch.setattr("crucible_train.sources.BLOCK_BYTES", 300)
    lines: list[str] = []
    monkeypatch.setattr("crucible_train.progress.sys.stderr.write", lines.append)
    source = write_jsonl(tmp_path / "d.jsonl", texts(20))
    assert run("--input", source, "--out", tmp_path / "out") == 0
    assert "M tokens/s, 100%" in "".join(lines)


def test_neither_torch_nor_pyarrow_is_imported_by_it(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", texts(3))
    code = (
        "import sys, crucible_train.prepare_command, crucible_train.prepare as p\n"
        f"p.prepare([{str(source)!r}], {str(tmp_path / 'out')!r}, vocabulary_size=300)\n"
        "assert not {'torch', 'pyarrow', 'numba', 'tqdm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_field_may_have_any_name(tmp_path: Path) -> None:
    source = tmp_path / "d.jsonl"
    source.write_text('{"a\\"b": "some text"}\n')
    assert run("--input", source, "--out", tmp_path / "out", "--text-field", 'a"b', "--val-fraction", 0) == 0
