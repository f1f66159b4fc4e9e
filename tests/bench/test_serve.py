"""``crucible bench serve`` and ``stall --url`` from the command line, against scripted servers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from crucible.cli import main
from tests.bench.fake_server import Exchange, FakeServer, Script, fake_server

HEALTH = {"status": "ok", "model": "toy", "vocab_size": 100, "max_batch": 8, "context": 400, "quant": "f32"}


def health(exchange: Exchange) -> None:
    exchange.json(HEALTH)


def tokens(exchange: Exchange) -> None:
    exchange.native(exchange.body["max_tokens"], pause=lambda: time.sleep(0.003))


def metrics(exchange: Exchange) -> None:
    """Three tokens a decode step, whenever one looks."""
    steps = 10 * (exchange.number + 1)
    exchange.json({"decode_steps": steps, "batch_avg": 3.0, "kv_pages_used": 0, "active_requests": 0})


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a run: {title: rows} of its tables under "tables"."""
    path = tmp_path / "out.json"
    assert main(["bench", *arguments, "--json", str(path), "--markdown", str(tmp_path / "out.md")]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    document["tables"] = {table["title"]: table["rows"] for table in document["tables"]}
    return document


def serve(tmp_path: Path, server: FakeServer, *arguments: str) -> dict[str, Any]:
    small = ["--prompt-tokens", "3:6", "--output-tokens", "4", "--requests", "6", "--trials", "2"]
    return bench(tmp_path, "serve", "--url", server.url, *small, *arguments)


def test_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(health=health, generate=tokens, metrics=metrics) as server:
        document = serve(tmp_path, server, "--concurrency", "1,3", "--slo-ttft", "1000")
        assert server.most_open == 3
    rows = document["tables"]["Throughput"]
    assert [row["point"] for row in rows] == ["1 clients", "3 clients"]
    for row in rows:
        assert row["completed"]["values"] == [6, 6]
        assert row["errors"]["max"] == 0
        assert row["batch"]["median"] == pytest.approx(3)
        assert row["good_percent"]["median"] == 100
        assert row["classes"] == "none"
        assert row["ttft_p50"]["min"] > 3
    assert rows[1]["steady_tok_s"]["median"] > 1.1 * rows[0]["steady_tok_s"]["median"]
    prompts = [body["prompt"] for body in server.bodies if body]
    assert all(token < 90 for prompt in prompts for token in prompt)  # below the top of its vocabulary
    assert document["settings"]["server model"] == "toy"
    assert "--concurrency 1,3 " in document["command"]
    assert "--output-tokens 4 " in document["command"]
    assert "steady tok/s" in capsys.readouterr().out
    assert document["command"] in (tmp_path / "out.md").read_text()


def test_no_run_and_no_server_sees_prompts_twice(tmp_path: Path) -> None:
    with fake_server(health=health, generate=tokens, metrics=metrics) as server:
        for _ in range(2):
            serve(tmp_path, server, "--concurrency", "2", "--vs", server.url, "--prompt-tokens", "16")
            bench(tmp_path, "stall", "--url", server.url, "--streams", "2", "--prompt-tokens", "40", "--trials", "2")
    prompts = [tuple(body["prompt"]) for body in server.bodies if body]
    assert len(set(prompts)) == len(prompts) == 80


def test_open_loop_with_hang_ups(tmp_path: Path) -> None:
    with fake_server(health=health, generate=tokens, metrics=metrics) as server:
        arguments = ("--rate", "200", "--disconnect", "0.5", "--requests", "30", "--duration", "5")
        (row,) = serve(tmp_path, server, *arguments)["tables"]["Outcome"]
    assert row["point"] == "200 req/s"
    for trial in (0, 1):
        assert row["completed"]["values"][trial] + row["hang_ups"]["values"][trial] == 30
        assert row["hang_ups"]["values"][trial] > 3


def test_errors_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def every_other(exchange: Exchange) -> None:
        if exchange.number % 2:
            exchange.json({"error": {"message": "queue is full"}}, 429)
        else:
            tokens(exchange)

    with fake_server(health=health, generate=every_other, metrics=metrics) as server:
        (row,) = serve(tmp_path, server, "--concurrency", "2", "--warmup", "0")["tables"]["Outcome"]
    assert row["classes"] == "429 6"
    assert row["refused_p99"]["median"] > 0
    assert "queue is full" in capsys.readouterr().out


def test_two_servers_take_turns(tmp_path: Path) -> None:
    order: list[str] = []

    def named(name: str, seconds: float) -> Script:
        def answer(exchange: Exchange) -> None:
            order.append(name)
            exchange.native(exchange.body["max_tokens"], pause=lambda: time.sleep(seconds))

        return answer

    with (
        fake_server(health=health, generate=named("A", 0.002), metrics=metrics) as a,
        fake_server(health=health, generate=named("B", 0.02), metrics=metrics) as b,
    ):
        arguments = ("--vs", b.url, "--concurrency", "1", "--trials", "3", "--warmup", "0", "--requests", "4")
        document = serve(tmp_path, a, *arguments)
    assert "".join(order) == "AB" + "AAAABBBB" + "BBBBAAAA" + "AAAABBBB"
    rows = {row["metric"]: row for row in document["tables"]["A against B, paired within each trial"]}
    assert len(rows["e2e tok/s"]["ratio"]["values"]) == 3
    assert rows["e2e tok/s"]["ratio"]["min"] > 1.5
    assert rows["ITL p50"]["ratio"]["max"] < 0.7
    assert [row["server"] for row in document["tables"]["Throughput"]] == ["A", "B"]


def test_openai_server_without_health_or_metrics(tmp_path: Path) -> None:
    def completions(exchange: Exchange) -> None:
        exchange.start_stream()
        for _ in range(4):
            exchange.chunk(b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n')
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")

    with fake_server(completions=completions) as server:
        arguments = ("--api", "openai", "--api-model", "m", "--concurrency", "2", "--text")
        (row,) = serve(tmp_path, server, *arguments)["tables"]["Throughput"]
        assert {body["model"] for body in server.bodies if body} == {"m"}
        assert all(isinstance(body["prompt"], str) for body in server.bodies if body)
    assert row["completed"]["median"] == 6
    assert row["batch"] is None


def test_dataset(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "hello", "max_tokens": 2}\n')
    with fake_server(health=health, generate=tokens, metrics=metrics) as server:
        serve(tmp_path, server, "--concurrency", "1", "--dataset", str(data))
        assert {body["prompt"] for body in server.bodies if body} == {"hello"}


def test_stall_over_http(tmp_path: Path) -> None:
    """The server makes its streams wait while a long prompt is computed."""
    pause = [0.003]

    def generate(exchange: Exchange) -> None:
        if len(exchange.body["prompt"]) > 40:
            pause[0] = 0.3
            time.sleep(0.3)
            pause[0] = 0.003
        exchange.native(exchange.body["max_tokens"], pause=lambda: time.sleep(pause[0]))

    with fake_server(health=health, generate=generate) as server:
        arguments = ("--url", server.url, "--streams", "2", "--prompt-tokens", "33,50", "--trials", "1")
        tables = bench(tmp_path, "stall", *arguments)["tables"]
        deadline = time.monotonic() + 3
        while server.hang_ups < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.hang_ups == 4  # every stream was left when it had been seen enough
    short, long = tables["What established streams feel when a prompt arrives"]
    assert (long["where"], long["streams"], long["prompt"]) == ("HTTP", 2, 50)
    assert 3 <= long["median_ms"]["median"] < 60
    assert long["worst_ms"]["median"] >= 270
    assert long["stall"]["median"] > 5
    assert long["ttft_ms"]["median"] >= 270
    assert short["worst_ms"]["median"] < 270


def test_stall_needs_streams_that_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(health=lambda e: e.json({**HEALTH, "context": 40}), generate=tokens) as server:
        arguments = ["bench", "stall", "--url", server.url, "--streams", "1", "--prompt-tokens", "5", "--trials", "1"]
        assert main(arguments) == 2
    assert "context is too small" in capsys.readouterr().err


def test_a_run_that_fails_leaves_the_last_results(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--json", str(path)]) == 2
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--url", "nowhere"], "not an http URL"),
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["--url", "http://127.0.0.1:9", "--vs-api", "openai"], "--vs URL"),
        (["--url", "http://127.0.0.1:9", "--prompt-tokens", "9:1"], "lengths are N"),
        (["--url", "http://127.0.0.1:9", "--dataset", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--url", "http://127.0.0.1:9", "--json", "/nowhere/x.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_a_refused_prompt_ends_the_run_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(exchange: Exchange) -> None:
        exchange.json({"error": {"message": "prompt too long"}}, 400)

    with fake_server(health=health, generate=refuse) as server:
        assert main(["bench", "serve", "--url", server.url]) == 2
        assert sum(body is not None for body in server.bodies) == 1
    assert "prompt too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--rate", "0"], ["--disconnect", "1.5"], ["--concurrency", "1,x"], ["--slo-itl", "nan"]]
)
def test_options_out_of_range(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "serve", "--url", "http://127.0.0.1:9", *option])
    assert exit_.value.code == 2
    assert option[0] in capsys.readouterr().err
