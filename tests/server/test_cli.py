"""crucible-serve's command line: quick help, one-line errors, nothing heavy in a worker."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from crucible.config import EngineConfig
from crucible.errors import ConfigError
from crucible.server import cli
from crucible.server.service import bind, url

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crucible.server.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)


def test_help_is_quick_and_names_every_flag() -> None:
    def spent() -> float:
        """Processor seconds of all children so far: on an idle machine they are the time it takes."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = [1.0]
    while min(times) >= 0.4 and len(times) < 8:  # a busy machine may need several tries
        started = spent()
        result = run("--help")
        times.append(spent() - started)
    assert result.returncode == 0
    for flag in (
        "--host", "--port", "--max-batch", "--max-queue", "--device", "--quant", "--model-id", "--context",
        "--kv-memory", "--kv-pages", "--prefill-budget", "--prefill-chunk-tokens", "--threads", "--http-workers",
    ):
        assert flag in result.stdout
    assert min(times) < 0.4, times


def test_version() -> None:
    assert run("--version").stdout == "crucible 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--port", "x"], "--port: must be a whole number"),
        (["--port", "70000"], "--port: must lie between 0 and 65535"),
        (["--max-batch", "0"], "--max-batch"),
        (["--quant", "int4"], "--quant"),
        (["--kv-memory", "lots"], "--kv-memory: size must be a size such as 512M"),
        (["--kv-memory", "1G", "--kv-pages", "4"], "not allowed with"),
        (["--nonsense"], "--nonsense"),
        (["/nonexistent/model"], "/nonexistent/model"),
    ],
)
def test_a_bad_command_line_is_one_line(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    error_text = capsys.readouterr().err
    assert error_text.startswith("crucible-serve: error: ")
    assert part in error_text
    assert error_text.count("\n") == 1


def test_a_bad_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CRUCIBLE_MAX_BATCH", "many")
    assert cli.main([]) == 2
    assert "CRUCIBLE_MAX_BATCH" in capsys.readouterr().err


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRUCIBLE_MAX_QUEUE", "7")
    monkeypatch.setenv("CRUCIBLE_QUANT", "f32")
    args = cli.build_parser().parse_args(["--quant", "int8"])
    config = EngineConfig.from_environment(quant=args.quant, max_queue=args.max_queue)
    assert (config.quant, config.max_queue) == ("int8", 7)


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "a" * 300, "192.0.2.1"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}"):
        bind(host, 0)


def test_ipv6_addresses_get_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with listener:
        assert url(listener).startswith("http://[::1]:")


def test_a_worker_imports_neither_kernels_nor_model() -> None:
    code = (
        "import sys, crucible.server.worker, crucible.server.text, crucible.server.app, crucible.engine.client\n"
        "import crucible.chat_template, crucible.tokenizer\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('numba', 'llvmlite', 'cupy', 'torch')"
        " or m.startswith(('crucible.model.', 'crucible.kernels', 'crucible.reference', 'crucible.engine.core'))]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
