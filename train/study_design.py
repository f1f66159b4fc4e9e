"""The design of an ablation study: a control, and variants that change one axis each, paired over seeds.

Seed *i* gives every variant the same ``seed`` and ``data_seed``, so all of them see the same data in the same order
and a difference between two runs of one seed is a difference between their architectures (and their own noise).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from crucible.json_file import one_line
from crucible_train.errors import TrainingError
from crucible_train.presets import AXES, model_config
from crucible_train.run_config import RunConfig, config_hash

ALIASES = {"pos": "position", "pos_encoding": "position", "norm_placement": "placement"}
CONTROL = "control"
OF_THE_STUDY = frozenset({*AXES, "seed", "data_seed", "out"})
"""Fields of RunConfig that the design sets itself."""


@dataclass(frozen=True)
class Variant:
    """One configuration. ``name`` is also the start of its runs' directories."""

    name: str
    axis: str = ""
    value: str = ""

    @property
    def settings(self) -> dict[str, str]:
        """What it changes of the control."""
        return {self.axis: self.value} if self.axis else {}


@dataclass(frozen=True)
class PlannedRun:
    """One training run: ``settings`` are the fields of its RunConfig that differ from the defaults, but for ``out``."""

    name: str
    variant: str
    seed: int
    settings: dict[str, Any]
    hash: str

    def config(self, directory: Path) -> RunConfig:
        """Its RunConfig in the study at ``directory``."""
        return run_config(self.settings | {"out": str(directory / self.name)})


@dataclass(frozen=True)
class Study:
    """What ``study.json`` keeps: everything needed to tell which runs belong to the study and which are missing.

    ``base``: settings that all runs share. ``rates``: learning rates of variants that have their own.
    """

    base: dict[str, Any]
    variants: list[Variant]
    seeds: list[int]
    runs: list[PlannedRun]
    rates: dict[str, float] = field(default_factory=dict)


def parse_axes(names: Iterable[str]) -> list[str]:
    """Axis names (or their short forms) in the order of AXES. Raises TrainingError for an unknown one."""
    wanted = set()
    for name in names:
        axis = ALIASES.get(name, name)
        if axis not in AXES:
            raise TrainingError(f"unknown axis {one_line(name)!r}: choose from {', '.join(AXES)}")
        wanted.add(axis)
    return [axis for axis in AXES if axis in wanted]


def variants_of(axes: Sequence[str]) -> list[Variant]:
    """The control and every variant that differs from it in one of ``axes``: 9 configurations for all five."""
    others = (Variant(f"{axis}-{value}", axis, value) for axis in axes for value in AXES[axis][1:])
    return [Variant(CONTROL), *others]


def run_config(settings: Mapping[str, Any]) -> RunConfig:
    """``settings`` as a checked RunConfig. Raises TrainingError naming the first bad field."""
    try:
        config = msgspec.convert(dict(settings), RunConfig, strict=False)
    except msgspec.ValidationError as error:
        raise TrainingError(f"run settings: {one_line(str(error))}") from None
    config.check()
    return config


def plan(
    axes: Sequence[str], seeds: Sequence[int], base: Mapping[str, Any], rates: Mapping[str, float] | None = None
) -> Study:
    """The study of ``axes`` over ``seeds`` with the settings ``base`` (RunConfig fields) for every run.

    ``rates``: learning rates by variant, named in full (``placement-post``) or by value (``post``). Runs come seed by
    seed, so that a study cut short still has whole pairs. Raises TrainingError for settings that cannot work.
    """
    if not seeds:
        raise TrainingError("a study needs at least one seed")
    owned = sorted(OF_THE_STUDY & set(base))
    if owned:
        raise TrainingError(f"{owned[0]} is set by the design of the study and cannot be given for all runs")
    checked = run_config(base)
    if checked.init_from is not None:
        raise TrainingError("init_from cannot be set in a study: its architecture would take the place of every axis")
    base = {name: _plain(getattr(checked, name)) for name in base}  # "1e-3" and 0.001 are one setting
    variants = variants_of(axes)
    by_name = _rates(variants, rates or {})
    for variant in variants:  # an axis that the preset cannot vary (gqa that would be mqa) is refused now
        model_config(checked.preset, **variant.settings)  # type: ignore[arg-type]
    runs = [_planned(variant, seed, base, by_name) for seed in seeds for variant in variants]
    return Study(base, variants, list(seeds), runs, by_name)


def _plain(value: Any) -> Any:
    """``value`` as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _planned(variant: Variant, seed: int, base: Mapping[str, Any], rates: Mapping[str, float]) -> PlannedRun:
    settings = {**base, **variant.settings, "seed": seed, "data_seed": seed}
    if variant.name in rates:
        settings["lr"] = rates[variant.name]
    return PlannedRun(f"{variant.name}-seed{seed}", variant.name, seed, settings, config_hash(run_config(settings)))


def _rates(variants: Sequence[Variant], rates: Mapping[str, float]) -> dict[str, float]:
    by_name = {}
    for key, rate in rates.items():
        match = [variant.name for variant in variants if key in (variant.name, variant.value)]
        if not match:
            known = ", ".join(variant.value or variant.name for variant in variants)
            raise TrainingError(f"no variant {one_line(key)!r} to give a learning rate: this study has {known}")
        by_name[match[0]] = rate
    return by_name


def merge(before: Study | None, after: Study) -> Study:
    """``after`` with the runs of ``before`` that it does not plan itself: a study is built up call by call.

    Runs of other base settings, of data that is no longer what it was, or of a variant whose learning rate ``after``
    changes, are left out: they could not be compared.
    """
    if before is None or before.base != after.base:
        return after
    replanned = {variant.name for variant in after.variants}
    names = {run.name for run in after.runs}
    stale = {name for name in replanned if before.rates.get(name) != after.rates.get(name)}
    kept = [
        run
        for run in before.runs
        if run.name not in names and run.variant not in stale and config_hash(run_config(run.settings)) == run.hash
    ]
    return Study(
        after.base,
        after.variants + [variant for variant in before.variants if variant.name not in replanned],
        sorted({run.seed for run in (*kept, *after.runs)}),
        kept + after.runs,
        before.rates | after.rates,
    )
