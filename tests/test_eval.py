"""``crucible eval``: several texts, what a weight type costs, and the comparison with the CPU."""

from __future__ import annotations

import io
import re
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from crucible.cli import main
from crucible.commands.comparison import Comparison
from crucible.commands.paired_difference import PairedDifference
from crucible.commands.session import HEAD_ROWS, Session
from crucible.model.ops import FloatArray
from tests.conftest import make_text_checkpoint

AGAINST_ITSELF = ("--device", "cpu", "--against", "cpu")

AGAINST = re.compile(
    r"against cpu (?P<kind>[^:]+): nats/token (?P<nats>\S+) \(difference (?P<mean>\S+) ± (?P<error>\S+)\), "
    r"largest \|Δ\| / max \|logit\| (?P<share>\S+), "
    r"top 1 equal at (?P<equal>[\d,]+) of (?P<decided>[\d,]+) decided positions of (?P<positions>[\d,]+)"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of 300 and 90 bytes, a token each."""
    directory = tmp_path_factory.mktemp("texts")
    line = "All the world's a stage, and all the men and women merely players; they have their exits. "
    contents = {"long.txt": (line * 4)[:300], "short.txt": line[::-1][:90]}
    for name, text in contents.items():
        (directory / name).write_text(text)
    return [directory / name for name in contents]


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> list[str]:
    assert main(["eval", *map(str, arguments)]) == code
    return capsys.readouterr().out.splitlines()


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of an error."""
    try:
        code = main(["eval", *map(str, arguments)])
    except SystemExit as leaving:  # argparse
        code = cast(int, leaving.code)
    assert code == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (out, line.startswith("crucible: error: ")) == ("", True)
    return line


def comparison_in(line: str) -> dict[str, str]:
    found = AGAINST.fullmatch(line)
    assert found is not None, line
    return found.groupdict()


def plant(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """``change(rows, first)`` alters the logits of the positions ``first`` … of a window on the CPU's side only."""
    rows = Session.rows

    def changed(self: Session, tokens: Sequence[int], start: int = 0) -> FloatArray:
        found = rows(self, tokens, start)
        change(found, start)
        return found

    monkeypatch.setattr(Session, "rows", changed)


def test_several_texts_are_scored_each_on_its_own(
    tiny_checkpoint: Path, texts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def row(*arguments: object) -> list[float]:
        titles, line = lines_of(capsys, tiny_checkpoint, "--context", 64, *arguments)
        assert titles.split() == ["quant", "tokens", "nats/token", "perplexity", "bits/byte", "tokens/s"]
        return [float(value) for value in line.split()[1:5]]

    long, short = texts
    apart = [row("--data", long, "--tokens", 200), row("--data", short)]
    together = row("--data", long, short, "--tokens", 200)  # the short one has only 90
    tokens = [200 - 1, 90 - 1]
    assert [values[0] for values in apart] == tokens
    assert together[0] == sum(tokens)
    mean = np.average([values[1] for values in apart], weights=tokens)
    assert together[1] == pytest.approx(mean, abs=2e-6)
    assert together[3] == pytest.approx(mean / np.log(2), abs=3e-6)  # a token is a byte


def test_bad_arguments_are_one_line(
    tiny_checkpoint: Path,
    texts: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    long, short = texts
    empty, alone = tmp_path / "empty.txt", (tiny_checkpoint, "--data", short)
    empty.write_text("")
    assert "has only 90 tokens, fewer than --tokens 91" in refusal(capsys, *alone, "--tokens", 91)
    assert f"{empty} has 0 tokens" in refusal(capsys, tiny_checkpoint, "--data", long, empty)
    assert "absent.txt" in refusal(capsys, tiny_checkpoint, "--data", long, tmp_path / "absent.txt")
    assert "expected at least one argument" in refusal(capsys, tiny_checkpoint, "--data")
    assert "--against" in refusal(capsys, *alone, "--against", "cuda")
    assert "f16 needs device cuda" in refusal(capsys, *alone, "--quant", "f32,f16", "--device", "cpu")
    assert "names a weight type twice: f32,f32" in refusal(capsys, *alone, "--quant", "f32,f32")
    monkeypatch.setattr("crucible.kernels.device.gpu_available", lambda: False)
    assert "would compare the CPU with itself" in refusal(capsys, *alone, "--against", "cpu")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello, Hello")))
    assert "standard input (-) twice" in refusal(capsys, tiny_checkpoint, "--data", "-", "-")


def test_a_later_weight_type_shows_what_it_costs_over_the_first(
    tiny_checkpoint: Path, texts: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = (tiny_checkpoint, "--context", 128, "--tokens", 128, "--data", texts[0])
    titles, first, later = lines_of(capsys, *command, "--quant", "f32,int8")
    assert titles.endswith("tokens/s  over f32")
    assert len(first.split()) == 6
    scores = {}
    for quant in ("f32", "int8"):
        scores[quant] = Session(tiny_checkpoint, quant=quant, context=128).score(list(texts[0].read_bytes()[:128]))
    deltas = scores["f32"] - scores["int8"]  # log-probabilities: nats with the other sign
    error = np.sqrt(((deltas - deltas.mean()) ** 2).sum() / (126 * 127))
    assert later.endswith(f"  {deltas.mean():+.6f} ± {error:.6f}")
    assert abs(deltas.mean()) > 1e-5 < error


def test_a_paired_difference() -> None:
    ours, theirs = np.array([1.0, 2.0, 6.0, 3.0]), np.array([0.0, 0.0, 5.0, 1.0])
    found = PairedDifference.of(ours, theirs)  # of 1, 2, 1, 2: variance 1/3
    assert (found.mean, found.error) == (1.5, pytest.approx(np.sqrt(1 / 3 / 4)))
    assert str(found) == "+1.500000 ± 0.288675"
    with warnings.catch_warnings(action="error"):
        assert str(PairedDifference.of(theirs[:1], ours[:1])) == "-1.000000 ± nan"


@pytest.mark.parametrize("window", [("--context", 100), ("--prefill-ctx", 100), ("--context", 9)])
def test_the_cpu_against_itself_differs_by_nothing(
    window: tuple[object, ...],
    tiny_checkpoint: Path,
    texts: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("crucible.commands.session.CHUNK_TOKENS", 40)  # a window of 100 takes three
    command = (tiny_checkpoint, *window, "--quant", "f32,int8", *AGAINST_ITSELF, "--data", *texts)
    _, f32, against_f32, int8, against_int8 = lines_of(capsys, *command)
    for kind, line, against in (("f32", f32, against_f32), ("int8", int8, against_int8)):
        found = comparison_in(against)
        assert (found["kind"], found["nats"]) == (kind, line.split()[2])
        assert (found["mean"], found["error"], found["share"]) == ("+0.000000", "0.000000", "0.0e+00")
        assert found["positions"] == line.split()[1] == "388"
        assert found["equal"] == found["decided"]
        assert int(found["decided"]) > 300


def test_another_choice_at_a_decided_position_is_exit_code_1(
    tiny_checkpoint: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(rows: FloatArray, first: int) -> None:
        if first <= 70 < first + len(rows):
            rows[70 - first, 33] = 2 * np.abs(rows[70 - first]).max()

    plant(monkeypatch, change)
    command = (tiny_checkpoint, "--context", 100, *AGAINST_ITSELF, "--quant", "f32,int8", "--data", *texts)
    assert main(["eval", *map(str, command)]) == 1
    out, err = capsys.readouterr()
    for quant, line, fault in zip(("f32", "int8"), out.splitlines()[2::2], err.splitlines(), strict=True):
        found = comparison_in(line)
        decided, equal = int(found["decided"]), int(found["equal"])
        assert decided - equal == 4  # position 70 of three windows of the long text (0, 99, 198 …) and of the short one
        assert fault == (
            f"DIFFERENT: {quant} on cpu and {quant} on cpu choose different tokens at 4 of {decided} decided "
            f"positions, first at position 70 of {texts[0]}"
        )
        assert float(found["mean"]) < 0 < float(found["error"])  # the planted logit made every token less likely


def test_a_fault_is_named_by_its_place_in_the_text(
    tiny_checkpoint: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = []

    def change(rows: FloatArray, first: int) -> None:
        windows.append(first)
        if len(windows) == 3:
            rows[5, 33] = 2 * np.abs(rows[5]).max()

    plant(monkeypatch, change)
    command = ("eval", tiny_checkpoint, "--context", 50, *AGAINST_ITSELF, "--data", *texts)
    assert main([str(argument) for argument in command]) == 1
    assert capsys.readouterr().err.endswith(f"first at position {2 * 49 + 5} of {texts[0]}\n")


def test_a_difference_within_rounding_is_reported_and_no_fault(
    tiny_checkpoint: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(rows: FloatArray, first: int) -> None:
        rows *= np.float32(1 + 2e-5)

    plant(monkeypatch, change)
    _, line, against = lines_of(capsys, tiny_checkpoint, *AGAINST_ITSELF, "--quant", "f32", "--data", *texts)
    found = comparison_in(against)
    assert found["share"] == "2.0e-05"
    assert found["equal"] == found["decided"]
    apart = float(line.split()[2]) - float(found["nats"])
    assert float(found["mean"]) == pytest.approx(apart, abs=2e-6)
    assert apart != 0
    assert capsys.readouterr().err == ""


def compared(ours: Any, theirs: Any, *, quant: str = "f32") -> tuple[Comparison, dict[str, str]]:
    """A Comparison that has seen these rows of logits [n, 5], the last of which is padding."""
    given, reference = np.array(ours, np.float32), np.array(theirs, np.float32)
    rows = SimpleNamespace(config=SimpleNamespace(token_count=4), rows=lambda tokens, start: reference)
    comparison = Comparison(cast(Session, rows), device="cuda", quant=quant)
    comparison.watch([0] * (len(given) + 1), "a.txt", 40)(0, given)
    return comparison, comparison_in(comparison.line(np.zeros(len(given))))


def test_only_choices_that_rounding_cannot_turn_are_decided() -> None:
    theirs = [[8, 7.993, 0, 0, 0], [8, 7.9, 0, 0, 0], [8, 8, 1, 1, 0], [8, 1, 1, 1, 0]]
    ours = [[7.99, 7.993, 0, 0, 9], [7.8, 7.9, 0, 0, 9], [7.9, 8, 1, 1, 9], [8, 1, 1, 1, 9]]
    comparison, found = compared(ours, theirs)  # decided from 10 · 1e-4 · 8 = 0.008 on
    assert (found["equal"], found["decided"], found["positions"]) == ("1", "2", "4")
    assert found["share"] == "2.5e-02"  # padding counts for nothing
    assert comparison.fault is not None
    assert comparison.fault.endswith("at 1 of 2 decided positions, first at position 41 of a.txt")
    comparison, found = compared(ours[::2], theirs[::2])
    assert (found["decided"], comparison.fault) == ("0", None)
    comparison, found = compared(ours[:2], theirs[:2], quant="f16")  # from 0.08 on
    assert (found["kind"], found["decided"]) == ("f32 instead of f16", "1")
    assert compared([[8, 7.95, 0, 0, 0]], [[8, 7.95, 0, 0, 0]], quant="int8")[1]["decided"] == "0"
    assert comparison.fault is not None
    assert comparison.fault.startswith("DIFFERENT: f16 on cuda and f32 on cpu choose")


def test_logits_that_are_all_zero_on_the_cpu() -> None:
    assert compared([[0] * 5], [[0] * 5])[1]["share"] == "0.0e+00"
    assert compared([[1] * 5], [[0] * 5])[1]["share"] == "inf"
    assert compared([[0] * 5, [4, 1, 1, 1, 1]], [[0] * 5, [5, 1, 1, 1, 1]])[1]["share"] == "2.0e-01"


def test_the_comparison_holds_few_rows_and_takes_none_of_the_measured_time(
    tiny_checkpoint: Path, texts: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []

    def change(rows: FloatArray, first: int) -> None:
        sizes.append(len(rows))
        time.sleep(0.4)

    plant(monkeypatch, change)
    command = (tiny_checkpoint, "--prefill-ctx", 128, "--tokens", 128, *AGAINST_ITSELF, "--data", texts[0])
    _, line, _ = lines_of(capsys, *command)
    assert sizes == [HEAD_ROWS, 127 - HEAD_ROWS]
    assert float(line.split()[5]) > 127 / 0.8


@pytest.mark.parametrize(
    ("quant", "kind", "bound"), [("f32", "f32", 1e-5), ("int8", "int8", 5e-3), ("f16", "f32 instead of f16", 5e-3)]
)
def test_a_gpu_against_the_cpu(
    quant: str,
    kind: str,
    bound: float,
    texts: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.kernels.cuda.stand_in import StandIn

    monkeypatch.setattr("crucible.kernels.device.CudaDevice", StandIn)
    sizes = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "hidden_size": 64, "num_layers": 1}
    model = make_text_checkpoint(tmp_path / "model", **sizes)
    command = (model, "--context", 80, "--tokens", 100, "--data", texts[0], "--device", "cuda", "--against", "cpu")
    _, line, against = lines_of(capsys, *command, "--quant", quant)
    found = comparison_in(against)
    assert found["kind"] == kind
    assert 0 < float(found["share"]) < bound
    assert found["positions"] == line.split()[1] == "99"
    assert found["equal"] == found["decided"]
    assert int(found["decided"]) > 60
    assert abs(float(line.split()[2]) - float(found["nats"]) - float(found["mean"])) < 2e-6
