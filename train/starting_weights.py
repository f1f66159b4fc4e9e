"""The model a run starts from: fresh, or with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from crucible.checkpoint import open_checkpoint
from crucible.config.model import ModelConfig
from crucible.tokenizer import VOCABULARY_FILE
from crucible_train import fp8
from crucible_train.compute import Compute
from crucible_train.errors import TrainingError
from crucible_train.export_source import find_checkpoint
from crucible_train.presets import model_config
from crucible_train.run_config import RunConfig
from crucible_train.shards import TokenDataset
from crucible_train.tensors import load_checkpoint_tensors
from crucible_train.transformer import Transformer


def new_model_config(config: RunConfig, dataset: TokenDataset) -> ModelConfig:
    """The ModelConfig that ``config`` asks for, with the vocabulary of ``dataset``.

    With init_from it is that checkpoint's. Raises TrainingError where vocabulary or context do not fit.
    """
    if config.init_from is None:
        return model_config(
            config.preset,
            vocab_size=dataset.vocab_size,
            token_count=dataset.id_count,
            eos_token_id=dataset.separator_id,
            context_length=config.context_length,
            attention=config.attention,
            position=config.position,
            activation=config.activation,
            norm=config.norm,
            placement=config.placement,
            tied=config.tied,
        )
    path = find_checkpoint(Path(config.init_from))
    with open_checkpoint(path) as checkpoint:
        model = checkpoint.config
    _check_vocabulary(path, model, dataset)
    if config.context_length is not None and config.context_length > model.context_length:
        raise TrainingError(
            f"context_length {config.context_length} is beyond the {model.context_length} of {path}; choose less"
        )
    return model


def _check_vocabulary(path: Path, model: ModelConfig, dataset: TokenDataset) -> None:
    theirs, ours = path / VOCABULARY_FILE, dataset.directory / VOCABULARY_FILE
    if theirs.exists() and theirs.read_bytes() != ours.read_bytes():
        raise TrainingError(
            f"{path} has another tokenizer than {dataset.directory}; prepare the data with --vocabulary {theirs}"
        )
    if dataset.id_count > model.vocab_size:
        raise TrainingError(
            f"{dataset.directory} has {dataset.id_count} token ids and {path} only {model.vocab_size}; "
            "they are of different vocabularies"
        )


def build_model(model: ModelConfig, config: RunConfig, device: torch.device) -> Transformer:
    """A Transformer on ``device`` with fresh weights; drawn on the CPU, so that each device starts from the same."""
    if config.matmul != "bf16":
        fp8.require(device)
    torch.manual_seed(config.seed)
    compute = Compute.for_precision(config.matmul, gqa=config.gqa)
    return Transformer(model, compute).to(device)


def load_weights(model: Transformer, path: Path) -> None:
    """Sets the weights of ``model`` to those of the native checkpoint at ``path``, whose ModelConfig it has."""
    with open_checkpoint(path) as checkpoint:
        if checkpoint.config != model.config:
            raise TrainingError(f"{path}: is of another architecture than this run; choose another --out")
        load_checkpoint_tensors(model, checkpoint.read)
