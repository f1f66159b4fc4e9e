"""scripts/gpu_run.py without a GPU: what it makes of the commands' output, and the page it writes."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from crucible.checkpoint import open_checkpoint
from crucible.cli import main
from crucible.model_text import ModelText
from tests.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[1]
DEVICE = {
    "name": "NVIDIA H200",
    "arch": 90,
    "power_limit_w": "700.00",
    "driver": "580.1",
    "cuda": "13.0",
    "cupy": "14.2",
}


@pytest.fixture(scope="module")
def gpu_run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "scripts" / "gpu_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return module


VALIDATE = """\
validate: NVIDIA H200 against reference; error is max |difference| / max |value|
  case kernel                                  input                                 error    bound  verdict
     0 linear_small8_int8_store                120m 1 rows                         5.7e-05  1.4e-04  ok
     1 linear_big64_int8_qkv                   odd 64 rows                         1.3e-04  1.4e-04  ok
     2 attention_decode_64                     12/3x64 1@0                             inf  9.8e-04  FAILED: output 0: x
     3 argmax                                  97 ids                              0.0e+00  0.0e+00  ok
validate: 4 cases, 1 FAILED
"""
CHECK = """\
paged: m, cuda, int8, context 600, seed 0
  1 tokens, without a cache      1      4  equal
paged: 20 cases, 1500 rows of logits, all equal
graphs: 9 cases, 700 rows of logits, 2 DIFFERENT
"""


def bench(mode: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"mode": mode, "trials": 3, "tables": [{"title": "t", "rows": rows}]}


def median(value: float, spread: float) -> dict[str, float]:
    return {"median": value, "spread_percent": spread}


def fake_run(command: list[str], timeout: int, **_: Any) -> tuple[int, str]:
    if "pytest" in command:
        return 0, "....\n1438 passed, 3 skipped, 900 deselected in 12.34s\n"
    if "validate" in command:
        return 1, VALIDATE
    if "check" in command:
        return 1, CHECK
    path = Path(command[command.index("--json") + 1])
    if "decode" in command:
        kinds = command[command.index("--sampling") + 1].split(",")
        rows = [
            {"quant": "int8", "batch": n, "sampling": kind, "tok_s": median(2564.2 * n, 1.2), "step_ms": 0.39,
             "bytes": median(4 * n, 0)}
            for n in (1, 4) for kind in kinds
        ]  # fmt: skip
        path.write_text(json.dumps(bench("decode", rows)))
        return 0, ""
    if command[command.index("--requests") + 1] == "16":
        return 2, "crucible: error: it does not fit\n"
    report = bench("prefill", [{"tokens": 128, "requests": 1, "tok_s": median(21163, 3)}])
    report["tables"].append({"rows": [{"tokens": 128, "requests": 1, "way": "engine, eager", "step_us": median(9, 1)}]})
    path.write_text(json.dumps(report))
    return 0, ""


def no_server(*_: Any) -> None:
    raise RuntimeError("no GPU here")


@pytest.fixture
def document(gpu_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(gpu_run, "describe_device", lambda: DEVICE)
    monkeypatch.setattr(sys.modules["gpu_parts"], "longest_prompt", lambda model: 2047)
    monkeypatch.setattr(sys.modules["gpu_parts"].shutil, "which", lambda name: None)
    monkeypatch.setattr(sys.modules["gpu_serving"], "Server", no_server)
    found: dict[str, Any] = gpu_run.measure(list(gpu_run.PARTS), "m", "120m", "abc123", 10, fake_run)
    return found


def test_what_ran_is_counted(document: dict[str, Any]) -> None:
    texts = [(entry["ok"], entry["result"]) for entry in document["results"]]
    assert texts == [
        (True, "1,438 passed, 3 skipped"),
        (False, "4 cases, 1 FAILED"),
        *[(False, "2 checks, 29 cases, 1 sequences, 2,200 rows of logits, 2 cases DIFFERENT")] * 3,
        (False, "crucible: error: it does not fit"),
        (False, "no --text"),
        (False, "RuntimeError: no GPU here"),
        (True, "not on this machine"),
        (True, "not on this machine"),
    ]


def test_the_page(gpu_run: ModuleType, document: dict[str, Any]) -> None:
    page = gpu_run.render(json.loads(json.dumps(document)))
    assert "NVIDIA H200 (sm_90, 700.00 W, driver 580.1, CUDA 13.0, CuPy 14.2)" in page
    assert "Commit abc123. Model: 120m." in page
    assert "| `crucible validate`: every kernel | FAILED: 4 cases, 1 FAILED |" in page
    assert "| linear, tensor cores, int8 | 2 | 1.3e-04 | 1.4e-04 |" in page
    assert "| attention_decode | 1 | inf | 9.8e-04 |" in page
    assert "| argmax | 1 | 0.0e+00 | equal |" in page
    assert "| int8 | 4 | greedy | 10,257 | 0.39 | 16 | 1 % | 3,056 | 5,140 |  |" in page  # and no figure of vLLM
    assert "| spread | earlier implementation (another GPU) | llama.cpp Q8_0 | vLLM 0.25.1 bf16 |" in page
    assert [line for line in page.splitlines() if line.startswith("| int8 | 4 | mixed")] == [
        "| int8 | 4 | mixed | 10,257 | 0.39 | 16 | 1 % |"
    ]
    assert page.count("decode by sampling: medians of 3 trials") == page.count("prefill: medians of 3 trials") == 1
    assert page.count("| 128 | 1 | 21,163 | 3 % |  | 75,149 |  |") == 2
    assert page.count("prefill step by step: medians") == 1
    assert "| 128 | 1 | engine, eager | 9 |  |" in page
    assert "| --- | ---: | --- | ---: | ---: | ---: |" in page
    (note,) = (line for line in page.splitlines() if line.startswith("Tokens a second of other"))
    assert "None was measured in the same run" in note
    assert "llama.cpp: 0.3.36" in note
    assert "NVIDIA H200, 700 W" in note
    assert "a laptop-class sm_120 GPU" in note


def test_what_stands_beside_a_table(gpu_run: ModuleType) -> None:
    beside = sys.modules["gpu_report"].beside
    old = {"title": "decode: medians", "columns": ["batch", "tokens/s"], "rows": [["16", "5"], ["256", "9"]]}
    assert beside(old)[1] == [["16", "5", "8,366", "10,258", "7,334"], ["256", "9", "", "", ""]]
    columns = ["tokens", "requests", "tokens/s"]
    rows = [["1,024", "1", "5"], ["512", "1", "5"], ["512", "4", "5"]]
    _, rows = beside({"title": "prefill: medians", "columns": columns, "rows": rows})
    assert [row[3:] for row in rows] == [["", "130,221", ""], ["39,700", "119,677", "57,937"], ["", "", ""]]
    columns, rows = ["batch", "sampling", "tokens/s"], [["1", "sampled", "5"], ["1", "greedy", "5"]]
    _, rows = beside({"title": "decode: medians", "columns": columns, "rows": rows})
    assert [row[3:] for row in rows] == [["", "", ""], ["1,618", "1,952", "435"]]
    other = {"title": "Largest errors", "columns": ["batch"], "rows": [["1"]]}
    assert beside(other) == (["batch"], [["1"]])


@pytest.mark.parametrize(("model", "said"), [("smollm2", False), ("120m", True)])
def test_others_stand_beside_their_own_model(
    gpu_run: ModuleType, document: dict[str, Any], model: str, said: bool
) -> None:
    page = gpu_run.render({**document, "model": model})
    assert ("| llama.cpp Q8_0 |" in page) == ("None was measured in the same run" in page) == said


def test_a_part_that_breaks_is_a_failed_result(gpu_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(command: list[str], timeout: int, **_: Any) -> tuple[int, str]:
        raise OSError("no such thing")

    monkeypatch.setattr(gpu_run, "describe_device", lambda: DEVICE)
    found = gpu_run.measure(["tests", "validate"], "m", "m", None, 10, broken)
    assert [(entry["what"], entry["result"], entry["ok"]) for entry in found["results"]] == [
        ("tests", "OSError: no such thing", False),
        ("validate", "OSError: no such thing", False),
    ]


def test_todays_page_can_be_written_so(gpu_run: ModuleType) -> None:
    """Every table of docs/gpu-runs.md is one of results or tables, and comes out again."""
    lines = (ROOT / "docs" / "gpu-runs.md").read_text(encoding="utf-8").splitlines()
    blocks: list[list[list[str]]] = [[]]
    for line in lines:
        if line.startswith("|"):
            blocks[-1].append([part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif blocks[-1]:
            blocks.append([])
    for columns, _, *rows in (block for block in blocks if block):
        table = sys.modules["gpu_report"].markdown_table(columns, rows)
        assert [[part.strip() for part in line.split("|")[1:-1]] for line in table] == [
            columns,
            table_rule(table),
            *rows,
        ]


def table_rule(table: list[str]) -> list[str]:
    return [part.strip() for part in table[1].split("|")[1:-1]]


def test_the_script_writes_both_files(
    gpu_run: ModuleType, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, page = tmp_path / "g.json", tmp_path / "g.md"
    monkeypatch.setattr(gpu_run, "describe_device", lambda: DEVICE)
    monkeypatch.setattr(gpu_run, "run_command", fake_run)
    arguments = ["--json", str(data), "--markdown", str(page), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["gpu_run", "--only", "tests", *arguments])
    assert gpu_run.main() == 0
    assert json.loads(data.read_text())["commit"] == "abc"
    first = page.read_text()
    page.unlink()
    monkeypatch.setattr(sys, "argv", ["gpu_run", "--render", *arguments])
    assert gpu_run.main() == 0
    assert page.read_text() == first
    monkeypatch.setattr(gpu_run, "measure", None)  # what cannot be added is refused before it is measured
    monkeypatch.setattr(sys, "argv", ["gpu_run", "--only", "tests", "--add", *arguments[:-1], "other"])
    with pytest.raises(SystemExit, match="another commit: abc, now other"):
        gpu_run.main()


def test_parts_can_be_run_one_at_a_time(gpu_run: ModuleType, document: dict[str, Any]) -> None:
    again = gpu_run.measure(["check"], "m", "120m", "abc123", 10, lambda command, timeout: (0, CHECK))
    both = gpu_run.joined(again, document)
    parts = list(dict.fromkeys(entry["part"] for entry in both["results"]))
    assert parts == ["tests", "validate", "check", "speed", "accuracy", "serve", "sanitizer"]
    assert all(entry["ok"] for entry in both["results"] if entry["part"] == "check")
    assert both["tables"] == document["tables"]
    with pytest.raises(SystemExit, match="another commit: abc123, now other"):
        gpu_run.joined({**again, "commit": "other"}, document)


def test_a_model_with_random_weights(gpu_run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gpu_run.make_model("smollm2", tmp_path, shrink=15)
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 576, 49152 // 15)
    tokenizer = ModelText(path, config).required()  # it is this model's
    assert tokenizer.token_count == 49152 // 15
    assert tokenizer.decode(tokenizer.encode("and the naïve")) == "and the naïve"
    assert gpu_run.gpt2(50304)[0] == 50257
    few = gpu_run.gpt2(300)
    monkeypatch.setattr(gpu_run, "gpt2", lambda most: few)
    path = gpu_run.make_model("smollm2", tmp_path / "few", shrink=15)  # rows of the vocabulary without a token
    with open_checkpoint(path) as checkpoint:
        assert ModelText(path, checkpoint.config).required().token_count == checkpoint.config.token_count == 300
    parts = sys.modules["gpu_parts"]
    assert parts.longest_prompt(str(path)) == 2047
    assert not parts.stored_as_int8(str(path))
    assert main(["quantize", str(make_checkpoint(tmp_path / "float")), str(tmp_path / "int8")]) == 0
    assert parts.stored_as_int8(str(tmp_path / "int8"))


def test_a_command_that_takes_too_long(gpu_run: ModuleType) -> None:
    code, output = gpu_run.run_command(["-c", "import time; time.sleep(30)"], 1)
    assert code == 124
    assert output.endswith("stopped after 1 s\n")
    assert gpu_run.run_command(["-c", "raise SystemExit(3)"], 9) == (3, "")
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(30)'])"
    started = time.monotonic()
    assert gpu_run.run_command(["-c", child], 1)[0] == 124  # though the child holds the pipe
    assert gpu_run.run_command(["-c", child.replace(".run(", ".Popen(")], 1)[0] == 124  # and its parent is gone
    assert time.monotonic() - started < 10


def test_a_command_under_another_program_and_with_an_environment(gpu_run: ModuleType) -> None:
    code, output = gpu_run.run_command(
        ["-c", "import os; print(os.environ['A'], os.environ['B'])"], 9, under=["env", "A=1"], environment={"B": "2"}
    )
    assert (code, output) == (0, "1 2\n")


def test_which_parts_run(gpu_run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(parts: list[str], model: str, *_: Any, **given: Any) -> dict[str, Any]:
        seen.append((parts, model, given["texts"], given["accuracy_models"]))
        return {"date": "2030-01-01", "model": "m", "device": DEVICE, "results": []}

    monkeypatch.setattr(gpu_run, "describe_device", lambda: DEVICE)
    monkeypatch.setattr(gpu_run, "measure", noted)
    monkeypatch.chdir(tmp_path)
    for name in ("m", "x"):
        shutil.copytree(ROOT / "crucible" / "data" / "model", name)
    names = [f"{i}.txt" for i in range(20)]
    for name in names:
        Path(name).write_text("text")
    texts = [str(tmp_path / name) for name in names]
    files = ["--json", "g.json", "--markdown", "g.md"]
    for words in (
        ["--model", "m"],
        ["--only", "accuracy", "--text", *names, "--accuracy-model", "x", "m"],
        ["--only", "accuracy", "--text", *names, "--model", "m"],
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_run", *words, *files])
        assert gpu_run.main() == 0
    m = str(tmp_path / "m")
    assert seen == [
        (["tests", "validate", "check", "speed", "serve", "sanitizer"], m, [], [m]),
        (["accuracy"], "", texts, [str(tmp_path / "x"), m]),
        (["accuracy"], m, texts, [m]),
    ]


@pytest.mark.parametrize(("words", "message"), [
    (["--only", "test"], "--only knows tests, validate"),
    (["--only", "tests,check,tests"], "--only names a part twice"),
    (["--timeout", "0"], "--timeout must be at least 1 second, got 0"),
    (["--only", "accuracy", "--model", "."], "--text with at least 20 files, got 0"),
    (["--text", "a.txt"], "are for accuracy, which --only does not name"),
    (["--only", "accuracy", "--text", *["page"] * 20], "accuracy needs --accuracy-model, or --model"),
    (["--only", "accuracy", "--text", *["absent"] * 20, "--model", "."], "--text: absent is no file"),
    (["--model", "absent"], "absent"),
    (["--render", "--json", "absent.json"], "absent.json: No such file"),
    (["--render", "--json", "page"], "page is no record of a run (JSONDecodeError"),
    (["--render", "--json", "empty.json"], "empty.json is no record of a run (KeyError: 'device')"),
])  # fmt: skip
def test_what_cannot_run_leaves_the_record_alone(
    words: list[str],
    message: str,
    gpu_run: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page").write_text("as it was")
    Path("empty.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["gpu_run", "--json", "page", "--markdown", "page", *words])
    with pytest.raises(SystemExit) as leaving:
        gpu_run.main()
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err
    assert Path("page").read_text() == "as it was"
