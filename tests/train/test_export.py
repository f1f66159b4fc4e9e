"""Native exports: what is found in a run, what is written, and that nothing half-written ever has the final name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from crucible.checkpoint import open_checkpoint, save_checkpoint
from crucible.errors import CrucibleError
from crucible.tokenizer import Tokenizer
from crucible_train.errors import TrainingError
from crucible_train.export import export_native
from crucible_train.export_source import find_checkpoint, open_source
from crucible_train.export_target import export_directory, export_file
from tests.checkpoints import random_tensors, tiny_config
from tests.conftest import byte_vocabulary, make_text_checkpoint


def make_run(directory: Path, *names: str) -> Path:
    """A run directory with these checkpoints; each has its own weights."""
    for seed, name in enumerate(names, start=1):
        model = make_text_checkpoint(directory / "checkpoints" / name / "model", seed=seed)
        (model / "tokenizer.vocab").rename(model.parent / "tokenizer.vocab")
    (directory / "config.json").write_text("{}")
    return directory


def first_weight(path: Path) -> float:
    with open_checkpoint(path) as checkpoint:
        return float(checkpoint.read("model.embed_tokens.weight")[0, 0])


def test_a_runs_best_checkpoint_with_its_vocabulary_is_exported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "best", "last")
    out = export_native(run, tmp_path / "out")
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "tokenizer.vocab"]
    assert first_weight(out) == first_weight(run / "checkpoints/best/model")
    assert Tokenizer.for_checkpoint(out).encode("ab") == [97, 98]
    assert first_weight(export_native(run, out, which="last")) == first_weight(run / "checkpoints/last/model")
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_which_directory_a_source_means(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "last")
    model = run / "checkpoints/last/model"
    assert find_checkpoint(run) == find_checkpoint(model.parent) == find_checkpoint(model) == model
    for source, which, words in [
        (run, "best", "the run has no best checkpoint yet"),
        (model, "best", "not a run directory"),
        (tmp_path, None, "neither a run directory nor a model directory"),
        (tmp_path / "none", None, "no such run or model directory"),
    ]:
        with pytest.raises(TrainingError, match=words):
            find_checkpoint(source, which)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_once(tmp_path: Path, dtype: str) -> None:
    source = make_text_checkpoint(tmp_path / "m")
    out = export_native(source, tmp_path / "out", dtype=dtype)
    with open_checkpoint(source) as before, open_checkpoint(out) as after:
        assert after.dtype == dtype
        for name in before.names():
            rounding = 2**-8 if dtype == "bfloat16" else 2**-11
            np.testing.assert_allclose(after.read(name), before.read(name), rtol=rounding, atol=1e-7)
    assert export_native(out, tmp_path / "again").is_dir()
    with open_checkpoint(tmp_path / "again") as again:
        assert again.dtype == dtype


def test_the_separator_becomes_the_eos_of_a_base_model(tmp_path: Path) -> None:
    source = make_text_checkpoint(tmp_path / "m", eos_token_ids=[])
    with open_checkpoint(export_native(source, tmp_path / "out")) as checkpoint:
        assert checkpoint.config.eos_token_ids == [256]
    kept = make_text_checkpoint(tmp_path / "chat", chat=True, eos_token_ids=[258])
    with open_source(kept) as opened:
        assert opened.config.eos_token_ids == [258]
        assert opened.chat_template
    assert (export_native(kept, tmp_path / "chat-out") / "chat_template.jinja").is_file()


def test_bad_weights_and_foreign_vocabularies_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.norm.weight"][3] = np.nan
    save_checkpoint(tmp_path / "nan", config, tensors.items())
    files = {"tokenizer.vocab": byte_vocabulary()}
    save_checkpoint(tmp_path / "small", config, random_tensors(config).items(), files=files)
    for name, words in [("nan", "'model.norm.weight' holds nan at index [3]"), ("small", "belongs to another model")]:
        with pytest.raises(CrucibleError, match=re.escape(words)):
            export_native(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_only_an_older_export_is_replaced(tmp_path: Path) -> None:
    source = make_text_checkpoint(tmp_path / "m")
    with pytest.raises(TrainingError, match="is what is exported"):
        export_native(source, source)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(TrainingError, match=re.escape("holds 'thesis.tex'")):
        export_native(source, tmp_path / "full")
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="is no directory"):
        export_native(source, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert export_native(source, tmp_path / "empty").is_dir()


def test_an_error_inside_leaves_the_older_export(tmp_path: Path) -> None:
    source = make_text_checkpoint(tmp_path / "m")
    out = export_native(source, tmp_path / "out", dtype="float16")
    with pytest.raises(ZeroDivisionError), export_directory(out, source) as directory:  # noqa: PT012
        (directory / "config.json").write_text("{")
        raise ZeroDivisionError
    with open_checkpoint(out) as checkpoint:
        assert checkpoint.dtype == "float16"
    assert sorted(os.listdir(tmp_path)) == ["m", "out"]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "sub" / "file"
    with export_file(target) as partial:
        partial.write_text("old")
    with pytest.raises(ZeroDivisionError), export_file(target) as partial:  # noqa: PT012
        partial.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "old"
    assert os.listdir(target.parent) == ["file"]
    for bad, words in [(target.parent, "is a directory"), (Path("/proc/nope/file"), "cannot be written")]:
        with pytest.raises(TrainingError, match=words), export_file(bad) as partial:
            partial.write_text("never")
