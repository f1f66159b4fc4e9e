"""The scripts beside the package: they run on a CPU, and say what they mean."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.train.test_export_hf import make_base

SCRIPTS = Path(__file__).parents[2] / "scripts"
QUICK = ["--device", "cpu", "--trials", "2", "--iterations", "1", "--warm", "0", "--json"]


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


def output(module: ModuleType, *words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [module.__name__, *words])
    assert module.main() == 0
    return capsys.readouterr().out


def test_bench_measures_what_a_cpu_can(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(load("bench"), "--size", "64", *QUICK, monkeypatch=monkeypatch, capsys=capsys)
    result = json.loads(text)
    assert set(result["speed"]) == {"FP32", "FP16", "BF16"}
    assert all(speed["low"] <= speed["median"] <= speed["high"] for speed in result["speed"].values())
    assert result["no"]["FP8 e4m3 fast accum"] == "needs a GPU"


def test_bandwidth_gives_the_ceiling_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, model = load("bench_bandwidth"), str(make_base(tmp_path / "m"))
    text = output(module, "--model", model, "--megabytes", "2", *QUICK, monkeypatch=monkeypatch, capsys=capsys)
    result = json.loads(text)
    best = max(speed["median"] for speed in result["gb_s"].values())
    matrices = 576 * 32 + 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 48 * 32)
    expected = best * 1e9 / (4 * matrices + 4 * 5 * 32)
    assert result["tokens_s"][model]["float32"] == pytest.approx(expected)
    assert result["tokens_s"][model]["int8"] > 3.5 * expected


def test_attention_variants_are_compared_in_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("bench_attention")
    words = ["--preset", "tiny", "--batch", "1", "--context", "16", *QUICK]
    result = json.loads(output(module, *words, monkeypatch=monkeypatch, capsys=capsys))
    assert list(result["ms"]) == ["MHA", "GQA materialised", "GQA fused", "MQA materialised", "MQA fused"]
    summary = module.Summary
    assert "no variant is faster" in module.verdict({"a": summary(1, 1, 1, 0.1), "b": summary(1.05, 1, 1, 0.0)})
    assert "more than noise" in module.verdict({"a": summary(1, 1, 1, 0.1), "b": summary(1.2, 1, 1, 0.0)})


def test_a_wide_spread_is_warned_of_and_rounds_rotate() -> None:
    timing = load("gpu_timing")
    summary = timing.Summary.of([1.0, 1.0, 1.4])
    assert (summary.median, round(summary.spread, 6)) == (1.0, 0.4)
    assert "a has a spread of 40%" in timing.warn_of_spread({"a": summary, "b": timing.Summary.of([1.0, 1.2])})[0]
    assert len(timing.warn_of_spread({"b": timing.Summary.of([1.0, 1.2])})) == 0
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in "abc"}
    timing.rounds(works, 3, 1, timing.choose_device("cpu"))
    assert "".join(order) == "abcbcacab"


@pytest.mark.parametrize(
    ("capability", "architectures", "how"),
    [
        ((12, 0), ["sm_75", "sm_90", "sm_120"], "native"),
        ((9, 0), ["sm_90a"], "native"),
        ((8, 9), ["sm_80", "sm_90"], "native"),
        ((12, 0), ["sm_80", "sm_90", "compute_90"], "ptx"),
        ((12, 0), ["sm_80", "sm_90"], "none"),
        ((8, 0), ["sm_86", "compute_86"], "none"),
    ],
)
def test_native_code_is_told_from_translated(capability: tuple[int, int], architectures: list[str], how: str) -> None:
    assert load("verify_gpu").native_code(capability, architectures) == how


def test_reference_logits_and_the_engine_agree(tmp_path: Path) -> None:
    model = make_base(tmp_path / "m")
    command = [sys.executable, str(SCRIPTS / "reference_logits.py"), str(model), "--tokens", "1,2,3"]
    done = subprocess.run([*command, "--compare", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "top 10 in the same order" in done.stderr
    assert len(json.loads(done.stdout)) == 576
    refused = subprocess.run([*command[:-1], "600"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (1, "error: token id 600 is outside the vocabulary of 513\n")


def test_setup_never_installs_a_driver() -> None:
    script = SCRIPTS / "setup_wsl.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = subprocess.run(["bash", str(script), "--dry-run"], capture_output=True, text=True, check=True).stdout
    commands = [line for line in text.splitlines() if line.startswith("+ ")]
    installs = [line for line in commands if "apt-get install" in line]
    assert any("cuda-toolkit-13-0" in line for line in installs)
    assert not any(word in line for line in installs for word in ("driver", "cuda-runtime", "nvidia"))
    assert any("uv python install 3.12" in line for line in commands)
    assert any("Pin-Priority: -1" in line and "cuda-drivers*" in line for line in commands)
    bare = subprocess.run(
        ["bash", str(script), "--dry-run", "--no-toolkit"], capture_output=True, text=True, check=True
    )
    assert "cuda-toolkit" not in bare.stdout
    assert subprocess.run(["bash", str(script), "--nonsense"], capture_output=True).returncode == 2
