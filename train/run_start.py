"""RunStart: everything a run needs before its first step, new or resumed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from crucible.config.model import ModelConfig
from crucible.tokenizer import VOCABULARY_FILE
from crucible_train.distributed import Workers
from crucible_train.errors import TrainingError
from crucible_train.export_source import find_checkpoint
from crucible_train.files import locked
from crucible_train.run_config import RunConfig, config_hash
from crucible_train.run_directory import RunDirectory, code_version
from crucible_train.run_result import RESULT_FILE
from crucible_train.shards import TokenDataset
from crucible_train.starting_weights import build_model, load_weights, new_model_config
from crucible_train.trainer import Trainer
from crucible_train.trainer_state import MODEL_DIRECTORY, TrainerState, restore_random

BUSY = "another train is at work there; wait for it or end it"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of the matrix products: ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    return DTYPES[name if name != "auto" else "bfloat16" if device.type == "cuda" else "float32"]


@dataclass
class RunStart:
    """The parts of a run whose weights, optimizer and files stand where ``state`` says. ``notes``: worth telling."""

    directory: RunDirectory
    train_data: TokenDataset
    val_data: TokenDataset
    context: int
    resolved: dict[str, Any]
    trainer: Trainer
    state: TrainerState
    notes: list[str] = field(default_factory=list)

    @property
    def model_config(self) -> ModelConfig:
        return self.trainer.model.config

    @property
    def files(self) -> dict[str, bytes]:
        """What goes into a model's directory beside the weights."""
        return {VOCABULARY_FILE: (self.train_data.directory / VOCABULARY_FILE).read_bytes()}


def start_run(config: RunConfig, workers: Workers, held: ExitStack, *, resume: bool) -> RunStart:
    """Makes or takes up the run in ``config.out``, whose lock ``held`` gets.

    Raises TrainingError for what cannot be begun or go on.
    """
    train_data, val_data = TokenDataset(config.data, "train"), TokenDataset(config.data, "val")
    directory = RunDirectory(Path(config.out))
    known: dict[str, Any] | None = workers.agree(lambda: directory.open(config, resume=resume))
    shape = directory.model_config(known) if known else new_model_config(config, train_data)
    context = config.context_length or shape.context_length
    train_data.require(context)
    resolved = _resolve(config, workers, context)
    if known:
        directory.compare_resolved(known, resolved)
    model = build_model(shape, config, workers.device)
    workers.agree(lambda: held.enter_context(locked(directory.path, BUSY)))
    state, notes = _first_state(config), []
    found = bool(known) and workers.agree(directory.checkpoints.exists)
    if found:
        state = directory.checkpoints.load()
        load_weights(model, directory.checkpoints.last / MODEL_DIRECTORY)
    elif config.init_from is not None:
        load_weights(model, find_checkpoint(Path(config.init_from)))
    trainer = Trainer(model, config, workers, DTYPES[resolved["dtype"]])
    if found:
        notes = _take_up(config, trainer, state, known or {})
    elif resume:
        notes = [f"{config.out}: no checkpoint to go on from; starting at step 1"]

    def prepare() -> None:
        directory.describe(config, shape, resolved, str(torch.__version__))
        directory.cut_samples(state.samples_bytes)
        directory.checkpoints.repair(state)
        if state.step < config.steps:
            (directory.path / RESULT_FILE).unlink(missing_ok=True)

    workers.agree(prepare)
    return RunStart(directory, train_data, val_data, context, resolved, trainer, state, notes)


def _resolve(config: RunConfig, workers: Workers, context: int) -> dict[str, Any]:
    """What ``auto`` and the number of processes come to."""
    cuda = workers.device.type == "cuda"
    return {
        "device": workers.device.type,
        "device_name": torch.cuda.get_device_name(workers.device) if cuda else "cpu",
        "dtype": str(compute_dtype(config.dtype, workers.device)).removeprefix("torch."),
        "world_size": workers.world,
        "global_batch": config.batch * config.grad_accum * workers.world,
        "context_length": context,
    }


def _first_state(config: RunConfig) -> TrainerState:
    return TrainerState(
        step=0,
        config_hash=config_hash(config),
        code_version=code_version(),
        torch_version=str(torch.__version__),
        seconds=0.0,
        best_val_loss=None,
        best_step=None,
        last_val_loss=None,
        last_bits_per_byte=None,
        samples_bytes=0,
        optimizer={},
        random={},
    )


def _take_up(config: RunConfig, trainer: Trainer, state: TrainerState, known: dict[str, Any]) -> list[str]:
    """Puts a loaded ``state`` into effect; returns what is different from before and may show in the losses."""
    if state.step > config.steps:
        raise TrainingError(f"{config.out}: has {state.step} steps already, more than --steps {config.steps}")
    try:
        trainer.optimizer.load(state.optimizer)
    except (KeyError, ValueError) as error:
        raise TrainingError(f"{config.out}: its optimizer state does not fit this model ({error})") from None
    restore_random(state.random, trainer.workers.device)
    now = _first_state(config)
    notes = [f"going on after step {state.step}"]
    if (state.code_version, state.torch_version) != (now.code_version, now.torch_version):
        old = f"{state.code_version}, torch {state.torch_version}"
        notes.append(f"the code is not what this run began with ({old}): losses may differ a little")
    old_length = known["effective"]["schedule_steps"]
    if old_length != config.schedule_length:
        change = f"from {old_length} to {config.schedule_length} steps"
        notes.append(f"the schedule is stretched {change}: losses will not be those of an uninterrupted run")
    state.config_hash, state.code_version, state.torch_version = now.config_hash, now.code_version, now.torch_version
    state.optimizer = {}
    return notes
