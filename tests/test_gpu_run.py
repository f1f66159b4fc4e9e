"""scripts/gpu_run.py without a GPU: what it makes of the commands' output, and the page it writes."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


def fake_run(command: list[str], timeout: int) -> tuple[int, str]:
    if "pytest" in command:
        return 0, "....\n1438 passed, 3 skipped, 900 deselected in 12.34s\n"
    if "validate" in command:
        return 1, VALIDATE
    if "check" in command:
        return 1, CHECK
    path = Path(command[command.index("--json") + 1])
    if "decode" in command:
        rows = [{"quant": "int8", "batch": n, "tok_s": median(2564.2 * n, 1.2), "step_ms": 0.39} for n in (1, 4)]
        path.write_text(json.dumps(bench("decode", rows)))
        return 0, ""
    if command[command.index("--requests") + 1] == "16":
        return 2, "crucible: error: it does not fit\n"
    path.write_text(json.dumps(bench("prefill", [{"tokens": 128, "requests": 1, "tok_s": median(21163, 3)}])))
    return 0, ""


@pytest.fixture
def document(gpu_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(gpu_run, "describe_device", lambda: DEVICE)
    found: dict[str, Any] = gpu_run.measure(list(gpu_run.PARTS), "m", "120m", "abc123", 10, fake_run)
    return found


def test_what_ran_is_counted(document: dict[str, Any]) -> None:
    texts = [(entry["ok"], entry["result"]) for entry in document["results"]]
    assert texts == [
        (True, "1,438 passed, 3 skipped"),
        (False, "4 cases, 1 FAILED"),
        (False, "2 checks, 29 cases, 2,200 rows of logits, 2 cases DIFFERENT"),
        (False, "2 checks, 29 cases, 2,200 rows of logits, 2 cases DIFFERENT"),
        (False, "crucible: error: it does not fit"),
    ]


def test_the_page(gpu_run: ModuleType, document: dict[str, Any]) -> None:
    page = gpu_run.render(json.loads(json.dumps(document)))
    assert "NVIDIA H200 (sm_90, 700.00 W, driver 580.1, CUDA 13.0, CuPy 14.2)" in page
    assert "Commit abc123. Model: 120m." in page
    assert "| `crucible validate`: every kernel | FAILED: 4 cases, 1 FAILED |" in page
    assert "| linear, tensor cores, int8 | 2 | 1.3e-04 | 1.4e-04 |" in page
    assert "| attention_decode | 1 | inf | 9.8e-04 |" in page
    assert "| argmax | 1 | 0.0e+00 | equal |" in page
    assert "| int8 | 4 | 10,257 | 0.39 | 1 % |" in page
    assert page.count("prefill: medians") == 1
    assert page.count("| 128 | 1 | 21,163 | 3 % |") == 2
    assert "| --- | ---: | ---: | ---: | ---: |" in page


def test_a_part_that_breaks_is_a_failed_result(gpu_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(command: list[str], timeout: int) -> tuple[int, str]:
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


def test_parts_can_be_run_one_at_a_time(gpu_run: ModuleType, document: dict[str, Any]) -> None:
    again = gpu_run.measure(["check"], "m", "120m", "abc123", 10, lambda command, timeout: (0, CHECK))
    both = gpu_run.joined(again, document)
    assert [entry["part"] for entry in both["results"]] == ["tests", "validate", "check", "check", "speed"]
    assert all(entry["ok"] for entry in both["results"] if entry["part"] == "check")
    assert both["tables"] == document["tables"]
    with pytest.raises(SystemExit, match="another commit: abc123, now other"):
        gpu_run.joined({**again, "commit": "other"}, document)


def test_a_model_with_random_weights(gpu_run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crucible.checkpoint import open_checkpoint

    path = gpu_run.make_model("smollm2", tmp_path, shrink=15)
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.config.num_layers, checkpoint.config.hidden_size) == (2, 576)


def test_a_command_that_takes_too_long(gpu_run: ModuleType) -> None:
    code, output = gpu_run.run_command(["-c", "import time; time.sleep(30)"], 1)
    assert code == 124
    assert output.endswith("stopped after 1 s\n")
    assert gpu_run.run_command(["-c", "raise SystemExit(3)"], 9) == (3, "")
