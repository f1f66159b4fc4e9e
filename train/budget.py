"""Which model size a number of GPU hours is right for: tokens a parameter from measured throughput.

Compute-optimal training wants about 20 tokens for each parameter (Hoffmann et al. 2022, arXiv:2203.15556). Parameters
are counted without embeddings, as scaling laws do: with a vocabulary of 50k the table is two thirds of the 30m preset.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crucible.errors import CheckpointError
from crucible.json_file import read_json
from crucible_train.errors import TrainingError
from crucible_train.presets import PRESETS, find_preset, model_config, parameter_counts
from crucible_train.run_log import read_log

OPTIMAL = 20.0
"""Tokens a parameter of compute-optimal training."""
WARM_UP = 10
"""Logged steps that say nothing of the throughput: compilation and first touches."""


@dataclass(frozen=True)
class BudgetRow:
    """What a preset gets out of the hours. ``share``: of OPTIMAL; ``hours_needed``: until it is reached."""

    preset: str
    parameters: int
    tokens_per_second: float
    tokens: float
    tokens_per_parameter: float
    share: float
    hours_needed: float
    epochs: float | None


def budget(throughput: Mapping[str, float], hours: float, data_tokens: float | None = None) -> list[BudgetRow]:
    """A row a preset of ``throughput`` (preset → tokens/s), smallest model first.

    ``data_tokens``: size of the training data, for the number of epochs. Raises TrainingError for a value that is not
    positive or a preset that does not exist.
    """
    for name, value in {"hours": hours, "data tokens": data_tokens, **throughput}.items():
        if value is not None and not 0 < value < math.inf:
            raise TrainingError(f"{name}: must be a positive number, got {value}")
    rows = []
    for preset, speed in throughput.items():
        find_preset(preset)
        parameters = parameter_counts(model_config(preset)).non_embedding
        tokens = speed * hours * 3600
        ratio = tokens / parameters
        needed = OPTIMAL * parameters / speed / 3600
        epochs = None if data_tokens is None else tokens / data_tokens
        rows.append(BudgetRow(preset, parameters, speed, tokens, ratio, ratio / OPTIMAL, needed, epochs))
    return sorted(rows, key=lambda row: row.parameters)


def best_fit(rows: Sequence[BudgetRow]) -> BudgetRow:
    """The preset nearest to OPTIMAL tokens a parameter, as a ratio: neither starved nor too small for the hours."""
    return min(rows, key=lambda row: abs(math.log(row.share)))


def measured_throughput(directories: Sequence[Path]) -> dict[str, float]:
    """Preset → tokens/s of run directories, or of those one and two levels below: the median over a run's steps.

    Of several runs of a preset the median counts. Raises TrainingError when there is no run with a log.
    """
    speeds: dict[str, list[float]] = {}
    for directory in directories:
        for config in sorted({*directory.glob("config.json"), *directory.glob("*/config.json"),
                              *directory.glob("*/*/config.json")}):  # fmt: skip
            found = run_throughput(config.parent)
            if found is not None:
                speeds.setdefault(found[0], []).append(found[1])
    if not speeds:
        names = ", ".join(map(str, directories))
        raise TrainingError(f"{names}: no run with a log of more than {WARM_UP} steps; train one, or --throughput")
    return {preset: statistics.median(values) for preset, values in speeds.items()}


def run_throughput(place: Path) -> tuple[str, float] | None:
    """The preset and median tokens/s of the run at ``place``; None when it is no run or too short to say."""
    try:
        config = read_json(place / "config.json")
        rows = read_log(place / "log.csv")
        speeds = [float(row["tokens_per_second"]) for row in rows if row.get("tokens_per_second")][WARM_UP:]
    except (CheckpointError, OSError, ValueError, KeyError):
        return None
    nested = config.get("run")
    run = nested if isinstance(nested, dict) else config
    if run.get("init_from") is not None:  # then the architecture is not the preset's
        return None
    preset = run.get("preset")
    return (preset, statistics.median(speeds)) if preset in PRESETS and speeds else None
