"""RunDirectory: ``OUT/`` of a run, and whether a run may start or go on there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from crucible import __version__
from crucible.config.model import ModelConfig, parse_model_config
from crucible.json_file import read_json
from crucible_train.errors import TrainingError
from crucible_train.files import write_atomically
from crucible_train.run_config import RunConfig, changed_field, config_hash, effective
from crucible_train.trainer_state import CheckpointStore

CONFIG_FILE = "config.json"
LOG_FILE = "log.csv"
SAMPLES_FILE = "samples.txt"
TENSORBOARD = "tensorboard"


def code_version() -> str:
    """Crucible's version and a digest of this package's sources, so that a changed loop does not pass for the same."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


class RunDirectory:
    """The files of one run: config.json, log.csv, checkpoints/, samples.txt, result.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / LOG_FILE
        self.samples = path / SAMPLES_FILE
        self.checkpoints = CheckpointStore(path / "checkpoints")

    def open(self, config: RunConfig, *, resume: bool) -> dict[str, Any] | None:
        """The description that an earlier start left in config.json when the run goes on; None for a new run.

        Raises TrainingError where a run is and ``resume`` was not asked for, and for another run's directory.
        """
        entries = os.listdir(self.path) if self.path.is_dir() else []
        begun = [name for name in entries if not name.startswith(".")]  # what a kill left half-written
        if begun and not resume:
            raise TrainingError(f"{self.path}: already holds files; add --resume to go on, or choose another --out")
        if not begun:
            return None
        if CONFIG_FILE not in begun:
            raise TrainingError(f"{self.path}: holds files but no {CONFIG_FILE}, so no run; choose another --out")
        known = read_json(self.path / CONFIG_FILE)
        self._compare(known.get("effective"), effective(config))
        return known

    def _compare(self, before: Any, after: dict[str, Any]) -> None:
        if not isinstance(before, dict) or before.keys() != after.keys():
            raise TrainingError(
                f"{self.path / CONFIG_FILE}: was written by another version; start anew in another --out"
            )
        change = changed_field(before, after)
        if change is not None:
            name, old, new = change
            self._refuse(name, old, new)

    def compare_resolved(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Refuses to go on where ``auto`` now means something else or the global batch has changed."""
        for name, new in after.items():
            old = before.get("resolved", {}).get(name)
            if name in ("dtype", "global_batch", "context_length") and old != new:
                self._refuse(name, old, new)

    def _refuse(self, name: str, old: Any, new: Any) -> None:
        raise TrainingError(
            f"{self.path}: {name} was {old!r} when this run began and is {new!r} now; "
            "resume with the old value, or start anew in another --out"
        )

    def model_config(self, known: dict[str, Any]) -> ModelConfig:
        """The model that ``known`` (config.json) describes."""
        model = known.get("model")
        return parse_model_config(model if isinstance(model, dict) else {}, self.path / CONFIG_FILE)

    def describe(self, config: RunConfig, model: ModelConfig, resolved: dict[str, Any], torch_version: str) -> None:
        """Writes config.json, whole or not at all."""
        values = {
            "run": config,
            "model": model,
            "effective": effective(config),
            "resolved": resolved,
            "config_hash": config_hash(config),
            "code_version": code_version(),
            "torch_version": torch_version,
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / CONFIG_FILE, msgspec.json.format(msgspec.json.encode(values), indent=2) + b"\n")

    def cut_samples(self, samples_bytes: int) -> None:
        """Takes back the samples written after a checkpoint."""
        if self.samples.exists() and self.samples.stat().st_size > samples_bytes:
            os.truncate(self.samples, samples_bytes)

    def add_sample(self, step: int, text: str) -> None:
        with self.samples.open("a", encoding="utf-8") as file:
            file.write(f"--- step {step}\n{text}\n\n")

    @property
    def samples_bytes(self) -> int:
        return self.samples.stat().st_size if self.samples.exists() else 0
