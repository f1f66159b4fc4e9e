"""The modes for a GPU, on an emulated one: that they run, count right, and say what they cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crucible.bench import gpu
from crucible.bench.attention import split_counts
from crucible.bench.gpu import Ceilings, Timer, copies_of
from crucible.bench.kernels import choose, variants
from crucible.bench.profile import stages
from crucible.cli import main
from crucible.engine.cuda_runner import CudaRunner
from tests.checkpoints import make_checkpoint
from tests.kernels.cuda.stand_in import StandIn


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crucible.kernels.device.CudaDevice", StandIn)
    monkeypatch.setattr("crucible.engine.cuda_engine.CudaDevice", StandIn)
    for name, value in (("FILLER_BYTES", 64), ("COPY_BYTES", 1024), ("MOST_LAUNCHES", 2), ("COLD_BYTES", 4096)):
        monkeypatch.setattr(gpu, name, value)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "hidden_size": 64, "intermediate_size": 64}
    return make_checkpoint(tmp_path_factory.mktemp("gpu") / "model", num_layers=1, eos_token_ids=[], **sizes)


def measure(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    file = tmp_path / "out.json"
    assert main([*map(str, arguments), "--json", str(file)]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    return document


@pytest.mark.parametrize("quant", ["int8", "f32"])
def test_kernels(quant: str, tmp_path: Path) -> None:
    arguments = ("--rows", "32,16", "--cols", "64,300", "--batch", "3", "--trials", "3", "--quant", quant)
    document = measure(tmp_path, "bench", "kernels", *arguments)
    table, *choice = document["tables"]
    names = ["small8", "small16", "small32", "big64", "big128"] if quant == "int8" else []
    assert [row["kernel"] for row in table["rows"]] == [*names, "scalar"] * 2
    for row in table["rows"]:
        us = row["us"]["values"]
        weights = row["outputs"] * -(-row["inputs"] // 64) * (64 + 4) if quant == "int8" else (
            row["outputs"] * row["inputs"] * 4)  # fmt: skip
        assert row["gb_s"]["values"] == pytest.approx([weights / value / 1e3 for value in us])
        operations = 2 * row["outputs"] * row["inputs"] * 3
        assert row["tflop_s"]["values"] == pytest.approx([operations / value / 1e6 for value in us])
    assert document["settings"]["matmul_tflop_s"] is None
    assert any("cuBLAS" in note for note in document["notes"])
    if quant == "int8":
        (winners,) = choice
        assert [(row["outputs"], row["inputs"], row["batch"]) for row in winners["rows"]] == [(32, 64, 3), (16, 300, 3)]
    else:
        assert not choice


def test_the_winner_is_told_by_pairs() -> None:
    found = {"small8": [4.0, 5.0, 4.5], "small16": [2.0, 2.2, 2.1], "big64": [1.0, 1.1, 1.05], "scalar": [0.1] * 3}
    row = choose(found)
    assert row is not None
    assert (row["small"], row["big"], row["winner"]) == ("small16", "big64", "big")
    assert choose({"scalar": [1.0]}) is None
    found["big64"] = [9.0, 9.9, 9.5]
    assert (choose(found) or {})["winner"] == "small"


def test_a_matrix_too_long_for_a_kernel_is_left_to_the_others() -> None:
    names = [variant.name for variant in variants(1, 30_000, 8, "int8", 100)]
    assert names == ["small8", "big64", "big128", "scalar"]


def test_ceilings_and_copies() -> None:
    top = Ceilings(copy=1e12, matmul=1e14)
    assert top.microseconds(1e6, 1e6) == pytest.approx(1.0)  # memory bounds it
    assert top.microseconds(1e3, 1e10) == pytest.approx(100.0)
    assert copies_of(10**9) == 1
    assert copies_of(1) == 2  # MOST_LAUNCHES here


def test_a_round_is_the_time_of_a_launch() -> None:
    seen: list[int] = []
    timer = Timer(StandIn())

    class Clock:
        now = 0.0

        def mark(self) -> float:
            return self.now

        def wait(self) -> None:
            pass

        def microseconds(self, first: float, last: float) -> float:
            return last - first

    clock = timer.clock = Clock()

    def launch(index: int) -> None:
        seen.append(index)
        clock.now += 4000.0

    timer.device.refuse = True  # no graph: the same work, eagerly
    assert timer.rounds(launch, most=3)() == 4000.0
    assert seen[-3:] == [0, 1, 2]


def test_topk(tmp_path: Path) -> None:
    arguments = ("--batch", "2", "--k", "3,2000", "--vocab", "5000", "--trials", "2")
    (table,) = measure(tmp_path, "bench", "topk", *arguments)["tables"]
    assert [(row["way"], row["k"], row["bytes"]) for row in table["rows"]] == [
        ("device", 1, 8), ("host", 1, 40_000), ("device", 3, 48), ("host", 3, 40_000), ("host", 2000, 40_000),
    ]  # fmt: skip
    assert [row["host_us"] is None for row in table["rows"]] == [True, False, True, False, False]


def test_attention(tmp_path: Path) -> None:
    arguments = ("--contexts", "20,150", "--batch", "2", "--heads", "2", "--kv-heads", "1", "--iters", "1")
    (table,) = measure(tmp_path, "bench", "attention", *arguments, "--trials", "1")["tables"]
    assert [(row["context"], row["rows"], row["kernel"], row["splits"]) for row in table["rows"]] == [
        (20, 2, "decode", 1), (20, 2, "reference", None), (20, 20, "prefill", None), (20, 20, "reference", None),
        (150, 2, "decode", 1), (150, 2, "decode", 2), (150, 2, "reference", None),
        (150, 150, "prefill", None), (150, 150, "reference", None),
    ]  # fmt: skip
    first = table["rows"][0]
    assert first["kv_gb_s"]["median"] == pytest.approx(2 * 20 * 64 * 2 * 2 / first["us"]["median"] / 1e3)
    assert first["tflop_s"]["median"] == pytest.approx(4 * 2 * 20 * 2 * 64 / first["us"]["median"] / 1e6)
    assert split_counts(1) == [1]
    assert split_counts(8) == [1, 2, 4, 8]
    assert split_counts(9) == [1, 2, 4, 8, 9]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_profile(device: str, path: Path, tmp_path: Path) -> None:
    arguments = ("--warm", "5", "--batch", "2", "--prefill", "2x9", "--steps", "2", "--threads", "1")
    document = measure(tmp_path, "profile", path, *arguments, "--device", device)
    decode, step, prefill, _ = document["tables"]
    assert [table["title"] for table in document["tables"]][::2] == ["decode, batch 2: ops", "prefill 2x9: ops"]
    names = ["embed", "attention norm", "qkv", "attention", "attention output", "mlp norm", "swiglu", "mlp output"]
    for table in (decode, prefill):
        assert [row["op"] for row in table["rows"]] == [*names, "final norm", "logits"]
        assert sum(row["share"] for row in table["rows"]) == pytest.approx(100)
        assert all(("graph_us" in row) == (device == "cuda") for row in table["rows"])
    kv = 2 * 6 * 2 * 64 * (4 if device == "cpu" else 2)
    assert [row["mb"] for row in decode["rows"] if row["op"] == "attention"] == [kv / 1e6]
    what = [row["what"] for row in step["rows"]]
    assert "eager step" in what
    assert ("graph-replayed step" in what) == (device == "cuda")
    words = document["command"].split()
    assert words[words.index("--prefill") + 1] == "2x9"
    assert all("decode, batch 2" in note or "prefill 2x9" in note for note in document["notes"][:2])


def test_stages_are_medians_of_sums() -> None:
    passes = [[("a", 8, 1.0), ("b", 0, 5.0), ("a", 8, 2.0)], [("a", 8, 3.0), ("b", 0, 7.0), ("a", 8, 4.0)]]
    first, second = stages(passes, 0)
    assert (first["op"], first["calls"], first["us"], first["call_us"]) == ("a", 2, 5.0, 2.5)
    assert first["gb_s"] == pytest.approx(16 / 5.0 / 1e3)
    assert (second["us"], second["mb"], second["gb_s"]) == (6.0, None, None)
    assert first["share"] + second["share"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "kernels", "--rows", "16"), "lists of one length"),
        (("bench", "topk", "--k", "9", "--vocab", "5"), "more than the --vocab"),
        (("bench", "attention", "--head-dim", "80"), "64 or 128"),
        (("bench", "attention", "--heads", "5", "--kv-heads", "2"), "multiple"),
    ],
)
def test_one_line_refusals(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_profile_beyond_the_context_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(path), "--warm", "256", "--device", "cpu"]) == 2
    assert "context of 256" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x", "4x", "0", "2x0", "1x2x3", "-1"])
def test_prompt_plans_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "--prefill", text])
    assert "4x256" in capsys.readouterr().err


def test_decode_and_prefill_of_an_engine(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = measure(
        tmp_path, "bench", "decode", path, "--device", "cuda", "--batch", "1,2", "--prompt-tokens", "5", "--steps", "2",
        "--trials", "1",
    )  # fmt: skip
    assert decode["settings"]["device"] == "emulated"
    assert decode["settings"]["gpu"] == "emulated"
    assert [row["bytes"]["median"] for row in decode["tables"][0]["rows"]] == [4, 8]
    made: list[bool] = []

    class Noted(CudaRunner):
        def __init__(self, *arguments: Any, prefill_graphs: bool, **named: Any) -> None:
            super().__init__(*arguments, prefill_graphs=prefill_graphs, **named)
            made.append(prefill_graphs)

    monkeypatch.setattr("crucible.bench.prompt_steps.CudaRunner", Noted)
    prefill = measure(
        tmp_path, "bench", "prefill", path, "--device", "cuda", "--tokens", "9", "--requests", "2", "--trials", "1",
    )  # fmt: skip
    steps = prefill["tables"][1]["rows"]
    assert [row["way"] for row in steps] == ["engine, graph", "engine, eager", "forward, eager", "forward, replay"]
    assert all(row["step_us"]["median"] > 0 for row in steps)
    assert made == [True, False]


def test_bytes_to_the_host_are_counted(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode = measure(
        tmp_path, "bench", "decode", path, "--device", "cuda", "--batch", "4", "--prompt-tokens", "5", "--steps", "3",
        "--trials", "1", "--sampling", "greedy,sampled,wide,mixed",
    )  # fmt: skip
    tokens = 96  # the model has no 500 candidates to bring
    assert [(row["sampling"], row["bytes"]["median"]) for row in decode["tables"][0]["rows"]] == [
        ("greedy", 4 * 4), ("sampled", 4 * (4 + 8 * 40)), ("wide", 4 * (4 + 8 * tokens)),
        ("mixed", 4 * (4 + 8 * tokens)),  # every row is as wide as the widest
    ]  # fmt: skip
    assert "bytes to host" in capsys.readouterr().out


def test_rows_of_logits_that_are_downloaded_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crucible.engine.cuda_runner.MAX_TOP_K", 30)  # top-k 40 is wider than the device selects
    sizes = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "hidden_size": 64, "intermediate_size": 64}
    model = make_checkpoint(tmp_path / "model", num_layers=1, eos_token_ids=[], **sizes)
    decode = measure(
        tmp_path, "bench", "decode", model, "--device", "cuda", "--batch", "2", "--prompt-tokens", "5", "--steps", "2",
        "--trials", "1", "--sampling", "sampled",
    )  # fmt: skip
    assert [row["bytes"]["median"] for row in decode["tables"][0]["rows"]] == [2 * (4 + 4 * 96)]
