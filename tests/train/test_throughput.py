"""The comparison of training steps: same data, same start, and failures that stay alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from crucible_train import fp8
from crucible_train.compute import Compute
from crucible_train.errors import TrainingError
from crucible_train.throughput import compare, main, measure
from crucible_train.throughput_check import check
from crucible_train.throughput_step import POOL, Plan, learnable_data
from crucible_train.throughput_variants import NAMED, Variant, parse_variant

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def test_variants_start_equal_see_the_same_data_and_learn() -> None:
    plan = Plan(batch=2, context=32, steps=3, rounds=2, settle=1)
    names = ["reference:mode=none", "ours:mode=none", "fast:mode=none:chunk=24"]
    records = compare("tiny", names, plan, device="cpu")
    assert [record["variant"] for record in records] == names
    for record in records:
        assert record["trained_steps"] == 8
        assert record["first_loss"] == pytest.approx(records[0]["first_loss"], rel=1e-3)
        assert record["final_loss"] == pytest.approx(records[0]["final_loss"], rel=1e-2)
        assert record["final_loss"] < record["first_loss"]
        assert record["slowest"] <= record["tokens_per_second"] <= record["fastest"]
        assert record["speedup"] > 0
    assert records[0]["speedup"] == 1.0


def test_a_variant_that_fails_is_reported_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(batch=1, context=16, steps=1, rounds=2, settle=0)
    # 500 rows are no multiple of 16, which only the FP8 head minds.
    records = compare("tiny", ["ours-fp8-head:mode=none", "ours:mode=none"], plan, device="cpu", vocab_size=500)
    assert records[0]["error"].startswith("TrainingError: an fp8 head needs multiples of 16")
    assert "tokens_per_second" not in records[0]
    assert records[1]["trained_steps"] == 2
    assert "Traceback" in capsys.readouterr().err


def test_no_round_starts_after_the_limit() -> None:
    plan = Plan(batch=1, context=16, steps=1, rounds=2, limit_seconds=-1.0)
    assert compare("tiny", ["ours:mode=none"], plan, device="cpu")[0]["error"] == "not run: the time was up"


def test_measure_is_one_variant() -> None:
    record = measure("tiny", 1, 16, 2, "ours:mode=none", device="cpu", rounds=1, settle=0)
    assert record["parameters"] == 131_392
    assert record["trained_steps"] == 2


def test_data_is_reproducible_and_mostly_determined() -> None:
    plan = Plan(batch=4, context=256, seed=3)
    data = learnable_data(512, plan, CPU)
    assert len(data) == POOL
    tokens, targets = data[0]
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(learnable_data(512, plan, CPU)[5][0], data[5][0])
    pairs: dict[int, list[int]] = {}
    for token, target in zip(tokens.flatten().tolist(), targets.flatten().tolist(), strict=True):
        pairs.setdefault(token, []).append(target)
    usual = sum(max(targets.count(t) for t in set(targets)) for targets in pairs.values())
    assert usual > 0.7 * tokens.numel()


def test_variants_are_parsed() -> None:
    assert parse_variant("ours") == Variant(Compute())
    changed = parse_variant("fast:chunk=4096:mode=none:fused_projections=false")
    want = Compute(matmul="fp8", head_matmul="fp8", chunk=4096, fused_projections=False)
    assert changed == Variant(want, "none")
    assert NAMED["fast"].compute.chunk is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine", "variant must be one of"),
        ("ours:chunk", "a change to a variant is switch=value, got 'chunk'"),
        ("ours:chunk=-1", "chunk must be a whole number, got '-1'"),
        ("ours:chunk=0", "chunk must be at least 1 row, got 0"),
        ("ours:mode=fast", "mode must be one of"),
        ("ours:loss=best", "loss must be one of fused, plain, got 'best'"),
        ("ours:fused_projections=2", "fused_projections must be true or false, got '2'"),
        ("ours:colour=red", "there is no compute switch 'colour'"),
    ],
)
def test_unknown_variants_are_named(text: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message.replace("(", r"\(")):
        parse_variant(text)


def test_the_command_writes_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--preset", "tiny", "--batch", "1", "--context", "16", "--steps", "1", "--rounds", "1", "--device", "cpu"]
    out = tmp_path / "out.jsonl"
    profile = ["--variants", "ours:mode=none", "--profile", "ours:mode=none", "--out", str(out)]
    assert main([*small, *profile]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(out.read_text())
    assert "aten::mm" in printed.err
    assert main([*small, "--variants", "mine"]) == 2
    assert capsys.readouterr().err.startswith("crucible-train: error: variant must be one of")
    assert main(["--preset", "tiny", "--batch", "0", "--device", "cpu"]) == 2


def test_check_compares_gradients_with_float32() -> None:
    records: list[dict[str, Any]] = []
    plan = Plan(batch=2, context=32, steps=2, rounds=2)
    names = ["reference:mode=none", "fast:mode=none"]
    assert check("tiny", names, plan, torch.device("cpu"), report=records.append)
    plain, fast = records
    assert [record["variant"] for record in records] == names
    for group in ("embedding", "qkv", "attention_output", "mlp_inputs", "mlp_down", "norms"):
        assert 0 < plain[group] < 0.02 < fast[group] < 0.2


def test_check_tells_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "column_major", lambda x: x.float().neg().to(x.dtype).t().contiguous().t())
    records: list[dict[str, Any]] = []
    plan = Plan(batch=2, context=32, steps=1, rounds=1)
    assert not check("tiny", ["fast:mode=none"], plan, torch.device("cpu"), report=records.append)
    assert records[0]["ok"] is False
