"""quickstart: the whole way with a model of seconds, and (slow) the real one against its promises."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import time
from importlib import resources
from pathlib import Path

import pytest

from crucible.checkpoint import open_checkpoint
from crucible.tokenizer import Tokenizer
from crucible_train import cli
from crucible_train import quickstart as module
from crucible_train.errors import TrainingError
from crucible_train.presets import Preset
from crucible_train.quickstart import Recipe, baselines, first_weights, prepare_text, quickstart, run_config

SMALL = Recipe(vocabulary_size=256, size=Preset(1, 64, 4, 32), batch=4, steps=6, val_fraction=0.01)


def test_the_text_is_the_one_that_its_licence_file_describes() -> None:
    files = resources.files("crucible.data")
    compressed = (files / "quickstart.txt.xz").read_bytes()
    text = lzma.decompress(compressed)
    notice = (files / "LICENSE.quickstart").read_text()
    assert len(compressed) <= 1_500_000
    assert hashlib.sha256(text).hexdigest() in notice
    assert "public domain" in notice
    assert text.endswith(b"\n<|endoftext|>\n")
    assert text.count(b"\n<|endoftext|>\n") == 170


def test_from_text_to_an_answering_model(tmp_path: Path) -> None:
    said: list[str] = []
    outcome = quickstart(tmp_path / "q", recipe=SMALL, prompt="It is", say=said.append)
    assert sorted(os.listdir(tmp_path / "q")) == ["data", "model", "run", "start"]
    assert outcome.answer.startswith("It is")
    assert len(outcome.answer) > len("It is")
    assert 0 < outcome.bigram < outcome.unigram < outcome.val_loss < 5.6  # ln(320) = 5.77: untrained
    assert [re.sub(r"\[.*?\] (\w+).*", r"\1", line) for line in said] == [
        "preparing",
        "training",
        "exporting",
        "asking",
    ]
    with open_checkpoint(tmp_path / "q" / "model") as checkpoint:
        assert checkpoint.config.eos_token_ids == [256]
    assert Tokenizer.for_checkpoint(tmp_path / "q" / "model").token_count == 257
    again = quickstart(tmp_path / "q", recipe=SMALL, prompt="It is", say=said.append)
    assert (again.val_loss, again.answer) == (outcome.val_loss, outcome.answer)


def test_the_recipe_is_what_runs(tmp_path: Path) -> None:
    prepare_text(tmp_path / "data", SMALL)
    assert first_weights(tmp_path / "start", tmp_path / "data", SMALL) == first_weights(
        tmp_path / "start", tmp_path / "data", SMALL
    )
    with open_checkpoint(tmp_path / "start") as checkpoint:
        assert checkpoint.config.eos_token_ids == [256]
    config = run_config(tmp_path, Recipe())
    config.check()
    assert (config.steps, config.batch, config.dtype, config.device) == (Recipe().steps, 16, "float32", "cpu")
    unigram, bigram = baselines(tmp_path / "data")
    assert 2.9 < unigram < 3.3  # bytes of English
    assert unigram - 0.9 < bigram < unigram - 0.5


def test_what_is_in_the_way_or_goes_wrong_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    assert cli.main(["quickstart", "--out", str(tmp_path)]) == 2
    assert "holds 'thesis.tex', which is no quickstart's" in capsys.readouterr().err
    assert cli.main(["quickstart", "--out", str(tmp_path / "thesis.tex")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    with pytest.raises(TrainingError, match="the engine could not run it"):
        module.ask(tmp_path, "Hello")


@pytest.mark.slow
def test_the_real_one_keeps_its_promises(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = quickstart(tmp_path / "q")
    assert time.monotonic() - began < 300
    assert outcome.val_loss < outcome.unigram - 0.7
    assert outcome.val_loss < outcome.bigram
