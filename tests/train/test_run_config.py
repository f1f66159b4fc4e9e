"""RunConfig: what is refused, and what makes two runs the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from crucible_train.errors import TrainingError
from crucible_train.run_config import RunConfig, changed_field, config_hash, effective


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch": -1}, "batch must be at least 1"),
        ({"eval_every": -1}, "eval_every must be at least 0"),
        ({"seed": -1}, "seed must lie in 0"),
        ({"lr": float("nan")}, "lr must be a positive number, got nan"),
        ({"clip": 0.0}, "clip must be a positive number"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio must lie between 0 and 1"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        ({"betas": (0.9, 1.0)}, "betas must lie in"),
        ({"steps": 10, "schedule_steps": 5}, r"schedule_steps \(5\) is below steps \(10\)"),
        ({"steps": 10, "warmup_steps": 11}, r"warmup_steps \(11\) is above"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        RunConfig(data="d", **changes).check()


def test_the_hash_follows_what_changes_results() -> None:
    base = RunConfig(data="d")
    same = [
        {"out": "x"},
        {"device": "cuda"},
        {"compile": True},
        {"save_every": 1},
        {"zero1": True},
        {"lr": base.peak_lr},
    ]
    other = [{"seed": 1}, {"data_seed": 1}, {"lr": 1e-4}, {"norm": "layernorm"}, {"steps": 7}, {"eval_tokens": 5}]
    for changes in same:
        assert config_hash(msgspec.structs.replace(base, **changes)) == config_hash(base), changes
    hashes = {config_hash(msgspec.structs.replace(base, **changes)) for changes in other}
    assert len(hashes | {config_hash(base)}) == len(other) + 1


def test_data_counts_by_its_manifest(tmp_path: Path) -> None:
    for name, manifest in (("a", "{}"), ("b", "{}"), ("c", '{"x": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(manifest)
    a, b, c = (config_hash(RunConfig(data=str(tmp_path / name))) for name in "abc")
    assert a == b != c


def test_only_growing_steps_may_change() -> None:
    def change(before: dict[str, Any], after: dict[str, Any]) -> str | None:
        found = changed_field(effective(RunConfig(data="d", **before)), effective(RunConfig(data="d", **after)))
        return found and found[0]

    assert change({"steps": 10}, {"steps": 20}) is None
    assert change({"steps": 10, "schedule_steps": 20}, {"steps": 20}) is None
    assert change({"steps": 20}, {"steps": 10}) == "steps"
    assert change({"steps": 10, "schedule_steps": 20}, {"steps": 30}) == "schedule_steps"
    assert change({"steps": 10}, {"steps": 10, "schedule_steps": 20}) == "schedule_steps"
    assert change({"optimizer": "adamw"}, {"optimizer": "muon"}) == "optimizer"


def test_every_flag_of_the_study_is_a_field() -> None:
    fields = {field.name for field in msgspec.structs.fields(RunConfig) if field.required}
    assert fields == {"data"}
