"""Quickstart: from the bundled text to a trained, exported, answering model in minutes, on a CPU.

The parts are those of prepare, train and export, with settings for two cores; only the model is smaller than any
preset. It learns spelling, punctuation and the manner of its four novels, and nothing about the world.
"""

from __future__ import annotations

import importlib.resources
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crucible.checkpoint import save_checkpoint
from crucible.tokenizer import VOCABULARY_FILE
from crucible_train.errors import TrainingError
from crucible_train.presets import Preset, model_config, parameter_counts
from crucible_train.run_config import RunConfig

TEXT = "quickstart.txt.xz"
PROMPT = "It is a truth universally acknowledged, that"

SIZE = Preset(num_layers=4, hidden_size=192, num_heads=6, context_length=128)


@dataclass(frozen=True)
class Recipe:
    """What is trained and how long; the defaults were chosen on two cores of a 2020s server (docs/training.md)."""

    vocabulary_size: int = 2048
    size: Preset = SIZE
    val_fraction: float = 0.06
    batch: int = 16
    steps: int = 700
    lr: float = 4e-3
    optimizer: str = "muon"
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """Nats a token on the held-out chapters: of the model, and what two models by counting reach."""

    val_loss: float
    bits_per_byte: float
    unigram: float
    bigram: float
    seconds: float
    answer: str


def quickstart(
    out: str | Path, *, recipe: Recipe | None = None, prompt: str = PROMPT, say: Callable[[str], None] = print
) -> Outcome:
    """Makes ``out``/data, ``out``/run and ``out``/model, and lets the model go on from ``prompt``.

    The same command goes on with one that was interrupted. Raises CrucibleError, one line.
    """
    out, recipe = Path(out), recipe or Recipe()
    began = time.monotonic()

    def stage(text: str) -> None:
        say(f"[{time.monotonic() - began:4.0f} s] {text}")

    _check_target(out)
    stage(f"preparing {TEXT}: four novels by Jane Austen, in the public domain")
    prepare_text(out / "data", recipe)
    parameters = first_weights(out / "start", out / "data", recipe)
    stage(f"training {parameters:,} parameters for {recipe.steps} steps of {recipe.batch} × {context(recipe)} tokens")
    val_loss, bits = train(out, recipe)
    stage("exporting")
    from crucible_train.export import export_native

    model = export_native(out / "run", out / "model")
    unigram, bigram = baselines(out / "data")
    stage("asking the exported model (the first time, its kernels are compiled)")
    answer = ask(model, prompt)
    return Outcome(val_loss, bits, unigram, bigram, time.monotonic() - began, answer)


def context(recipe: Recipe) -> int:
    """Tokens a sequence."""
    return recipe.size.context_length


def prepare_text(directory: Path, recipe: Recipe) -> None:
    """The bundled text as shards, whole chapters held out."""
    from crucible_train.prepare import prepare

    with importlib.resources.as_file(importlib.resources.files("crucible.data") / TEXT) as path:
        if not path.is_file():
            raise TrainingError(f"{path}: the text is not in this installation; install crucible-lm again")
        prepare([path], directory, vocabulary_size=recipe.vocabulary_size, val_fraction=recipe.val_fraction)


def first_weights(directory: Path, data: Path, recipe: Recipe) -> int:
    """An untrained checkpoint of the recipe's size, unless it is there already; its number of parameters."""
    import torch

    from crucible_train.shards import TokenDataset
    from crucible_train.tensors import to_checkpoint_tensors
    from crucible_train.transformer import Transformer

    dataset = TokenDataset(data, "train")
    config = model_config(
        recipe.size,
        vocab_size=dataset.vocab_size,
        token_count=dataset.id_count,
        eos_token_id=dataset.separator_id,
    )
    if not directory.exists():
        torch.manual_seed(recipe.seed)
        files = {VOCABULARY_FILE: (data / VOCABULARY_FILE).read_bytes()}
        save_checkpoint(directory, config, to_checkpoint_tensors(Transformer(config)), files=files)
    return parameter_counts(config).total


def train(out: Path, recipe: Recipe) -> tuple[float, float]:
    """Trains ``out``/run, going on if it was begun; the best validation loss and its bits per byte."""
    from crucible_train.pretrain import pretrain

    result = pretrain(run_config(out, recipe), resume=(out / "run").exists())
    if result.stopped_by is not None or result.best_val_loss is None or result.val_bits_per_byte is None:
        raise TrainingError(f"{out / 'run'}: stopped after {result.steps} steps; the same command goes on")
    return result.best_val_loss, result.val_bits_per_byte * result.best_val_loss / (result.final_val_loss or 1.0)


def run_config(out: Path, recipe: Recipe) -> RunConfig:
    """The run. It starts from ``out``/start, whose size no preset has."""
    every = -(-recipe.steps // 3)
    return RunConfig(
        data=str(out / "data"),
        out=str(out / "run"),
        init_from=str(out / "start"),
        steps=recipe.steps,
        batch=recipe.batch,
        lr=recipe.lr,
        optimizer="muon" if recipe.optimizer == "muon" else "adamw",
        dtype="float32",
        eval_every=every,
        save_every=every,
        seed=recipe.seed,
        device="cpu",
    )


def baselines(data: Path) -> tuple[float, float]:
    """Nats a token on the held-out split: its unigram entropy, and an interpolated bigram of the training split."""
    from crucible_train.ngram import bigram_cross_entropy, unigram_entropy
    from crucible_train.shards import TokenDataset

    train_split, heldout = TokenDataset(data, "train"), TokenDataset(data, "val")
    tokens = heldout.all()
    return unigram_entropy(tokens), bigram_cross_entropy(train_split.all(), tokens, heldout.id_count)


def ask(model: Path, prompt: str) -> str:
    """``prompt`` and how the engine goes on to the end of the context.

    In a process of its own: training imports nothing of the engine.
    """
    command = [sys.executable, "-m", "crucible.cli", "generate", str(model), "--raw", "--prompt", prompt]
    command += ["--temperature", "0.7", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise TrainingError(f"{model}: the engine could not run it ({reason})")
    return prompt + result.stdout.rstrip("\n")


def _check_target(out: Path) -> None:
    """Only an empty directory or an interrupted quickstart may be written into."""
    names = set(os.listdir(out)) if out.is_dir() else set()
    if out.exists() and not out.is_dir():
        raise TrainingError(f"{out}: is not a directory; choose another --out")
    if foreign := sorted(names - {"data", "start", "run", "model"}):
        raise TrainingError(f"{out}: holds {foreign[0]!r}, which is no quickstart's; choose another --out")
