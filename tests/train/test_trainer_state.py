"""Checkpoints of a run: whole or not at all, and the links always name a whole one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from crucible.checkpoint import expected_tensors, open_checkpoint
from crucible.errors import CheckpointError
from crucible_train import trainer_state
from crucible_train.errors import TrainingError
from crucible_train.presets import model_config
from crucible_train.trainer_state import TRAINER_FILE, CheckpointStore, TrainerState

CONFIG = model_config("tiny", vocab_size=64)


def state(step: int, best: int | None) -> TrainerState:
    return TrainerState(
        step=step, config_hash="h", code_version="c", torch_version="t", seconds=1.5, best_val_loss=2.0, best_step=best,
        last_val_loss=2.5, last_bits_per_byte=None, samples_bytes=0,
        optimizer={"w": {"step": torch.tensor(float(step))}},
        random={"cpu": torch.get_rng_state()},
    )  # fmt: skip


def save(store: CheckpointStore, step: int, best: int | None = None) -> None:
    tensors = ((name, np.full(shape, step, np.float32)) for name, shape in expected_tensors(CONFIG).items())
    store.save(state(step, best), CONFIG, tensors, {"tokenizer.vocab": b"v"})


def value(link: Path) -> float:
    with open_checkpoint(link / "model") as checkpoint:
        return float(checkpoint.read("model.norm.weight")[0])


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_what_was_saved_is_loaded(store: CheckpointStore) -> None:
    assert not store.exists()
    save(store, 3, best=3)
    loaded = store.load()
    assert (loaded.step, loaded.seconds, loaded.best_step) == (3, 1.5, 3)
    assert loaded.optimizer["w"]["step"] == 3.0
    assert (store.last / "model" / "tokenizer.vocab").read_bytes() == b"v"


def test_only_last_and_best_are_kept(store: CheckpointStore) -> None:
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2)):
        save(store, step, best)
    assert sorted(entry.name for entry in store.directory.iterdir()) == [
        "best",
        "last",
        "step-00000002",
        "step-00000004",
    ]
    assert (value(store.best), value(store.last)) == (2.0, 4.0)


@pytest.mark.parametrize("broken", ["torch.save", "os.symlink", "os.replace"])
def test_a_save_that_fails_leaves_the_one_before(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    save(store, 1, best=1)
    module, name = broken.split(".")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(trainer_state, module), name, fail)
        with pytest.raises((OSError, CheckpointError)):
            save(store, 2, best=2)
    assert (value(store.best), value(store.last)) == (1.0, 1.0)
    assert store.load().step == 1
    store.repair(store.load())
    assert sorted(entry.name for entry in store.directory.iterdir()) == ["best", "last", "step-00000001"]
    save(store, 2, best=2)
    assert value(store.last) == 2.0


def test_killed_between_the_links(store: CheckpointStore) -> None:
    save(store, 1, best=1)
    save(store, 2, best=1)
    save(store, 3, best=3)
    os.unlink(store.best)
    store.repair(store.load())
    assert value(store.best) == 3.0


def test_a_damaged_state_is_one_line(store: CheckpointStore) -> None:
    save(store, 1)
    path = store.last / "trainer.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TrainingError, match=r"trainer\.pt: is not a trainer state") as caught:
        store.load()
    assert "\n" not in str(caught.value)


def test_a_damaged_state_is_told_in_our_words(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / TRAINER_FILE).write_bytes(b"x\n")
    with pytest.raises(TrainingError, match=r"trainer\.pt: is not a trainer state .*; start anew") as raised:
        CheckpointStore(tmp_path).load()
    assert "weights_only" not in str(raised.value)
