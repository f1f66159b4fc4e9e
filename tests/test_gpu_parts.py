"""Speed, accuracy and sanitizer of scripts/gpu_run.py without a GPU: what runs, and how its output is judged."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from crucible.cli import main
from tests.conftest import make_text_checkpoint

SCRIPTS = Path(__file__).parents[1] / "scripts"
TEXTS = [f"{number}.txt" for number in range(20)]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("gpu_parts")
    monkeypatch.setattr(module, "stored_as_int8", lambda model: model.endswith("stored"))
    return module


def context(run: Any, texts: list[str] = TEXTS, models: tuple[str, ...] = ("dir/m",)) -> Any:
    return importlib.import_module("gpu_command").Context(run, "", 9, texts, models)


def test_what_speed_runs(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(command: list[str], timeout: int) -> tuple[int, str]:
        seen.append(" ".join(command[3:-6]))
        return 0, ""

    monkeypatch.setattr(parts, "longest_prompt", lambda model: 1023)
    (found,) = parts.speed(importlib.import_module("gpu_command").Context(noted, "m", 9))["results"]
    assert (found["ok"], found["result"]) == (True, "5 runs, see below")
    assert seen == [
        "decode m --batch 1,4,8,16,32,64,128,256 --sampling greedy --prompt-tokens 128 --steps 128",
        "decode m --batch 1,16,64,256 --sampling greedy,sampled,mixed --prompt-tokens 128 --steps 128",
        "prefill m --requests 1 --tokens 128,512,1023",
        "prefill m --requests 4 --tokens 256",
        "prefill m --requests 16 --tokens 64",
    ]


class Eval:
    """Stands in for ``crucible eval``: nats by weight type (with --against cpu) or kernels, the rest as changed."""

    def __init__(self, **changes: Any) -> None:
        self.nats = {"int8": 3.2151, "f32": 3.2148, "scalar": 3.3, "auto": 3.29995, **changes}
        self.difference = changes.get("difference", "+0.000012 ± 0.000003")
        self.codes: dict[str, int] = changes.get("codes", {})
        self.silent: tuple[str, ...] = changes.get("silent", ())
        self.seen: list[tuple[list[str], dict[str, str]]] = []

    def __call__(self, command: list[str], timeout: int, *, environment: dict[str, str]) -> tuple[int, str]:
        self.seen.append((command, environment))
        quant, gemm = command[command.index("--quant") + 1], environment["CRUCIBLE_GEMM"]
        key = gemm if "--prefill-ctx" in command else quant
        output = "compiling kernels, once\nquant    tokens   nats/token   perplexity   bits/byte   tokens/s\n"
        output += f"{quant:<6}{10220:>9}{self.nats[key]:>13.6f}{24.9:>13.4f}{1.1:>12.6f}{80000.5:>11.1f}\n"
        if "--against" in command:
            output += (
                f"against cpu {quant}: nats/token 3.214900 (difference {self.difference}), largest |Δ| / max |logit| "
                "1.0e-04, top 1 equal at 9,001 of 9,001 decided positions of 10,220\n"
            )
        if key in self.silent:
            return 0, "\n"
        code = self.codes.get(key, 0)
        return code, output if code < 2 else "crucible: error: it does not fit\n"


def found(parts: ModuleType, run: Eval, model: str = "dir/m") -> dict[str, tuple[bool, str]]:
    results = parts.accuracy(context(run, models=(model,)))["results"]
    return {entry["what"].partition(": ")[2]: (entry["ok"], entry["result"]) for entry in results}


CPU = "`crucible eval --against cpu`, {}, 20 texts"
COST, SCALAR = "int8 − f32", "scalar − tensor cores, int8, windows of 256"


def test_accuracy(parts: ModuleType) -> None:
    run = Eval()
    equal = "top 1 equal at 9,001 of 9,001 decided positions of 10,220"
    text = f"+0.000012 ± 0.000003 nats/token over the CPU (bound 0.0001), {equal}"
    assert found(parts, run) == {
        CPU.format("int8"): (True, text),
        CPU.format("f32"): (True, text),
        COST: (True, "+0.000300 nats/token (bound 0.002)"),
        SCALAR: (True, "+0.000050 nats/token (bound 0.0001)"),
    }
    common = ["-m", "crucible.cli", "eval", "dir/m", "--data", *TEXTS, "--tokens", "512", "--device", "cuda", "--quant"]
    auto, scalar = {"CRUCIBLE_GEMM": "auto"}, {"CRUCIBLE_GEMM": "scalar"}
    assert run.seen == [
        ([*common, "int8", "--against", "cpu"], auto),
        ([*common, "f32", "--against", "cpu"], auto),
        ([*common, "int8", "--prefill-ctx", "256"], scalar),
        ([*common, "int8", "--prefill-ctx", "256"], auto),
    ]
    (table,) = parts.accuracy(context(run))["tables"]
    assert table["rows"][1] == ["m", "f32", "10,220", "3.214800", "3.214900", "+0.000012 ± 0.000003", equal]


@pytest.mark.parametrize(
    ("changes", "what", "result"),
    [
        ({"difference": "+0.000101 ± 0.000003"}, CPU.format("int8"), r"\+0\.000101 ± .*"),
        ({"difference": "-0.000101 ± 0.000003"}, CPU.format("f32"), r"-0\.000101 ± .*"),
        ({"difference": "+nan ± nan"}, CPU.format("int8"), r"\+nan ± .*"),
        ({"codes": {"f32": 1}}, CPU.format("f32"), r"\+0\.000012 ± .*"),  # another choice at a decided position
        ({"silent": ["int8"]}, CPU.format("int8"), "no output"),
        ({"silent": ["scalar"]}, "`crucible eval --prefill-ctx 256`, CRUCIBLE_GEMM=scalar", "no output"),
        ({"codes": {"int8": 2}}, CPU.format("int8"), "crucible: error: it does not fit"),
        ({"int8": 3.216801}, COST, r"\+0\.002001 .*"),
        ({"int8": float("nan")}, COST, r"\+nan .*"),
        ({"scalar": 3.300051}, SCALAR, r"\+0\.000101 .*"),
        ({"scalar": 3.299849}, SCALAR, r"-0\.000101 .*"),
        ({"codes": {"auto": 124}}, "`crucible eval --prefill-ctx 256`, CRUCIBLE_GEMM=auto", "crucible: error: .*"),
        ({"codes": {"scalar": 1}}, "`crucible eval --prefill-ctx 256`, CRUCIBLE_GEMM=scalar", "int8 .*"),
    ],
)
def test_what_accuracy_fails_for(parts: ModuleType, changes: dict[str, Any], what: str, result: str) -> None:
    results = found(parts, Eval(**changes))
    fine, text = results[what]
    assert not fine
    assert re.fullmatch(result, text)
    wrong = [name for name, (ok, _) in results.items() if not ok]
    assert wrong == ([CPU.format("int8"), CPU.format("f32")] if "difference" in changes else [what])


def test_bounds_hold_what_lies_on_them(parts: ModuleType) -> None:
    run = Eval(int8=3.2168, scalar=3.30005, difference="-0.000100 ± 0.000003")
    assert all(fine for fine, _ in found(parts, run).values())
    assert found(parts, Eval(int8=3.0))[COST] == (True, "-0.214800 nats/token (bound 0.002)")  # better is no fault


def test_int8_as_stored_is_reported_and_not_judged(parts: ModuleType) -> None:
    results = found(parts, Eval(int8=3.9), "dir/stored")
    assert results[f"{COST}, of a model stored as int8: its own dequantised weights"] == (True, "+0.685200 nats/token")


def test_what_eval_really_prints(
    parts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_text_checkpoint(tmp_path / "m", context_length=256)
    texts = [str(tmp_path / text) for text in TEXTS]
    for number, text in enumerate(texts):
        Path(text).write_text(f"{number} men and women, merely players")

    def on_the_cpu(command: list[str], timeout: int, *, environment: dict[str, str]) -> tuple[int, str]:
        code = main(["cpu" if word == "cuda" else word for word in command[2:]])
        return code, capsys.readouterr().out

    document = parts.accuracy(context(on_the_cpu, texts, (str(model),)))
    same = r"[+-]0\.000000 ± 0\.000000 nats/token over the CPU \(bound 0\.0001\), top 1 equal at ([\d,]+) of \1 .*"
    for entry, pattern in zip(document["results"], (same, same, r"[+-]0\.\d+ nats.*", r"\+0\.000000 .*"), strict=True):
        assert re.fullmatch(pattern, entry["result"]), entry
    assert [row[1] for row in document["tables"][0]["rows"]] == ["int8", "f32"]


def test_what_accuracy_needs(parts: ModuleType) -> None:
    def refused(*arguments: Any) -> str:
        (entry,) = parts.accuracy(context(None, *arguments))["results"]
        assert not entry["ok"]
        return str(entry["result"])

    assert refused([]) == "no --text"
    assert refused(TEXTS, ()) == "no --accuracy-model or --model"
    assert refused(TEXTS[1:]) == "--text names 19 texts, at least 20 are needed"


def test_a_model_that_is_not_there_leaves_the_others(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(model: str) -> bool:
        if model == "absent":
            raise OSError("no such model")
        return False

    monkeypatch.setattr(parts, "stored_as_int8", stored)
    document = parts.accuracy(context(Eval(), models=("absent", "a", "b")))
    texts = [(entry["what"], entry["result"]) for entry in document["results"] if not entry["ok"]]
    assert texts == [("accuracy of absent", "OSError: no such model")]
    assert len(document["results"]) == 1 + 2 * 4
    (table,) = document["tables"]
    assert [row[:2] for row in table["rows"]] == [["a", "int8"], ["a", "f32"], ["b", "int8"], ["b", "f32"]]


PYTEST = "..........\n138 passed, 2 skipped, 9 deselected in 99.12s (0:01:39)\n"
MEMORY = "========= ERROR SUMMARY: {} errors\n"
RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("memcheck", "racecheck", "expected"),
    [
        (
            (0, PYTEST + MEMORY.format(0)),
            (0, PYTEST + RACES),
            [(True, "ERROR SUMMARY: 0 errors; 138 passed, 2 skipped"),
             (True, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings); 138 passed, 2 skipped")],
        ),
        ((9, PYTEST + MEMORY.format(3)), (0, "nothing\n"), [(False, "ERROR SUMMARY: 3 errors; 138 passed, 2 skipped"),
                                                            (False, "nothing")]),
    ],
)  # fmt: skip
def test_the_sanitizer(
    parts: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    memcheck: tuple[int, str],
    racecheck: tuple[int, str],
    expected: list[tuple[bool, str]],
) -> None:
    seen = []

    def run(command: list[str], timeout: int, *, under: list[str]) -> tuple[int, str]:
        seen.append(" ".join([*under, *command]))
        return memcheck if "memcheck" in under else racecheck

    monkeypatch.setattr(parts.shutil, "which", lambda name: f"/usr/bin/{name}")
    results = parts.sanitizer(context(run))["results"]
    assert [(entry["ok"], entry["result"]) for entry in results] == expected
    tail = "--error-exitcode 9 -m pytest -q -m gpu -o timeout=0 tests/kernels/cuda"
    assert seen == [
        f"compute-sanitizer --tool memcheck --report-api-errors no {tail}",
        f"compute-sanitizer --tool racecheck {tail}",
    ]


def test_no_sanitizer_is_no_fault(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts.shutil, "which", lambda name: None)
    results = parts.sanitizer(context(None))["results"]
    assert [(entry["ok"], entry["result"]) for entry in results] == [(True, "not on this machine")] * 2
