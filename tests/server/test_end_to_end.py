"""A real two-layer checkpoint through spawn, socket and SSE, by the shipped command."""

from __future__ import annotations

from pathlib import Path

from crucible.config import SamplingParams
from crucible.llm import LLM
from tests.serving import events, eventually, serving_model


def test_a_checkpoint_is_served_as_the_library_runs_it(tiny_chat_checkpoint: Path) -> None:
    flags = ("--quant", "f32", "--max-batch", "4", "--model-id", "tiny")
    with LLM(tiny_chat_checkpoint, quant="f32") as llm, serving_model(tiny_chat_checkpoint, *flags) as running:
        health = running.get("/health").json()
        assert (health["model"], health["context"], health["quant"]) == ("tiny", 128, "f32")
        sampled = {"temperature": 0.9, "seed": 5, "top_k": 20}
        for settings in ({}, sampled):
            params = SamplingParams(max_tokens=40, **settings)  # type: ignore[arg-type]
            expected = llm.generate(["héllo"], params)[0]
            body = {"prompt": "héllo", "max_tokens": 40, **settings}
            answer = running.post(**body).json()
            assert answer["token_ids"] == expected.token_ids
            assert answer["text"] == expected.text
            assert answer["finish_reason"] == expected.finish_reason
            assert answer["tokens_generated"] == expected.completion_tokens
            found = events(running.post("/v1/generate/stream", **body).text)
            assert "".join(data["text"] for _, data in found) == expected.text
        messages = [{"role": "user", "content": "<|im_end|>"}]
        answer = running.post(messages=messages, max_tokens=8).json()
        assert answer["token_ids"] == llm.chat(messages, SamplingParams(max_tokens=8))[0].token_ids
        with running.open_post("/v1/generate/stream", prompt="a", max_tokens=120, ignore_eos=True):
            pass
        eventually(lambda: running.metrics()["kv_pages_used"] == 0)
        assert set(running.metrics()) >= {
            "active_requests", "queued_requests", "prefilling_requests", "completed_requests", "cancelled_requests",
            "failed_requests", "tokens_generated", "kv_pages_used", "kv_pages_cached", "kv_pages_total", "wasted_slots",
            "batch_last", "batch_avg", "decode_steps", "prefill_chunks", "prefill_tokens", "last_prefill_chunk_tokens",
            "packed_calls", "prefix_cache_hits", "uptime_s", "rejected_requests", "step_age_s",
        }
        assert running.post(prompt=[259], max_tokens=1).status_code == 400  # a padding id


def test_a_broken_checkpoint_is_one_line(tmp_path: Path) -> None:
    from tests.serving import Running

    for name, content in (("config.json", b"{"), ("model.safetensors", b"\0" * 8)):
        (tmp_path / name).write_bytes(content)
    running = Running("crucible.server.cli", str(tmp_path), "--port", "0")
    try:
        assert running.wait_exit() != 0
        assert len([line for line in running.errors if "error:" in line]) == 1, running.errors
        assert "Traceback" not in "".join(running.errors)
    finally:
        running.stop()
