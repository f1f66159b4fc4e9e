"""The checks that a GPU adds, on the emulated kernels: they pass, and each finds what it is there to find."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from crucible.checkpoint import open_checkpoint
from crucible.cli import main
from crucible.config import SamplingParams
from crucible.engine.checks.cuda_lab import cuda_lab
from crucible.engine.checks.device_checks import attention, chunked, graphs, problem, replayed, shrinking
from crucible.engine.checks.lab import Job, Lab, Trace
from crucible.engine.checks.suite import CHECKS
from crucible.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.kernels.cuda.emulated_device import EmulatedDevice

MODEL = {
    "head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "intermediate_size": 64, "num_layers": 1,
    "vocab_size": 48, "token_count": 43, "eos_token_ids": [42], "context_length": 192,
    "tied_embeddings": False,
}  # fmt: skip


class Forgetful(EmulatedDevice):
    """Graphs change a logit after their last launch."""

    def launch(self, name: str, grid: Any, *arguments: Any) -> None:
        super().launch(name, grid, *arguments)
        if name.endswith("_store"):
            self.logits = arguments[9]

    def replay(self, graph: Any) -> None:
        super().replay(graph)
        self.logits[0, 5] = np.nextafter(self.logits[0, 5], np.float32(np.inf))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("device") / "model", **MODEL)


def lab(model: Path, device: Any, quant: str = "int8") -> Lab:
    with open_checkpoint(model) as checkpoint:
        return cuda_lab(checkpoint, quant, 192, device=device, largest_batch=4)


def generator() -> np.random.Generator:
    return np.random.default_rng(1)


def test_graphs_answer_as_eager_steps_do(model: Path) -> None:
    made = lab(model, EmulatedDevice(lazy=True))
    outcomes = list(graphs(made, 1, generator()))
    assert [outcome.difference for outcome in outcomes] == [None] * 4
    assert all("steps replayed" in outcome.case for outcome in outcomes)


@pytest.mark.parametrize("name", ["sampling", "packed"])
def test_requests_together_answer_as_alone(model: Path, name: str) -> None:
    with open_checkpoint(model) as checkpoint:
        made = cuda_lab(checkpoint, "int8", 192, device=EmulatedDevice(lazy=True), largest_batch=16)
    outcomes = list(CHECKS[name](made, 1, generator()))
    assert len(outcomes) > 1
    assert [outcome.difference for outcome in outcomes if outcome.difference] == []


def test_a_graph_that_computes_something_else_is_found(model: Path) -> None:
    outcomes = list(graphs(lab(model, Forgetful()), 1, generator()))
    assert all(outcome.difference is not None and "logit 5" in str(outcome.difference) for outcome in outcomes)


def test_graphs_that_cannot_be_captured_are_no_success(model: Path) -> None:
    outcome = next(graphs(lab(model, EmulatedDevice(refuse=True)), 1, generator()))
    assert "no step was replayed" in str(outcome.difference)


def test_batches_shrink_as_announced(model: Path) -> None:
    made = lab(model, EmulatedDevice())
    made.run(shrinking(made, generator(), 4), runner=made.eager)
    sizes = made.step_rows
    assert sizes[0] == 4
    rest = sizes[sizes.index(1) :]
    assert 2 in rest[1:]


def test_attention_passes(model: Path) -> None:
    outcomes = list(attention(lab(model, EmulatedDevice(lazy=True)), 2, generator()))
    assert [outcome.difference for outcome in outcomes] == [None] * 3


class Faulty(EmulatedDevice):
    """Attention with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def launch(self, name: str, grid: Any, *arguments: Any) -> None:
        if not name.startswith("crucible_attention"):
            super().launch(name, grid, *arguments)
            return
        changed = list(arguments)
        if self.fault == "heads":
            q = arguments[0].reshape(len(arguments[0]), -1, 64)[:, :4]
            changed[0] = np.ascontiguousarray(q[:, ::-1].reshape(len(q), -1))
        if self.fault == "future":  # one position more than the row may see
            changed[4] = arguments[4] + 1
        super().launch(name, grid, *changed)
        out = arguments[13]
        least = int(out[0, :256].argmin())  # below 1, where a unit in the last place is within the oracle's bound
        if self.fault == "decode" and "decode" in name:
            out[0, least] = np.nextafter(out[0, least], np.float16(0))
        if self.fault == "pages":
            out[0, least] = np.nextafter(out[0, least], np.float16(arguments[6][0, 0] % 2))
        if self.fault == "chunks" and "prefill" in name and arguments[4][0] > 0:
            out[0, :] += np.float16(0.25)


@pytest.mark.parametrize("fault", ["heads", "future", "decode", "pages"])
def test_a_fault_of_attention_is_found(model: Path, fault: str) -> None:
    made, random = lab(model, Faulty(fault)), generator()
    assert any(problem(made, "", random).difference for _ in range(4))


def test_a_fault_of_later_chunks_is_found(model: Path) -> None:
    random = generator()
    assert any(chunked(lab(model, Faulty("chunks")), "", random).difference for _ in range(3))


def test_a_difference_between_attention_and_the_oracle_says_where(model: Path) -> None:
    found = problem(lab(model, Faulty("heads")), "", generator()).difference
    assert found is not None
    assert re.fullmatch(r"decode_64: head \d, element \d+ is .*, the oracle's is [\d.]+", found.what)


class Answers:
    """A lab that has run already: eagerly, with graphs, and each request alone."""

    eager: ClassVar[dict[str, bool]] = {"graphs": False}

    def __init__(self, eager: float, graph: float) -> None:
        self._eager, self._graph, self.count = eager, graph, 0

    def run(self, jobs: Any, *, runner: Any = None) -> dict[str, Trace]:
        self.count += runner is None
        return {"r": answer(self._graph if runner is None else self._eager)}

    def alone(self, job: Job) -> Trace:
        return answer(self._graph)

    def replays(self) -> int:
        return self.count


def answer(value: float) -> Trace:
    return Trace([np.array([0, value], np.float32)], [1], "length")


def test_graphs_that_are_all_wrong_alike_differ_from_eager_steps() -> None:
    jobs = [Job("r", (1, 2), SamplingParams(max_tokens=1))]
    assert replayed(Answers(1.0, 1.0), "c", jobs, {}).difference is None  # type: ignore[arg-type]
    found = replayed(Answers(1.0, 2.0), "c", jobs, {}).difference  # type: ignore[arg-type]
    assert "logit 1 is" in str(found)


def test_more_requests_where_the_device_has_room(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crucible.engine.checks.suite.LARGE_BATCHES", (3, 5))
    outcomes = [outcome.case for outcome in CHECKS["batch"](lab(model, EmulatedDevice()), 0, generator())]
    assert outcomes == ["3 at once"]


def test_graphs_need_a_gpu(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "graphs", str(model), "--device", "cpu"]) == 2
    assert "only a GPU has; use --device cuda" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="only a GPU"):
        next(graphs(Lab.load(model), 1, generator()))


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["int8", "f32"])
@pytest.mark.parametrize("name", CHECKS)
def test_every_check_on_the_gpu(model: Path, name: str, quant: str) -> None:
    outcomes = list(CHECKS[name](Lab.load(model, device="cuda", quant=quant), 1, generator()))
    assert [f"{outcome.case}: {outcome.difference}" for outcome in outcomes if outcome.difference] == []
    assert outcomes
