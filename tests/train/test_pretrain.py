"""The training loop: resuming, stopping, refusing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from crucible.checkpoint import open_checkpoint
from crucible_train import pretrain as pretrain_module
from crucible_train.errors import TrainingError
from crucible_train.files import locked
from crucible_train.pretrain import pretrain
from crucible_train.run_config import RunConfig, config_hash
from crucible_train.trainer import Trainer
from tests.train.small_run import flags, losses, make_data, optimizer_state, run_config, weights


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("text") / "small")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    pretrain(run_config(data, out), quiet=True)
    return out


def train_until(step: int, config: RunConfig) -> None:
    """A run that fails in update ``step``."""
    update = Trainer.update

    def failing(self: Trainer, number: int, *rest: object) -> torch.Tensor:
        if number == step:
            raise RuntimeError("pulled the plug")
        return update(self, number, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", failing)
        with pytest.raises(RuntimeError, match="plug"):
            pretrain(config, quiet=True)


def test_a_run_learns_and_leaves_what_it_promises(data: Path, whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    described = json.loads((whole / "config.json").read_text())
    assert result["steps"] == 12
    assert result["tokens"] == 12 * 4 * 32
    assert result["config_hash"] == described["config_hash"] == config_hash(run_config(data, Path("elsewhere")))
    assert result["best_val_loss"] == min(result["best_val_loss"], result["final_val_loss"])
    assert list(losses(whole)) == list(range(1, 13))
    assert float(losses(whole)[12]) < float(losses(whole)[1]) - 0.5
    with open_checkpoint(whole / "checkpoints" / "best" / "model") as checkpoint:
        assert checkpoint.native
        assert checkpoint.config.eos_token_ids == [512]
        assert checkpoint.config.token_count == 513


def test_bits_per_byte_follow_from_the_text_of_the_split(data: Path, whole: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    split = json.loads((data / "manifest.json").read_text())["splits"]["val"]
    expected = result["final_val_loss"] / np.log(2) * split["tokens"] / split["bytes"]
    assert result["val_bits_per_byte"] == pytest.approx(expected)


@pytest.mark.parametrize("step", [3, 5, 9])
def test_a_run_cut_off_anywhere_goes_on_with_the_same_bits(data: Path, whole: Path, tmp_path: Path, step: int) -> None:
    out = tmp_path / "run"
    train_until(step, run_config(data, out))
    assert not (out / "result.json").exists()
    with (out / "log.csv").open("a") as log:
        log.write("7,3.2")  # a row that a kill tore
    pretrain(run_config(data, out), resume=True, quiet=True)
    assert losses(out) == losses(whole)
    assert weights(out) == weights(whole)
    ours, theirs = optimizer_state(out), optimizer_state(whole)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("changes", [{"optimizer": "muon"}, {"schedule": "wsd", "grad_accum": 2}])
def test_other_optimizers_and_schedules_resume_too(data: Path, tmp_path: Path, changes: dict[str, object]) -> None:
    pretrain(run_config(data, tmp_path / "a", steps=8, **changes), quiet=True)
    train_until(6, run_config(data, tmp_path / "b", steps=8, **changes))
    pretrain(run_config(data, tmp_path / "b", steps=8, **changes), resume=True, quiet=True)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_a_planned_pause_changes_nothing(data: Path, whole: Path, tmp_path: Path) -> None:
    pretrain(run_config(data, tmp_path / "run", steps=8, schedule_steps=12), quiet=True)
    pretrain(run_config(data, tmp_path / "run"), resume=True, quiet=True)
    assert weights(tmp_path / "run") == weights(whole)


def test_more_steps_stretch_the_schedule(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(run_config(data, tmp_path / "run", steps=4), quiet=True)
    pretrain(run_config(data, tmp_path / "run", steps=6), resume=True)
    assert "stretched from 4 to 6" in capsys.readouterr().err
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_the_global_batch_decides_not_how_it_is_cut(data: Path, tmp_path: Path) -> None:
    cuts = {"one": (8, 1), "two": (4, 2), "eight": (1, 8)}
    for name, (batch, accum) in cuts.items():
        pretrain(run_config(data, tmp_path / name, steps=6, batch=batch, grad_accum=accum), quiet=True)
    first = losses(tmp_path / "one")
    for name in ("two", "eight"):
        for step, loss in losses(tmp_path / name).items():
            assert float(loss) == pytest.approx(float(first[step]), abs=1e-4 if step > 1 else 1e-5)


def test_seeds(data: Path, whole: Path, tmp_path: Path) -> None:
    pretrain(run_config(data, tmp_path / "same"), quiet=True)
    pretrain(run_config(data, tmp_path / "other", seed=4, data_seed=3), quiet=True)
    assert losses(tmp_path / "same") == losses(whole)
    assert losses(tmp_path / "other")[1] != losses(whole)[1]


def test_a_directory_in_use_is_refused(data: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="--resume"):
        pretrain(run_config(data, whole), quiet=True)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="holds files but no config"):
        pretrain(run_config(data, tmp_path), resume=True, quiet=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 1e-3),
        ("batch", 2),
        ("seed", 4),
        ("norm", "layernorm"),
        ("dtype", "bfloat16"),
        ("steps", 8),
        ("clip", 0.5),
    ],
)
def test_another_configuration_is_not_resumed(data: Path, whole: Path, field: str, value: object) -> None:
    with pytest.raises(TrainingError, match=rf"\b{field} was"):
        pretrain(run_config(data, whole, **{field: value}), resume=True, quiet=True)


def test_other_data_is_not_resumed(whole: Path, tmp_path: Path) -> None:
    other = make_data(tmp_path / "other", documents=250)
    with pytest.raises(TrainingError, match=r"\bdata was"):
        pretrain(run_config(other, whole), resume=True, quiet=True)


def test_what_changes_no_result_may_change(data: Path, whole: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)
    result = pretrain(run_config(moved, whole, save_every=1), resume=True, quiet=True)
    assert result.steps == 12


def test_resume_without_a_run_starts_one(data: Path, tmp_path: Path) -> None:
    assert pretrain(run_config(data, tmp_path / "new", steps=2), resume=True, quiet=True).steps == 2


def test_a_loss_that_is_no_number_ends_the_run(data: Path, tmp_path: Path) -> None:
    update = Trainer.update

    def poisoned(self: Trainer, step: int, *rest: object) -> torch.Tensor:
        values = update(self, step, *rest)  # type: ignore[arg-type]
        if step == 6:
            with torch.no_grad():
                next(self.model.parameters()).fill_(torch.nan)
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", poisoned)
        with pytest.raises(TrainingError, match="diverged at step 7"):
            pretrain(run_config(data, tmp_path / "run"), quiet=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["diverged"] is True
    assert result["best_val_loss"] is None
    with open_checkpoint(tmp_path / "run" / "checkpoints" / "last" / "model") as checkpoint:
        assert np.isfinite(checkpoint.read("model.embed_tokens.weight")).all()


def test_fine_tuning_starts_from_the_given_weights(data: Path, whole: Path, tmp_path: Path) -> None:
    config = run_config(data, tmp_path / "tuned", steps=4, init_from=str(whole), lr=1e-4)
    pretrain(config, quiet=True)
    assert float(losses(tmp_path / "tuned")[1]) < float(losses(whole)[1]) - 0.5
    shutil.rmtree(tmp_path / "tuned" / "checkpoints")
    pretrain(config, resume=True, quiet=True)
    with open_checkpoint(tmp_path / "tuned" / "checkpoints" / "last" / "model") as checkpoint:
        assert checkpoint.config.num_layers == 2


def test_fine_tuning_needs_the_same_vocabulary(whole: Path, tmp_path: Path) -> None:
    data = make_data(tmp_path / "other")
    vocabulary = data / "tokenizer.vocab"
    vocabulary.write_bytes(vocabulary.read_bytes() + b"\0")
    with pytest.raises(TrainingError, match="another tokenizer"):
        pretrain(run_config(data, tmp_path / "run", init_from=str(whole)), quiet=True)


def test_a_split_without_tokens_means_no_validation(tmp_path: Path) -> None:
    data = make_data(tmp_path / "text", documents=50, val_fraction=0.0)
    result = pretrain(run_config(data, tmp_path / "run", steps=3), quiet=True)
    assert result.final_val_loss is None
    assert weights(tmp_path / "run", "best") == weights(tmp_path / "run", "last")


def test_samples_are_written_and_change_nothing(data: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_module, "SAMPLE_TOKENS", 8)
        pretrain(run_config(data, tmp_path / "run", sample_every=6), quiet=True)
    assert (tmp_path / "run" / "samples.txt").read_text().count("--- step ") == 2
    assert weights(tmp_path / "run") == weights(whole)


def start(config: RunConfig, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    return subprocess.Popen(
        [sys.executable, "-m", "crucible_train.cli", "train", *flags(config), *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def wait_for_step(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "log.csv").exists() and f"\n{step}," in (out / "log.csv").read_text():
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate()[1] if process.poll() is not None else "never reached the step")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_stops(data: Path, tmp_path: Path, number: int, code: int) -> None:
    config = run_config(data, tmp_path / "run", steps=100_000, save_every=0, eval_every=0)
    process = start(config)
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(number)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"stopped by {signal.Signals(number).name}" in messages
    assert "--resume" in messages
    saved = max(losses(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "last" / "trainer.pt").exists()
    assert os.readlink(tmp_path / "run" / "checkpoints" / "last") == f"step-{saved:08d}"


def test_signal_handlers_are_left_as_they_were(data: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    pretrain(run_config(data, tmp_path / "run", steps=1), quiet=True)
    assert signal.getsignal(signal.SIGINT) is before
    thread = threading.Thread(
        target=pretrain, args=(run_config(data, tmp_path / "other", steps=1),), kwargs={"quiet": True}
    )
    thread.start()
    thread.join()
    assert (tmp_path / "other" / "result.json").exists()


def test_two_at_once_in_one_directory_are_refused(data: Path, tmp_path: Path) -> None:
    with (
        locked(tmp_path / "run", "held by the test"),
        pytest.raises(TrainingError, match="another train is at work there"),
    ):
        pretrain(run_config(data, tmp_path / "run"), quiet=True)
