"""The modes that need no server, on a tiny model; and that the documentation names every column."""

from __future__ import annotations

import importlib
import json
import pkgutil
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import crucible.bench
from crucible.bench.decode import PARAMS
from crucible.bench.inprocess import Driver
from crucible.bench.report import Column
from crucible.bench.scheduler import make_core
from crucible.bench.stall import split
from crucible.choices import SAMPLINGS
from crucible.cli import build_parser, main
from crucible.config import SamplingParams
from crucible.engine.core import EngineCore
from crucible.errors import EngineError

ROOT = Path(__file__).parent.parent.parent


def bench(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    path = tmp_path / "out.json"
    assert main(["bench", *map(str, arguments), "--json", str(path)]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_decode(tmp_path: Path, tiny_checkpoint: Path) -> None:
    arguments = ("--batch", "1,3", "--prompt-tokens", "5,20", "--steps", "4", "--trials", "3", "--threads", "1")
    document = bench(tmp_path, "decode", tiny_checkpoint, *arguments, "--quant", "f32", "--vs-quant", "int8")
    decode, against = document["tables"]
    assert [(row["quant"], row["batch"]) for row in decode["rows"]] == [
        ("f32", 1),
        ("int8", 1),
        ("f32", 3),
        ("int8", 3),
    ]
    for row in decode["rows"]:
        assert len(row["tok_s"]["values"]) == 3
        assert row["per_request"]["median"] == pytest.approx(row["tok_s"]["median"] / row["batch"])
        assert row["step_ms"]["median"] > 0
    for row in decode["rows"][:2]:  # each weight type against its own smallest batch
        assert row["ratio"]["values"] == [1, 1, 1]
    # 5 + 20 + 5 prompt tokens and 10 reserved for each: pages of 16
    assert decode["rows"][2]["pages"]["median"] == 1 + 2 + 1
    assert [row["batch"] for row in against["rows"]] == [1, 3]
    assert document["settings"]["threads"] == 1
    assert document["settings"]["quant"] == "f32 and int8"
    words = shlex.split(document["command"])
    assert words[:4] == ["crucible", "bench", "decode", str(tiny_checkpoint)]
    assert words[words.index("--prompt-tokens") + 1] == "5,20"
    assert words[words.index("--seed") + 1] == "1"  # a default, which a later version may change


def test_decode_by_sampling(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[float, int | None]] = []
    add_request = EngineCore.add_request

    def noted(self: EngineCore, request_id: str, token_ids: Any, params: SamplingParams) -> None:
        seen.append((params.temperature or 0, params.top_k))
        assert params.ignore_eos
        add_request(self, request_id, token_ids, params)

    monkeypatch.setattr(EngineCore, "add_request", noted)
    arguments = ("--batch", "2,4", "--prompt-tokens", "5", "--steps", "2", "--trials", "2", "--threads", "1")
    kinds = "greedy,sampled,wide,mixed"
    document = bench(tmp_path, "decode", tiny_checkpoint, *arguments, "--sampling", kinds, "--vs-quant", "f32")
    decode, against = document["tables"]
    cells = [(batch, kind) for batch in (2, 4) for kind in kinds.split(",")]
    assert [(row["batch"], row["sampling"]) for row in decode["rows"][::2]] == cells
    assert [row["quant"] for row in decode["rows"]] == ["int8", "f32"] * 8
    assert [(row["batch"], row["sampling"]) for row in against["rows"]] == cells
    for row in decode["rows"]:  # against the smallest batch of the same sampling and weight type
        alike = [r for r in decode["rows"] if (r["sampling"], r["quant"]) == (row["sampling"], row["quant"])]
        ratios = zip(row["tok_s"]["values"], alike[0]["tok_s"]["values"], strict=True)
        assert row["ratio"]["values"] == pytest.approx([a / b for a, b in ratios])
        assert row["bytes"] is None  # a CPU copies nothing
    assert "bytes to host" not in capsys.readouterr().out
    greedy, narrow, wide = (0, None), (0.8, 40), (0.8, 500)
    first = [[greedy] * 2, [narrow] * 2, [wide] * 2, [greedy, narrow], [greedy] * 4, [narrow] * 4, [wide] * 4]
    trial = [batch for cell in [*first, [greedy, narrow, wide, greedy]] for batch in [cell, cell]]
    assert seen == [params for cell in [*trial, *trial[::-1]] for params in cell]
    assert document["settings"]["sampling"] == kinds.split(",")
    words = shlex.split(document["command"])
    assert words[words.index("--sampling") + 1] == kinds


def test_every_sampling_of_the_parser_is_known() -> None:
    assert set(PARAMS) == set(SAMPLINGS)
    command = ["bench", "decode", "--sampling"]
    assert build_parser().parse_args([*command, ",".join(SAMPLINGS)]).sampling == list(SAMPLINGS)
    with pytest.raises(SystemExit):
        build_parser().parse_args([*command, "greedy,hot"])


@pytest.mark.parametrize(("arguments", "message"), [
    (("--sampling", "greedy,mixed,greedy"), "names something twice: greedy,mixed,greedy"),
    (("--batch", "2,4,2"), "names something twice: 2,4,2"),
    (("--quant", "int8", "--vs-quant", "int8"), "--vs-quant int8 is --quant's too"),
])  # fmt: skip
def test_what_would_be_measured_twice_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["bench", "decode", *arguments])
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_prefill(tmp_path: Path, tiny_checkpoint: Path) -> None:
    arguments = ("--tokens", "20,60", "--requests", "2", "--trials", "2", "--prefill-budget", "16")
    (table,) = bench(tmp_path, "prefill", tiny_checkpoint, *arguments)["tables"]
    assert [row["tokens"] for row in table["rows"]] == [20, 60]
    assert [row["steps"]["median"] for row in table["rows"]] == [3, 8]  # 40 and 120 tokens, 16 a step
    assert all(row["ttft_ms"]["median"] <= row["all_ms"]["median"] for row in table["rows"])


def test_cache(tmp_path: Path, tiny_checkpoint: Path) -> None:
    arguments = ("--lengths", "8,40", "--steps", "2", "--trials", "2")
    (table,) = bench(tmp_path, "cache", tiny_checkpoint, *arguments)["tables"]
    for row in table["rows"]:
        assert row["ratio"]["values"] == pytest.approx(
            [r / c for r, c in zip(row["recompute_ms"]["values"], row["cached_ms"]["values"], strict=True)]
        )


def test_stall(tmp_path: Path, tiny_checkpoint: Path) -> None:
    arguments = ("--streams", "1,2", "--prompt-tokens", "20", "--trials", "2")
    (table,) = bench(tmp_path, "stall", tiny_checkpoint, *arguments)["tables"]
    assert [(row["where"], row["streams"]) for row in table["rows"]] == [("in-process", 1), ("in-process", 2)]
    for row in table["rows"]:
        assert all(row[name]["min"] > 0 for name in ("median_ms", "worst_ms", "ttft_ms"))
        worst, middle = row["worst_ms"]["values"], row["median_ms"]["values"]
        assert row["stall"]["values"] == pytest.approx([w / m for w, m in zip(worst, middle, strict=True)])


def test_gaps_before_and_after_an_arrival() -> None:
    times = [0.0, 9.0, 9.1, 9.2, 9.3, 10.3, 11.3, 14.3, 15.3]  # the first gaps are its own admission's
    before, after = split([times], 12.0)
    assert before == pytest.approx([1.0, 1.0])
    assert after == pytest.approx([3.0, 1.0])


def test_scheduler(tmp_path: Path) -> None:
    (table,) = bench(tmp_path, "scheduler", "--batch", "2,5", "--steps", "20", "--trials", "2")["tables"]
    for row in table["rows"]:
        assert all(row["total"]["values"][i] <= row["total_p99"]["values"][i] for i in (0, 1))
        assert row["plan"]["median"] > 0
        assert row["step"]["median"] > 0


def test_the_scheduler_is_left_whole() -> None:
    core, _ = make_core(3, 200)
    driver = Driver(core, 1)
    ids = [driver.submit(10, 50) for _ in range(3)]
    driver.step_until(driver.decoding(3), "every request decoded")
    driver.clear(ids)
    core.check()
    assert not core.has_work()
    assert core.metrics()["cancelled_requests"] == 3
    with pytest.raises(EngineError, match="before something"):
        driver.step_until(lambda: False, "something")


def test_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Grüße an alle, die das lesen. " * 400, encoding="utf-8")
    document = bench(tmp_path, "tokenizer", "--data", text, "--megabytes", "0.004003", "--trials", "2")
    speeds, against = document["tables"]
    assert [row["encoder"] for row in speeds["rows"]] == ["crucible, list", "crucible, array", "tiktoken, list"]
    assert 4000 <= document["settings"]["bytes"] <= 4003  # cut between characters
    assert len(against["rows"]) == 2


def test_tokenizer_of_a_model_and_of_no_text(
    tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (table,) = bench(tmp_path, "tokenizer", tiny_checkpoint, "--megabytes", "0.002", "--trials", "1")["tables"]
    assert table["rows"][0]["bytes_a_token"]["median"] == 1
    for data, message in ((b"", "no text"), (b"ab\xffcd", "0xff at offset 2")):
        (tmp_path / "bad").write_bytes(data)
        assert main(["bench", "tokenizer", "--data", str(tmp_path / "bad")]) == 2
        assert message in capsys.readouterr().err


def test_a_model_and_a_url_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "stall", "x", "--url", "http://127.0.0.1:9"]) == 2
    assert "not both" in capsys.readouterr().err


def test_every_column_is_documented() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    columns = 0
    for module in pkgutil.iter_modules(crucible.bench.__path__):
        for value in vars(importlib.import_module(f"crucible.bench.{module.name}")).values():
            if isinstance(value, tuple) and value and all(isinstance(item, Column) for item in value):
                for column in value:
                    columns += 1
                    assert f"`{column.title}`" in text, f"{column.title} of {module.name} is not in docs/benchmarks.md"
    assert columns > 50


def test_serving_modes_load_no_model_code() -> None:
    code = "import sys, crucible.bench.serve; print([m for m in ('numba', 'crucible.model') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_script_is_the_command() -> None:
    command = [sys.executable, "scripts/bench_serve.py", "--url", "nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "not an http URL" in done.stderr
