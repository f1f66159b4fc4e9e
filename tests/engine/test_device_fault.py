"""A step that the device breaks off: whoever was served or waited learns of it, and a new engine answers as the old."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.serving import events, eventually, serving

SIZES = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 64, "context_length": 8192, "eos_token_ids": []}


@pytest.mark.parametrize(
    ("device", "reason"),
    [("cpu", "planted"), pytest.param("cuda", "illegal", marks=pytest.mark.gpu)],
)
def test_a_fault_of_the_device_ends_all_work_and_the_engine_is_replaced(
    tmp_path: Path, device: str, reason: str
) -> None:
    model, trigger = make_checkpoint(tmp_path / "model", **SIZES), tmp_path / "trigger"
    core = {
        "path": str(model),
        "trigger": str(trigger),
        "device": device,
        "max_batch": 2,
        "max_queue": 4,
        "context": 8192,
    }
    with serving(core=core, core_factory="tests.engine.faulty:make_core") as running:
        question = {"prompt": [5, 6, 7], "max_tokens": 8}
        answer = running.post(**question).json()["token_ids"]
        with ThreadPoolExecutor(3) as clients:
            streams = [
                clients.submit(
                    running.post, "/v1/generate/stream", prompt=[9, number], max_tokens=8000, ignore_eos=True
                )
                for number in range(3)
            ]
            eventually(lambda: running.metrics()["queued_requests"] == 1)
            trigger.touch()
            ends = [events(stream.result().text)[-1] for stream in streams]
        for name, data in ends:
            assert (name, data["finish_reason"]) == ("done", "error")
            assert reason in data["error"]["message"]
            assert "\n" not in data["error"]["message"]
        eventually(lambda: running.get("/health").json()["status"] == "ok", 60)
        assert running.post(**question).json()["token_ids"] == answer
        assert running.metrics()["kv_pages_used"] == 0
        assert any("the engine died" in line and reason in line for line in running.errors), running.errors
