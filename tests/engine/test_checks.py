"""The exactness suite: it passes on a real model, and each check finds what it is there to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible.cli import main
from crucible.commands import check_suite
from crucible.config import SamplingParams
from crucible.engine.checks import suite
from crucible.engine.checks.lab import Difference, Job, Lab, Trace, difference
from crucible.engine.checks.suite import CHECKS, Outcome
from crucible.errors import ConfigError
from crucible.kernels.device import gpu_available
from tests.checkpoints import make_checkpoint
from tests.engine.toy import toy_cache, toy_config, toy_forward

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Untied: a random model whose head is its embedding repeats the last token, whatever became of the others.
    return make_checkpoint(tmp_path_factory.mktemp("checks") / "model", context_length=1024, tied_embeddings=False)


@pytest.fixture(scope="module")
def lab(checkpoint: Path) -> Lab:
    return Lab.load(checkpoint)


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "graphs"])
def test_a_real_model_passes(lab: Lab, name: str) -> None:
    outcomes = list(CHECKS[name](lab, 1, np.random.default_rng(1)))
    assert [outcome for outcome in outcomes if outcome.difference] == []
    assert sum(outcome.rows for outcome in outcomes) >= 28


def test_quantised_and_on_one_thread_or_two(checkpoint: Path) -> None:
    lab = Lab.load(checkpoint, quant="int8", threads=2)
    job = Job("a", tuple(range(90)), SHORT)
    assert difference("a", 90, lab.alone(job, threads=1), lab.run([job], prefill_budget=40)["a"]) is None


def toy_lab(forward: Any = toy_forward) -> Lab:
    return Lab(toy_config(), None, None, toy_cache, context=1024, forward=forward)


def nudge(which: str) -> Any:
    """A model with a fault: ``which`` computation changes the last bit of a logit, or what is stored."""

    def forward(weights: Any, ops: Any, batch: Any, cache: Any) -> Any:
        logits = toy_forward(weights, ops, batch, cache)
        rows, sequences = len(batch.token_ids), len(batch.context_lengths)
        if which == "pages" and len(logits):
            logits[0, 9] = np.nextafter(logits[0, 9], np.float32(batch.page_tables[0, 0]))
        if which == "rows" and rows > sequences:
            logits[:, 9] = np.nextafter(logits[:, 9], np.float32(np.inf))
        if which == "neighbours" and sequences > 1:
            logits[:, 9] = np.nextafter(logits[:, 9], np.float32(np.inf))
        if which == "chunks" and batch.positions[0] > 0 and rows > 1:
            cache[batch.page_tables[0, 0], 1] ^= np.uint64(1)
        if which == "decode" and sequences == rows == 1:
            cache[batch.page_tables[0, batch.positions[0] // 16], batch.positions[0] % 16] ^= np.uint64(1)
        return logits

    return forward


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("paged", "pages"), ("paged", "rows"), ("batch", "neighbours"), ("sampling", "neighbours"),
        ("prefill", "chunks"), ("packed", "neighbours"), ("prefix", "decode"),
    ],
)  # fmt: skip
def test_a_fault_is_found(name: str, fault: str) -> None:
    assert any(outcome.difference for outcome in CHECKS[name](toy_lab(nudge(fault)), 1, np.random.default_rng(0)))
    assert not any(outcome.difference for outcome in CHECKS[name](toy_lab(), 1, np.random.default_rng(0)))


def test_a_conversation_that_finds_nothing_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crucible.engine.kv_cache.PrefixCache.publish", lambda *arguments: None)
    outcome = suite.conversation(toy_lab(), np.random.default_rng(0), "turns")
    assert str(outcome.difference) == "request turn1, position 0: 0 of 69 tokens found in the cache"


def rows(*values: list[float]) -> list[Any]:
    return [np.array(value, np.float32) for value in values]


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (Trace(rows([1, 2], [3, 4]), [7, 8], "length"), None),
        (Trace(rows([1, 2]), [7], "cancelled"), None),
        (Trace(rows([1, 2], [3, -4]), [7, 8], "length"),
         "request r, position 5: logit 1 is np.float32(-4.0) (0xc0800000), expected np.float32(4.0) (0x40800000)"),
        (Trace(rows([1, 2], [3, 4]), [6, 8], "length"), "request r, position 5: token 6, expected 7"),
        (Trace(rows([1, 2], [3, 4]), [7, 9], "length"),
         "request r, position 6: tokens [7, 9] end what should be [7, 8]"),
        (Trace(rows([1, 2]), [7], "length"), "request r, position 5: 1 tokens and 'length', expected 2 and 'length'"),
        (Trace(rows([1, 2], [3, 4]), [7, 8], "stop"),
         "request r, position 6: 2 tokens and 'stop', expected 2 and 'length'"),
    ],
)  # fmt: skip
def test_a_difference_says_where(got: Trace, text: str | None) -> None:
    found = difference("r", 5, Trace(rows([1, 2], [3, 4]), [7, 8], "length"), got)
    assert (found and str(found)) == text


def test_equal_numbers_of_other_bits_differ() -> None:
    zero, minus = Trace(rows([0.0]), [0], "length"), Trace(rows([-0.0]), [0], "length")
    assert difference("r", 1, zero, minus) is not None
    nan = Trace(rows([float("nan")]), [0], "length")
    assert difference("r", 1, nan, nan) is None


def test_only_what_can_never_fit_is_refused() -> None:
    lab = toy_lab()
    traces = lab.run([Job("a", (1,) * 30, SHORT), Job("b", (1,) * 29, SHORT)], kv_pages=2)
    assert (traces["a"].reason, traces["b"].reason) == ("refused", "length")
    assert suite.compare(lab, "c", [Job("a", (1,) * 30, SHORT)], traces) == Outcome("c", 1, 0)


@pytest.mark.skipif(gpu_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="device cuda"):
        Lab.load(checkpoint, device="cuda")


def test_the_command_prints_a_table(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(CHECKS) == check_suite.NAMES
    assert main(["check", "sampling", str(checkpoint), "--quant", "f32", "--cases", "1", "--seed", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sampling: model, cpu, f32, context 1024, seed 4"
    assert lines[2].split() == ["0:", "8", "at", "once", "8", "80", "equal"]
    assert lines[-1] == "sampling: 2 cases, 160 rows of logits, all equal"


def test_the_command_fails_on_a_difference(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Outcome("first", 2, 5, Difference("r", 3, "logit 0 is odd"))
    monkeypatch.setitem(CHECKS, "packed", lambda *arguments: iter([Outcome("zeroth", 1, 1), bad]))
    assert main(["check", "packed", str(checkpoint)]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: request r, position 3: logit 0 is odd" in out
    assert "packed: 2 cases, 6 rows of logits, 1 DIFFERENT" in out


def test_an_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "everything"])
    assert caught.value.code == 2
    assert "invalid choice" in capsys.readouterr().err
