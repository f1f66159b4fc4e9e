"""The export commands: what they print, and one line with exit code 2 for what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from crucible.checkpoint import open_checkpoint
from crucible_train import cli
from tests.checkpoints import Alibi, make_checkpoint
from tests.train.test_export_hf import make_base


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("export", ["--dtype", "bfloat16"]),
        ("export-hf", []),
        ("export-gguf", ["--outtype", "q8_0"]),
        ("export-tokenizer", ["--format", "json"]),
    ],
)
def test_a_command_prints_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, options: list[str]
) -> None:
    source, out = make_base(tmp_path / "m"), tmp_path / "out"
    assert cli.main([command, str(source), str(out), *options]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.exists()
    assert cli.main([command, str(source), "--out", str(out), *options]) == 0


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["export", "{m}"], "give the place to write to once"),
        (["export", "{m}", "{o}", "--out", "{o}"], "give the place to write to once"),
        (["export", "/nonexistent", "{o}"], "no such run or model directory"),
        (["export", "{m}", "{o}", "--checkpoint", "best"], "not a run directory"),
        (["export-hf", "{alibi}", "{o}"], "position must be rope, not alibi"),
        (["export-gguf", "{m}", "/proc/nope/m.gguf"], "/proc/nope/m.gguf: cannot be written"),
        (["export-hf", "{m}", "/proc/nope/hf"], "/proc/nope/hf: cannot be written"),
        (["export-gguf", "{m}", "{m}"], "is a directory"),
        (["export-tokenizer", "gpt2", "{o}"], "which format?"),
    ],
)
def test_faults_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], fault: str) -> None:
    places = {"m": make_base(tmp_path / "m"), "alibi": make_checkpoint(tmp_path / "a", position=Alibi())}
    filled = [word.format(**places, o=tmp_path / "out") for word in words]
    assert cli.main(filled) == 2
    captured = capsys.readouterr()
    assert fault in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "out").exists()
    with open_checkpoint(tmp_path / "m"):
        pass
