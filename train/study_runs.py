"""A study on disk: ``study.json`` and a directory a run; what state each run is in, and what it measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from crucible.errors import CheckpointError
from crucible.json_file import one_line, read_json
from crucible_train.errors import TrainingError
from crucible_train.files import write_atomically
from crucible_train.run_log import read_log
from crucible_train.run_result import RESULT_FILE
from crucible_train.study_design import PlannedRun, Study

STUDY = "study.json"
CONFIG = "config.json"
LOG = "log.csv"


class State(StrEnum):
    NEW = "new"
    HALF = "half-finished"
    DONE = "done"
    STALE = "of other settings"


@dataclass(frozen=True)
class Point:
    """Where a run is: its last logged step. ``loss`` is the training loss; NaN before the first step."""

    step: int
    loss: float
    tokens_per_second: float


def save_study(directory: Path, study: Study) -> None:
    write_atomically(directory / STUDY, msgspec.json.format(msgspec.json.encode(study), indent=1) + b"\n")


def load_study(directory: Path) -> Study | None:
    """The study kept in ``directory``; None when there is none. Raises TrainingError for a damaged one."""
    try:
        return msgspec.json.decode((directory / STUDY).read_bytes(), type=Study)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        fault = one_line(str(error))
        raise TrainingError(f"{directory / STUDY}: damaged ({fault}); remove it and sweep again") from None


def state_of(run: PlannedRun, directory: Path) -> State:
    """What has become of ``run`` in the study at ``directory``: done only with a result of the same config hash."""
    place = directory / run.name
    if not place.exists() or not any(place.iterdir()):
        return State.NEW
    try:
        found = read_json(place / CONFIG).get("config_hash")
    except CheckpointError:  # killed before it wrote one
        return State.STALE
    if found != run.hash:
        return State.STALE
    return State.DONE if _final(place / RESULT_FILE) else State.HALF


def _final(path: Path) -> bool:
    """Whether there is a result that a resumed run would not change: it was not stopped early."""
    try:
        return read_json(path).get("stopped_by") is None
    except CheckpointError:
        return False


def result_of(run: PlannedRun, directory: Path) -> dict[str, Any]:
    """The ``result.json`` of a run that is done."""
    return read_json(directory / run.name / RESULT_FILE)


def losses_of(
    study: Study, directory: Path, metric: str = "best_val_loss"
) -> tuple[dict[str, dict[int, float | None]], dict[str, str]]:
    """The finished runs' ``metric`` by variant and seed, and why each other planned run has none (by its name).

    ``None`` stands for a run whose loss became infinite or NaN. Raises TrainingError when a result lacks ``metric``.
    """
    losses: dict[str, dict[int, float | None]] = {variant.name: {} for variant in study.variants}
    absent = {}
    for run in study.runs:
        state = state_of(run, directory)
        if state is not State.DONE:
            absent[run.name] = "not started" if state is State.NEW else state.value
            continue
        result = result_of(run, directory)
        value = result.get(metric)
        if result.get("diverged") is True:
            losses[run.variant][run.seed] = None
        elif isinstance(value, int | float):
            losses[run.variant][run.seed] = float(value)
        else:
            path = directory / run.name / RESULT_FILE
            raise TrainingError(f"{path}: has no {metric}; does the data have a val split?")
    return losses, absent


def last_point(place: Path) -> Point | None:
    """The last whole line of the log of the run at ``place``; reads its end only."""
    try:
        with (place / LOG).open("rb") as file:
            header = file.readline().decode().strip().split(",")
            file.seek(max(file.tell(), file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")[:-1]
        values = dict(zip(header, lines[-1].split(","), strict=True))
        speed = values.get("tokens_per_second") or "nan"
        return Point(int(values["step"]), float(values.get("loss") or "nan"), float(speed))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def curve_of(run: PlannedRun, directory: Path, column: str = "val_loss") -> tuple[list[int], list[float]]:
    """Steps and values of ``column`` where the log of ``run`` has one."""
    try:
        rows = [row for row in read_log(directory / run.name / LOG) if row.get(column)]
        return [int(row["step"]) for row in rows], [float(row[column]) for row in rows]
    except (OSError, ValueError, KeyError):
        return [], []


def set_aside(place: Path) -> Path:
    """Renames the run directory ``place`` to ``place.superseded-N``: nothing that was trained is deleted."""
    for number in range(1, 10_000):
        target = place.with_name(f"{place.name}.superseded-{number}")
        if not target.exists():
            os.rename(place, target)
            return target
    raise TrainingError(f"{place}: too many superseded runs beside it; remove some")


def planned_seeds(study: Study) -> dict[str, Sequence[int]]:
    """The seeds that the study plans for each variant."""
    seeds: dict[str, list[int]] = {variant.name: [] for variant in study.variants}
    for run in study.runs:
        seeds[run.variant].append(run.seed)
    return {name: sorted(values) for name, values in seeds.items()}
