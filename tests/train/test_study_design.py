from __future__ import annotations

from pathlib import Path

import pytest

from crucible_train.errors import TrainingError
from crucible_train.study_design import AXES, merge, parse_axes, plan, run_config, variants_of

BASE = {"preset": "30m", "data": "/data", "steps": 10}


def test_all_axes_give_nine_configurations() -> None:
    names = [variant.name for variant in variants_of(parse_axes(AXES))]
    assert names == [
        "control", "attention-mha", "attention-mqa", "position-alibi", "position-learned", "position-none",
        "activation-gelu", "norm-layernorm", "placement-post",
    ]  # fmt: skip


def test_a_variant_changes_one_axis_of_the_control_and_pairs_by_data_order() -> None:
    study = plan(list(AXES), [0, 1], BASE)
    configs = {run.name: run.config(Path("/out")) for run in study.runs}
    assert len(configs) == 18
    for run in study.runs:
        control, config = configs[f"control-seed{run.seed}"], configs[run.name]
        assert config.order_seed == config.seed == control.order_seed == run.seed
        changed = [axis for axis in AXES if getattr(config, axis) != getattr(control, axis)]
        assert len(changed) == (run.variant != "control")
    assert len({run.hash for run in study.runs}) == 18


def test_runs_come_seed_by_seed() -> None:
    assert [run.seed for run in plan(["norm"], [0, 1, 2], BASE).runs] == [0, 0, 1, 1, 2, 2]


def test_a_learning_rate_of_its_own_by_value_or_name() -> None:
    for key in ("post", "placement-post"):
        study = plan(["placement"], [0], BASE, {key: 1e-4})
        assert [run.settings.get("lr") for run in study.runs] == [None, 1e-4]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: parse_axes(["depth"]), "unknown axis 'depth'"),
        (lambda: plan(["norm"], [0], BASE, {"post": 1.0}), "no variant 'post'"),
        (lambda: plan(["norm"], [0], BASE | {"steps": 0}), "steps"),
        (lambda: plan(["norm"], [0], BASE | {"stepz": 1}), "stepz"),
        (lambda: plan(["norm"], [0], BASE | {"seed": 1}), "seed is set by the design"),
        (lambda: plan(["norm"], [0], BASE | {"preset": "9b"}), "preset"),
        (lambda: plan(["norm"], [], BASE), "at least one seed"),
        (lambda: plan(["norm"], [0], BASE | {"lr": "fast"}), "lr"),
    ],
)
def test_what_cannot_work_is_one_line(call, text: str) -> None:
    with pytest.raises(TrainingError, match=text) as error:
        call()
    assert "\n" not in str(error.value)


def test_text_and_number_are_one_setting() -> None:
    left, right = (plan(["norm"], [0], BASE | {"lr": value}) for value in ("1e-3", 0.001))
    assert left == right


def test_short_names_of_axes() -> None:
    assert parse_axes(["norm", "pos"]) == ["position", "norm"]


def test_a_study_grows_call_by_call() -> None:
    first = plan(["norm"], [0, 1], BASE)
    second = plan(["activation"], [0], BASE)
    both = merge(first, second)
    assert {run.name for run in both.runs} == {run.name for run in (*first.runs, *second.runs)}
    assert {variant.name for variant in both.variants} == {"control", "norm-layernorm", "activation-gelu"}
    assert both.seeds == [0, 1]


def test_other_settings_are_another_study() -> None:
    first, second = plan(["norm"], [0], BASE), plan(["norm"], [1], BASE | {"steps": 20})
    assert merge(first, second) == second
    third = plan(["norm"], [1], BASE, {"layernorm": 1e-4})
    assert {run.name for run in merge(first, third).runs} == {"control-seed0", "control-seed1", "norm-layernorm-seed1"}


def test_settings_pass_through_the_command_line_unchanged() -> None:
    from argparse import ArgumentParser

    from crucible_train import train_command
    from crucible_train.executor import train_command as command_line

    run = plan(["norm"], [3], BASE | {"lr": 1e-3, "betas": [0.8, 0.9], "compile": "1", "context_length": "64"}).runs[1]
    parser = ArgumentParser()
    train_command.add_arguments(parser)
    parsed = train_command.parse_config(parser.parse_args(command_line(run, Path("/out"), False, trainer=())))
    assert parsed == run_config(run.settings | {"out": "/out"})


def test_a_checkpoints_architecture_would_hide_every_axis() -> None:
    with pytest.raises(TrainingError, match="init_from cannot be set"):
        plan(["norm"], [0], BASE | {"init_from": "run"})


def test_runs_on_data_that_has_changed_leave_the_study(tmp_path: Path) -> None:
    base = BASE | {"data": str(tmp_path)}
    (tmp_path / "manifest.json").write_text("1")
    first = plan(["norm"], [0], base)
    (tmp_path / "manifest.json").write_text("2")
    second = plan(["norm"], [1], base)
    assert {run.name for run in merge(first, second).runs} == {"control-seed1", "norm-layernorm-seed1"}
