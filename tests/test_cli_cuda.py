"""Commands with --device cuda on an emulated GPU: the CPU's answers within the arithmetic's error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible.cli import main
from tests.conftest import make_text_checkpoint
from tests.kernels.cuda.stand_in import StandIn

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "hidden_size": 64, "num_layers": 1}
    return make_text_checkpoint(tmp_path_factory.mktemp("cuda") / "text", **sizes)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    made: list[StandIn] = []

    class Noted(StandIn):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr("crucible.kernels.device.CudaDevice", Noted)
    monkeypatch.setattr("crucible.engine.cuda_engine.CudaDevice", Noted)
    return made


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def logits(capsys: pytest.CaptureFixture[str], path: Path, *arguments: object) -> dict[str, Any]:
    command = ("logits", path, "--decode", "4", "--tokens", "72,105,32", *arguments)
    found: dict[str, Any] = json.loads(answer(capsys, *command))
    return found


@pytest.mark.parametrize(("quant", "bound"), [("f32", 2e-5), ("int8", 5e-3)])
def test_logits(
    quant: str, bound: float, path: Path, devices: list[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = logits(capsys, path, "--quant", quant, "--device", "cpu")
    cuda = logits(capsys, path, "--quant", quant, "--device", "cuda")
    graph = logits(capsys, path, "--quant", quant, "--device", "cuda", "--graph")
    whole = logits(capsys, path, "--quant", quant, "--device", "cuda", "--no-cache")
    assert cuda == graph == whole  # bits, through JSON's shortest decimals
    assert cuda["tokens"] == cpu["tokens"]
    right = np.array(cpu["logits"])
    assert np.abs(np.array(cuda["logits"]) - right).max() <= bound * np.abs(right).max()
    eager, replayed, uncached = devices
    assert (eager.replays, replayed.replays, uncached.replays) == (0, 4, 0)
    assert cpu != cuda


def test_what_does_not_go_together_is_refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ("logits", path, "--tokens", "1")
    assert "--graph needs --device cuda" in refusal(capsys, *start, "--graph", "--device", "cpu")
    assert "--no-cache" in refusal(capsys, *start, "--graph", "--no-cache", "--device", "cuda")
    assert "f16 needs device cuda" in refusal(capsys, *start, "--quant", "f16", "--device", "cpu")
    both = ("eval", path, "--data", __file__, "--context", "9", "--prefill-ctx", "9")
    assert "give one of them" in refusal(capsys, *both)
    assert "--prefill-ctx must lie in 2 … 128" in refusal(capsys, *both[:4], "--prefill-ctx", "129")


def test_a_step_that_cannot_be_captured_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StandIn, "capture", lambda self, work: None)
    assert "leave --graph out" in refusal(capsys, "logits", path, "--tokens", "1", "--graph", "--device", "cuda")


def test_eval(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "text.txt"
    data.write_text("All the world's a stage, and all the men and women merely players. " * 2)
    nats = {}
    for device in ("cpu", "cuda"):
        for window in (("--prefill-ctx", "100"), ("--context", "100")):
            out = answer(capsys, "eval", path, "--data", data, "--quant", "f32,int8", "--device", device, *window)
            rows = [line.split() for line in out.splitlines()[1:]]
            assert [row[0] for row in rows] == ["f32", "int8"]
            nats[device, window[0]] = np.array([float(row[2]) for row in rows])
    for device in ("cpu", "cuda"):  # rows computed at once change no bit
        assert np.array_equal(nats[device, "--prefill-ctx"], nats[device, "--context"])
    assert np.abs(nats["cuda", "--context"] - nats["cpu", "--context"]).max() < 1e-3


def test_generate(path: Path, devices: list[StandIn], capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", path, "--prompt", "Hello", "--max-tokens", "5", "--device", "cuda")
    text = answer(capsys, *command)
    assert text == answer(capsys, *command, "--no-cache")
    assert all(device.launches for device in devices)
    assert len(devices) == 2


def test_compiling_for_a_gpu_is_said_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from crucible.commands.options import Status
    from crucible.kernels import source

    said = "compiling norm.cu for sm_90 (once; kept in /somewhere)"
    assert "(once; kept in" in Path(source.__file__).read_text()
    status = Status()
    for message in ("loading weights", said):
        status(message)
    status.clear()
    assert capsys.readouterr().err == said + "\n"


def test_a_gpu_needs_no_numba(path: Path) -> None:
    """Loading, benchmarks' modules and messages: nothing of them imports the CPU's compiler."""
    code = (
        "import sys, crucible.llm, crucible.commands.session;"
        "import crucible.bench.decode, crucible.bench.prefill, crucible.bench.profile,"
        "crucible.bench.kernels, crucible.bench.topk, crucible.bench.attention, crucible.engine.cuda_engine;"
        "from crucible.commands.options import Status; status = Status(); status('loading'); status.clear();"
        "print([m for m in ('numba', 'cupy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
