"""What a GPU engine makes of its configuration; the GPU is emulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crucible.config import EngineConfig, SamplingParams
from crucible.engine import cuda_engine
from crucible.engine.core import EngineCore
from crucible.engine.cuda_engine import GRAPH_BYTES, MARGIN
from crucible.engine.graphs import PREFILL_GRAPHS
from crucible.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.kernels.cuda.stand_in import StandIn

SIZES: dict[str, Any] = {
    "head_dim": 64, "num_heads": 2, "num_kv_heads": 1, "hidden_size": 64, "intermediate_size": 64, "num_layers": 1,
    "vocab_size": 48, "token_count": 43, "eos_token_ids": [], "context_length": 64,
}  # fmt: skip
PAGE_BYTES = 2 * 2 * 16 * 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "model", **SIZES)


def engine(monkeypatch: pytest.MonkeyPatch, path: Path, free: int = 2**31, **settings: Any) -> EngineCore:
    class Device(StandIn):
        def memory(self) -> tuple[int, int]:
            return free, 2**32

    monkeypatch.setattr(cuda_engine, "CudaDevice", Device)
    values = {"max_batch": 2, "quant": "f16", "prefill_budget": 32, **settings}
    return EngineCore.from_checkpoint(path, EngineConfig(device="cuda", **values))


def test_it_answers_and_reads_its_switches(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    answers = []
    for switches in ({}, {"async_steps": False}, {"gemm": "big", "attn": "single", "batch_graph": False},
                     {"decode_gemm": "big", "prefill_graph": False}, {"prefill_attn": "reference"}):  # fmt: skip
        core = engine(monkeypatch, path, **switches)
        device, tokens = core.runner.device, []  # type: ignore[attr-defined]
        device.launches.clear()
        assert core.engine_info().device == device.name
        assert core.asynchronous is switches.get("async_steps", True)
        for name in ("a", "b", "c"):
            core.add_request(name, [1, 2, 3, 4, 5], SamplingParams(max_tokens=4))
            while core.has_work():
                tokens += [event.token_id for event in core.step().tokens]
        answers.append(tokens)
        names = " ".join(device.launches)
        assert ("_big64_f16_qkv" in names) == ("big" in switches.values())
        assert ("_small8_f16_qkv" in names) == (switches.get("gemm") != "big")
        assert ("attention_reference" in names) == ("prefill_attn" in switches)
        assert core.runner.ops.decode_splits(1) == 1  # type: ignore[attr-defined]
    assert answers[0] == answers[1] == answers[2] == answers[3]


@pytest.mark.parametrize(("switches", "graphs"), [
    ({}, 2 + PREFILL_GRAPHS), ({"prefill_graph": False}, 2), ({"batch_graph": False}, PREFILL_GRAPHS),
])  # fmt: skip
def test_graphs_have_a_place_in_the_budget(
    monkeypatch: pytest.MonkeyPatch, path: Path, switches: dict[str, bool], graphs: int
) -> None:
    room = MARGIN + graphs * GRAPH_BYTES
    core = engine(monkeypatch, path, free=room + 5 * PAGE_BYTES, **switches)
    assert core.engine_info().kv_pages == 5
    with pytest.raises(ConfigError, match="which is 0 pages after a margin"):
        engine(monkeypatch, path, free=room + PAGE_BYTES - 1, **switches)
