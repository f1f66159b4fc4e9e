"""Presets: the counts of the issue, parity of the two activations, and a GQA that is never something else."""

from __future__ import annotations

import argparse
import json

import pytest

from crucible.checkpoint import expected_tensors
from crucible_train import presets_command
from crucible_train.errors import TrainingError
from crucible_train.plain_llama import require_plain_llama
from crucible_train.presets import AXES, PRESETS, Preset, kv_heads, model_config, parameter_counts

SIZES = [name for name in PRESETS if name != "tiny"]


@pytest.mark.parametrize(
    ("preset", "total", "non_embedding", "heads", "inner"),
    [
        ("nano", 10_950_912, 8_853_760, 2, 704),
        ("30m", 28_758_912, 9_442_176, 2, 1024),
        ("120m", 112_970_496, 74_337_024, 3, 2048),
        ("350m", 317_375_488, 265_864_192, 4, 2752),
    ],
)
def test_counts(preset: str, total: int, non_embedding: int, heads: int, inner: int) -> None:
    config = model_config(preset)
    counts = parameter_counts(config)
    assert (counts.total, counts.non_embedding) == (total, non_embedding)
    assert (config.num_kv_heads, config.intermediate_size, config.head_dim) == (heads, inner, 64)


@pytest.mark.parametrize("preset", SIZES)
def test_both_activations_have_the_same_number_of_parameters(preset: str) -> None:
    swiglu, gelu = (parameter_counts(model_config(preset, activation=a)).non_embedding for a in AXES["activation"])
    # 8d/3 is a multiple of 64 for 30m and 120m; else it is rounded up.
    assert swiglu == gelu if preset in ("30m", "120m") else 0 <= swiglu / gelu - 1 < 0.03


@pytest.mark.parametrize("heads", range(1, 65))
def test_gqa_never_degenerates(heads: int) -> None:
    if not [n for n in range(max(2, heads // 4), heads) if heads % n == 0]:
        with pytest.raises(TrainingError, match=f"gqa with {heads} heads would degenerate"):
            kv_heads(heads, "gqa")
        return
    grouped = kv_heads(heads, "gqa")
    assert 1 < grouped < heads
    assert heads % grouped == 0
    assert grouped >= heads // 4


@pytest.mark.parametrize("heads", [1, 2, 3, 7])
def test_gqa_that_would_degenerate_is_refused(heads: int) -> None:
    with pytest.raises(TrainingError, match=f"gqa with {heads} heads would degenerate"):
        model_config(Preset(num_layers=1, hidden_size=8 * heads, num_heads=heads, context_length=8))
    for attention in ("mha", "mqa"):
        assert kv_heads(heads, attention) == (heads if attention == "mha" else 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_three_attentions_differ_on_every_preset(preset: str) -> None:
    assert len({model_config(preset, attention=a).num_kv_heads for a in AXES["attention"]}) == 3


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_plain_llamas(preset: str) -> None:
    config = model_config(preset)
    require_plain_llama(config, "a test")
    assert not any(name.endswith(".bias") for name in expected_tensors(config))
    for changes in ({"position": "none"}, {"activation": "gelu"}, {"norm": "layernorm"}, {"placement": "post"}):
        with pytest.raises(TrainingError, match="needs a plain Llama"):
            require_plain_llama(model_config(preset, **changes), "a test")  # type: ignore[arg-type]


def test_the_vocabulary_may_differ_from_the_preset() -> None:
    config = model_config("120m", vocab_size=8192, token_count=8001, eos_token_id=8000, context_length=256, tied=False)
    assert (config.vocab_size, config.token_count, config.eos_token_ids) == (8192, 8001, [8000])
    assert config.context_length == 256
    counts = parameter_counts(config)
    assert counts.embedding == 2 * 8192 * 768
    assert counts.non_embedding == 74_337_024


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("130m", {}, "preset must be one of tiny, nano, 30m, 120m, 350m, got '130m'"),
        ("nano", {"position": "sinus"}, "position must be one of rope, alibi, learned, none, got 'sinus'"),
        ("nano", {"attention": "GQA"}, "attention must be one of gqa, mha, mqa, got 'GQA'"),
    ],
)
def test_unknown_choices_are_named(preset: str, changes: dict[str, str], message: str) -> None:
    with pytest.raises(TrainingError) as error:
        model_config(preset, **changes)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    presets_command.add_arguments(parser)
    assert presets_command.run(parser.parse_args([])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "preset"
    assert "112,970,496" in lines[4]
    assert "74,337,024" in lines[4]
    assert presets_command.run(parser.parse_args(["--json", "--vocabulary-size", "512"])) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["preset"] for row in rows] == list(PRESETS)
    assert rows[3]["total"] == 74_337_024 + 512 * 768
    with pytest.raises(TrainingError, match="--vocabulary-size must be positive, got 0"):
        presets_command.run(parser.parse_args(["--vocabulary-size", "0"]))
