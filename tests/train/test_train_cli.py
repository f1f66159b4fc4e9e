"""The command line: flags, errors of one line, nothing heavy before it is needed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crucible_train.cli import COMMANDS, main
from crucible_train.errors import TrainingError
from crucible_train.run_config import RunConfig
from crucible_train.train_command import FLAGS, add_arguments, parse_config
from tests.train.small_run import flags, make_data, run_config


def parse(*words: str) -> RunConfig:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parse_config(parser.parse_args(words))


def test_every_command_is_there_and_light() -> None:
    code = (
        "import sys, importlib; from crucible_train.cli import COMMANDS\n"
        "for module in COMMANDS.values(): importlib.import_module(module)\n"
        "heavy = {'torch', 'numba', 'matplotlib', 'ray', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    for module in COMMANDS.values():
        command = importlib.import_module(module)
        assert command.HELP
        assert callable(command.add_arguments)
        assert callable(command.run)


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "required: --data"),
        (["train", "--data", "d", "--out", "o", "--steps", "many"], "invalid int value: 'many'"),
        (["train", "--data", "d", "--out", "o", "--compile", "yes"], "must be 0 or 1, got 'yes'"),
        (["train", "--data", "d", "--out", "o", "--see", "1"], "unrecognized arguments"),
    ],
)
def test_usage_errors_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("crucible-train: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--data", "/nowhere", "--out", "o"], "/nowhere: no prepared data"),
        (["train", "--data", "d", "--out", "o", "--steps", "0"], "steps must be at least 1"),
        (["train", "--data", "d"], "--out DIR, or --name NAME"),
        (["sample", "/nowhere"], "/nowhere: no such run or model directory"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_flags_say_what_the_fields_are() -> None:
    assert set(FLAGS) == set(RunConfig.__struct_fields__)
    config = RunConfig(
        data="d", out="o", preset="30m", tied=False, context_length=128, steps=5, lr=1e-3, betas=(0.8, 0.9),
        compile=True, zero1=True, dtype="bfloat16", data_seed=4, schedule="wsd", optimizer="muon",
    )  # fmt: skip
    assert parse(*flags(config)) == config
    assert parse("--data", "d", "--out", "o") == RunConfig(data="d", out="o")


def test_names_and_other_spellings() -> None:
    assert parse("--data", "d", "--name", "first").out == "runs/first"
    assert parse("--data", "d", "--out", "o", "--block", "64").context_length == 64
    assert parse("--data", "d", "--out", "o", "--steps", "5", "--max-steps-schedule", "9").schedule_steps == 9
    assert parse("--data", "d", "--out", "o", "--compile").compile is True
    for words in (
        ["--name", "a/b"],
        ["--name", "x", "--out", "y"],
        ["--out", "o", "--init-from", "m", "--norm", "rmsnorm"],
    ):
        with pytest.raises(TrainingError):
            parse("--data", "d", *words)


def test_train_and_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_data(tmp_path / "text", documents=60)
    assert main(["train", *flags(run_config(data, tmp_path / "run", steps=2))]) == 0
    assert "2 steps, 256 tokens" in capsys.readouterr().out
    assert main(["train", *flags(run_config(data, tmp_path / "run", steps=2))]) == 2
    assert "already holds files" in capsys.readouterr().err
    assert (
        main(["sample", str(tmp_path / "run"), "--prompt", "river stone", "--max-tokens", "4", "--device", "cpu"]) == 0
    )
    assert capsys.readouterr().out.startswith("river stone")


def test_a_context_longer_than_the_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_data(tmp_path / "text", documents=2)
    assert main(["train", *flags(run_config(data, tmp_path / "run", context_length=5000))]) == 2
    assert "at least 5001" in capsys.readouterr().err


def test_too_little_gpu_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("crucible_train.pretrain.pretrain", full)
    assert main(["train", "--data", "d", "--out", "o", "--batch", "64"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--batch 64; lower it" in line


def test_a_sweep_over_unprepared_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "--data", str(tmp_path), "--steps", "1", "--preset", "tiny", "--out", str(tmp_path / "s")]
    assert main(words) == 2
    assert "no prepared data" in capsys.readouterr().err


def test_sampling_a_run_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert main(["sample", str(tmp_path)]) == 2
    assert "the run has no best or last checkpoint yet" in capsys.readouterr().err
