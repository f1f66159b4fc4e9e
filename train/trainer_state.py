"""Checkpoints of a run: ``checkpoints/step-N/`` directories, and the links ``last`` and ``best`` to two of them.

A directory appears complete or not at all, and a link moves from one to the next in one system call, so a run killed
at any moment leaves a checkpoint that can be resumed. ``model/`` is a native checkpoint; ``trainer.pt`` has the rest.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from numpy.typing import NDArray

from crucible.checkpoint import save_checkpoint
from crucible.config.model import ModelConfig
from crucible.directory import new_directory
from crucible_train.errors import TrainingError

TRAINER_FILE = "trainer.pt"
MODEL_DIRECTORY = "model"
FORMAT = 1


class TrainerState(msgspec.Struct, kw_only=True):
    """What a run needs besides its weights to go on as if it had never stopped.

    ``step``: updates done; the data order is a function of it. ``optimizer``: see Optimizer.state. ``random``: the
    generators' states.
    """

    step: int
    config_hash: str
    code_version: str
    torch_version: str
    seconds: float
    best_val_loss: float | None
    best_step: int | None
    last_val_loss: float | None
    last_bits_per_byte: float | None
    samples_bytes: int
    optimizer: dict[str, dict[str, Any]]
    random: dict[str, torch.Tensor]


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """States of PyTorch's generators."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Undoes what has been drawn since random_state()."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


class CheckpointStore:
    """The ``checkpoints`` directory of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def last(self) -> Path:
        return self.directory / "last"

    @property
    def best(self) -> Path:
        return self.directory / "best"

    def exists(self) -> bool:
        """Whether a complete checkpoint has been written."""
        return (self.last / TRAINER_FILE).is_file()

    def save(
        self,
        state: TrainerState,
        config: ModelConfig,
        tensors: Iterable[tuple[str, NDArray[Any]]],
        files: Mapping[str, bytes],
    ) -> None:
        """Writes a checkpoint, makes it ``last``, and ``best`` if it is the best step or none is known; older ones go.

        Raises CheckpointError when it cannot be written; the links then stay where they were.
        """
        target = self.directory / f"step-{state.step:08d}"
        if target.name not in self._linked():
            shutil.rmtree(target, ignore_errors=True)
            with new_directory(target) as partial:
                save_checkpoint(partial / MODEL_DIRECTORY, config, tensors, files=files)
                torch.save({"format": FORMAT, **msgspec.structs.asdict(state)}, partial / TRAINER_FILE)
        self._link(self.last, target.name)
        if state.best_step in (None, state.step):
            self._link(self.best, target.name)
        self.sweep()

    def load(self) -> TrainerState:
        """The trainer's part of ``last``. Raises TrainingError for a file that is not one."""
        path = self.last / TRAINER_FILE
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            version = values.pop("format")
            state = TrainerState(**values)
        except Exception as error:  # torch.load promises no error types, and its words are about its own arguments
            kind = type(error).__name__
            raise TrainingError(
                f"{path}: is not a trainer state that can be resumed ({kind}); start anew in another --out"
            ) from None
        if version != FORMAT:
            raise TrainingError(f"{path}: has format {version}, this version reads {FORMAT}")
        return state

    def repair(self, state: TrainerState) -> None:
        """Finishes what a killed run began: ``state`` is that of ``last``, which ``best`` may still have to follow."""
        if self.exists() and state.best_step in (None, state.step):
            self._link(self.best, os.readlink(self.last))
        self.sweep()

    def sweep(self) -> None:
        """Removes checkpoints that no link names and what a killed run left unfinished."""
        linked = self._linked()
        for entry in self.directory.iterdir() if self.directory.is_dir() else ():
            if entry.is_symlink() or entry.name in linked:
                continue
            if re.fullmatch(r"step-\d+|\.step-\d+\..*\.partial", entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        for entry in self.directory.glob(".*.link"):
            entry.unlink(missing_ok=True)

    def _linked(self) -> set[str]:
        return {os.readlink(link) for link in (self.last, self.best) if link.is_symlink()}

    def _link(self, link: Path, name: str) -> None:
        partial = self.directory / f".{link.name}.{secrets.token_hex(4)}.link"
        os.symlink(name, partial)
        os.replace(partial, link)
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
