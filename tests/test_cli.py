"""The command line: output, exit codes, one-line errors, start-up time."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from crucible import __version__
from crucible.cli import main
from crucible.config import EngineConfig
from crucible.errors import RequestError

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


class Run(NamedTuple):
    """What a command line did."""

    code: int
    stdout: bytes
    stderr: bytes


def spawn(*arguments: object, stdin: bytes = b"") -> Run:
    """Runs a command line as a process."""
    command = [sys.executable, "-m", "crucible.cli", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, env=ENVIRONMENT, timeout=240)
    return Run(done.returncode, done.stdout, done.stderr)


def crucible(*arguments: object, stdin: bytes = b"", code: int = 0) -> Run:
    """Runs a command line in this process and checks its exit code; an error must end in one line without traceback."""
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", write_through=True) for data in (stdin, b"", b"")]
    with pytest.MonkeyPatch.context() as patch:
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        try:
            got = main([str(argument) for argument in arguments])
        except SystemExit as leaving:  # argparse: --help, --version and usage errors
            got = int(leaving.code or 0)
    stdout, stderr = (stream.buffer.getvalue() for stream in streams[1:])  # type: ignore[attr-defined]
    assert got == code, stderr.decode(errors="replace")
    if code:
        assert stderr.decode().splitlines()[-1].startswith("crucible: error: ")
    return Run(got, stdout, stderr)


def error_of(*arguments: object, stdin: bytes = b"") -> str:
    done = crucible(*arguments, stdin=stdin, code=2)
    assert done.stdout == b""
    return done.stderr.decode().splitlines()[-1]


def test_help_lists_the_commands_and_is_fast() -> None:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        text = spawn("--help").stdout.decode()
        times.append(time.perf_counter() - started)
    for command in ("generate", "inspect", "pull", "import", "quantize", "tokenize", "detokenize", "logits", "eval"):
        assert command in text
    assert min(times) < 0.4


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'numpy', 'numba', 'msgspec', 'jinja2', 'gguf', 'falcon'}"
    code = f"import sys, crucible.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version() -> None:
    assert crucible("--version").stdout.decode().split() == ["crucible", __version__]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("frobnicate",),
        ("logits",),
        ("generate", "--max-tokens", "0"),
        ("logits", "--tokens", "1,x"),
        ("logits", "--tokens", "1,-2"),
    ],
)
def test_usage_errors_are_one_line(arguments: tuple[str, ...]) -> None:
    done = crucible(*arguments, code=2)
    assert len(done.stderr.splitlines()) == 1


def test_a_process_prints_its_answer_or_one_line_and_its_exit_code(tiny_checkpoint: Path) -> None:
    good = spawn("generate", tiny_checkpoint, "--prompt", "Hello", "--max-tokens", "4", "--threads", "1")
    assert good == (
        0,
        crucible("generate", tiny_checkpoint, "--prompt", "Hello", "--max-tokens", "4").stdout,
        good.stderr,
    )
    bad = spawn("generate", "--top-k", "4")
    assert (bad.code, bad.stdout) == (2, b"")
    assert bad.stderr.startswith(b"crucible: error: ")
    assert bad.stderr.count(b"\n") == 1


def test_tokenize_and_detokenize() -> None:
    text = "The World is a stage"
    assert json.loads(crucible("tokenize", text).stdout) == [464, 2159, 318, 257, 3800]
    assert json.loads(crucible("tokenize", stdin=text.encode()).stdout) == [464, 2159, 318, 257, 3800]
    assert crucible("detokenize", stdin=b"[464, 2159, 318, 257, 3800]").stdout == text.encode()
    assert crucible("detokenize", "[464]").stdout == b"The"
    assert json.loads(crucible("tokenize", stdin=b"").stdout) == []
    assert crucible("detokenize", "[]").stdout == b""


def test_detokenize_keeps_bytes_that_are_no_character() -> None:
    ids = json.loads(crucible("tokenize", "\U0001f600").stdout)
    assert crucible("detokenize", json.dumps(ids[:1])).stdout == "\U0001f600".encode()[:3] or len(ids) == 1


def test_tokenize_refuses_bytes_that_are_not_utf8() -> None:
    assert "byte 0xff at offset 2" in error_of("tokenize", stdin=b"ab\xffc")


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        ("[1, 50257]", "50257"),
        ("[-1]", "-1"),
        ("{}", "list"),
        ("[1.5]", "whole"),
        ("[true]", "whole"),
        ("464", "list"),
        ("nonsense", "JSON"),
    ],
)
def test_detokenize_refuses(ids: str, word: str) -> None:
    assert word in error_of("detokenize", "--", ids)


def test_tokenize_with_a_model(tiny_checkpoint: Path) -> None:
    assert json.loads(crucible("tokenize", "--model", tiny_checkpoint, "Hé").stdout) == list("Hé".encode())
    assert "no-such-model" in error_of("tokenize", "--model", "no-such-model", "x")


def test_inspect(tiny_checkpoint: Path, tmp_path: Path) -> None:
    text = crucible("inspect", tiny_checkpoint).stdout.decode()
    assert "parameters" in text.lower()
    assert str(tmp_path / "absent") in error_of("inspect", tmp_path / "absent")


def test_logits(tiny_checkpoint: Path) -> None:
    values = json.loads(crucible("logits", tiny_checkpoint, "--tokens", "72,105").stdout)
    assert len(values) == 264
    assert np.isfinite(values[:259]).all()


def test_logits_with_and_without_a_cache_are_the_same_bits(tiny_checkpoint: Path) -> None:
    for quant in ("f32", "int8"):
        command = ("logits", tiny_checkpoint, "--tokens", "72,105,44", "--decode", "20", "--quant", quant)
        with_cache = json.loads(crucible(*command).stdout)
        assert with_cache == json.loads(crucible(*command, "--no-cache").stdout)
        assert len(with_cache["tokens"]) == 20


def test_check_compares_with_transformers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from crucible.commands.check import compare
    from crucible.commands.session import Session
    from tests.checkpoints import make_hf_directory

    directory = make_hf_directory(tmp_path / "hf")
    for model in (tiny_checkpoint, directory):
        assert b"equal: " in crucible("logits", model, "--tokens", "5,6,7", "--decode", "6", "--check").stderr
    right = json.loads(crucible("logits", directory, "--tokens", "5,6,7", "--decode", "2").stdout)
    logits = np.array(right["logits"], np.float32)
    rows = Session(directory, quant="f32", context=8).rows([5, 6, 7, right["tokens"][0]])
    assert np.array_equal(rows[-1], logits)
    assert compare(directory, [5, 6, 7], right["tokens"], rows) == 0
    for place in range(4):  # one position that differs is enough
        wrong = rows.copy()
        wrong[place] = np.roll(rows[place], 1)
        assert compare(directory, [5, 6, 7], right["tokens"], wrong) == 1
        wrong = rows.copy()
        wrong[place, 3] += 2e-4 * np.abs(rows[place]).max()
        assert compare(directory, [5, 6, 7], right["tokens"], wrong) == 1
        wrong[place, 3] = np.nan
        assert compare(directory, [5, 6, 7], right["tokens"], wrong) == 1
    assert compare(directory, [5, 6, 7], [right["tokens"][0], right["tokens"][1] ^ 1], rows) == 1
    assert "f32" in error_of("logits", directory, "--tokens", "5", "--check", "--quant", "int8")


def test_check_refuses_before_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.checkpoints import NoPosition, make_checkpoint, make_hf_directory

    model = make_checkpoint(tmp_path / "unlike", position=NoPosition())
    assert "no such architecture" in error_of("logits", model, "--tokens", "5", "--check")

    def fail(*arguments: object, **settings: object) -> None:
        raise RuntimeError("it does\nnot work")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", fail)
    done = crucible("logits", make_hf_directory(tmp_path / "hf"), "--tokens", "5", "--check", code=2)
    assert done.stderr.splitlines()[-1].endswith(b"transformers fails on this model: RuntimeError: it does not work")


def test_same_order_breaks_ties_within_the_error_only() -> None:
    from crucible.commands.check import same_order

    reference = np.linspace(2, 1, 20).astype(np.float32)
    reference[4] = reference[3] - 1e-5
    swapped = reference.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert same_order(swapped, reference, 1e-5)
    assert not same_order(swapped, reference, 1e-7)
    swapped[[15, 16]] = swapped[[16, 15]]  # beyond the first ten
    assert same_order(swapped, reference, 1e-5)


def test_logits_refuses(tiny_checkpoint: Path) -> None:
    assert "259" in error_of("logits", tiny_checkpoint, "--tokens", "1,259")
    assert "128" in error_of("logits", tiny_checkpoint, "--tokens", "1", "--decode", "128")
    assert "cuda" in error_of("logits", tiny_checkpoint, "--tokens", "1", "--device", "cuda")


def test_generate_streams_text_and_a_rate(tiny_checkpoint: Path) -> None:
    done = crucible("generate", tiny_checkpoint, "--prompt", "Hello", "--max-tokens", "8")
    assert done.stdout.endswith(b"\n")
    assert b"tokens/s" in done.stderr
    assert done.stdout == crucible("generate", tiny_checkpoint, "--max-tokens", "8", stdin=b"Hello").stdout


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.9", "--top-k", "20", "--seed", "5")])
def test_generate_without_a_cache_gives_the_same_text(tiny_checkpoint: Path, sampling: tuple[str, ...]) -> None:
    command = ("generate", tiny_checkpoint, "--prompt", "Hello", "--max-tokens", "24", *sampling)
    assert crucible(*command).stdout == crucible(*command, "--no-cache").stdout


def test_generate_ends_at_an_end_of_sequence_id(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """With and without a cache: a model that ends where this one says its third token."""
    from tests.conftest import make_text_checkpoint

    prompt = ",".join(str(byte) for byte in b"Hello")
    tokens = json.loads(crucible("logits", tiny_checkpoint, "--tokens", prompt, "--decode", "3").stdout)["tokens"]
    model = make_text_checkpoint(tmp_path / "stops", eos_token_ids=[tokens[2]])
    command = ("generate", model, "--prompt", "Hello", "--max-tokens", "30", "--quant", "f32")
    ended = crucible(*command)
    assert b"5 prompt tokens, %d generated" % (tokens.index(tokens[2]) + 1) in ended.stderr
    assert ended.stdout == crucible(*command, "--no-cache").stdout


def test_generate_applies_the_chat_template_unless_raw(tiny_chat_checkpoint: Path, tiny_checkpoint: Path) -> None:
    command = ("--prompt", "Hi", "--max-tokens", "12")
    templated = crucible("generate", tiny_chat_checkpoint, *command)
    raw = crucible("generate", tiny_chat_checkpoint, *command, "--raw")
    assert raw.stdout == crucible("generate", tiny_checkpoint, *command).stdout
    assert templated.stderr.split(b" prompt tokens")[0].split()[-1] > raw.stderr.split(b" prompt tokens")[0].split()[-1]


def test_generate_refuses(tiny_checkpoint: Path) -> None:
    assert "--prompt" in error_of("generate", "What is the capital of France?")
    assert "top_k" in error_of("generate", tiny_checkpoint, "--prompt", "x", "--top-k", "5")
    assert "cuda" in error_of("generate", tiny_checkpoint, "--prompt", "x", "--device", "cuda")
    assert "0xff" in error_of("generate", tiny_checkpoint, stdin=b"\xff")
    assert "context" in error_of("generate", tiny_checkpoint, "--prompt", "x" * 128)
    assert "context" in error_of("generate", tiny_checkpoint, "--prompt", "x", "--max-tokens", "128")


def test_eval(tiny_checkpoint: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("All the world's a stage, and all the men and women merely players. " * 4)
    lines = (
        crucible("eval", tiny_checkpoint, "--data", data, "--tokens", 200, "--quant", "f32,int8")
        .stdout.decode()
        .splitlines()
    )
    columns = lines[0].removesuffix("  over f32").split()
    table = [dict(zip(columns, line.split(), strict=True)) for line in [lines[1], lines[2].rsplit("  ", 1)[0]]]
    assert [row["quant"] for row in table] == ["f32", "int8"]
    for row in table:
        assert row["tokens"] == "199"
        nats = float(row["nats/token"])
        assert float(row["perplexity"]) == pytest.approx(np.exp(nats), rel=1e-3)
        assert float(row["bits/byte"]) == pytest.approx(nats / np.log(2), rel=1e-4)  # a token of this model is a byte
    assert "only" in error_of("eval", tiny_checkpoint, "--data", data, "--tokens", 10**6)
    assert "absent.txt" in error_of("eval", tiny_checkpoint, "--data", tmp_path / "absent.txt")
    assert "int4" in error_of("eval", tiny_checkpoint, "--data", data, "--quant", "int4")


@pytest.mark.parametrize(("count", "context"), [(2, 2), (9, 2), (9, 4), (10, 4), (10, 64)])
def test_windows_score_each_token_but_the_first_once(count: int, context: int) -> None:
    from crucible.commands.evaluate import windows

    ids = list(range(count))
    parts = windows(ids, context)
    assert [token for part in parts for token in part[1:]] == ids[1:]
    assert all(2 <= len(part) <= context for part in parts)


def test_scores_are_the_log_probabilities_of_the_logits(tiny_checkpoint: Path) -> None:
    from crucible.commands.session import Session

    session = Session(tiny_checkpoint, quant="f32", context=300)
    ids = [(7 * place * place + 3) % 259 for place in range(300)]
    scores = session.score(ids)
    assert scores.shape == (299,)
    for place in (1, 16, 17, 256, 257, 299):  # a chunk ends at 256
        logits = session.logits(ids[:place]).astype(np.float64)[:259]
        assert scores[place - 1] == pytest.approx(logits[ids[place]] - np.log(np.exp(logits).sum()), abs=1e-9)


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m crucible.cli tokenize | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], input=b"word " * 200_000, env=ENVIRONMENT, capture_output=True)
    assert done.stderr == b""
    assert done.returncode in (0, 141)


def test_ctrl_c_is_quiet() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "crucible.cli", "tokenize"],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    time.sleep(1.0)  # it now waits for standard input
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=20)
    assert (process.returncode, out, error) == (130, b"", b"")


def shell(line: str, **environment: str) -> Run:
    """A command line of bash, in which ``crucible`` is the command."""
    script = f'crucible() {{ {sys.executable} -m crucible.cli "$@"; }}; {line}'
    done = subprocess.run(["bash", "-c", script], env={**ENVIRONMENT, **environment}, capture_output=True, timeout=240)
    from crucible.commands.options import COMPILING

    stderr = done.stderr.replace(f"{COMPILING}\n".encode(), b"")  # with an empty cache that may come first
    return Run(done.returncode, done.stdout, stderr)


def test_a_reader_that_leaves_a_stream_is_no_error(tiny_checkpoint: Path) -> None:
    command = f"crucible generate {tiny_checkpoint} --prompt Hello --max-tokens 100"
    done = shell(f"{command} | head -c 1 >/dev/null; exit ${{PIPESTATUS[0]}}")
    assert (done.code, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tiny_checkpoint: Path) -> None:
    for command in (f"generate {tiny_checkpoint} --prompt Hello --max-tokens 100", "tokenize a", "--version"):
        # argparse swallows what an unbuffered stream says about its texts
        done = shell(f"crucible {command} >/dev/full", PYTHONUNBUFFERED="")
        assert (done.code, done.stderr.count(b"\n")) == (2, 1), done.stderr
        assert done.stderr == b"crucible: error: No space left on device\n"


def test_closed_streams_are_one_line() -> None:
    assert shell("crucible tokenize a >&-") == (2, b"", b"crucible: error: standard output is closed\n")
    for command in ("tokenize", "detokenize", "generate", "eval --data -"):
        done = shell(f"crucible {command} <&-")
        assert done.code == 2
        assert done.stderr.startswith(b"crucible: error: standard input is closed")
        assert done.stderr.count(b"\n") == 1
    assert shell("crucible tokenize a 2>&-") == (0, b"[64]\n", b"")
    assert shell("crucible frobnicate 2>&-") == (2, b"", b"")
    assert shell("crucible pull no-such-model 2>&-") == (2, b"", b"")


def test_ids_that_are_none_of_the_models_are_refused(tmp_path: Path) -> None:
    """A tokenizer with more ids than the model has tokens (it has the rows): the kernels check no bounds."""
    from crucible.commands.session import Session
    from tests.conftest import make_text_checkpoint

    model = make_text_checkpoint(tmp_path / "few", token_count=100, eos_token_ids=[])
    data = tmp_path / "text.txt"
    for text in ("Hi", "eA", "AHAe"):  # also as the last, which is only scored
        data.write_text(text)
        wrong = max(text.encode())
        assert f"token id {wrong} lies outside the model's ids 0 … 99" in error_of("eval", model, "--data", data)
    for cache in ((), ("--no-cache",)):
        assert "token id 101 " in error_of("generate", model, "--prompt", "Hello", "--max-tokens", "2", *cache)
    session = Session(model, quant="f32", context=16)
    for ids in ([1, 100], [1, -1], [2**40, 1], [1, 2, 3, 2**31]):
        for compute in (session.logits, session.score, session.rows, lambda tokens: session.decode(tokens, 1)):
            with pytest.raises(RequestError, match="lies outside the model's ids 0 … 99"):
                compute(ids)


def test_logits_that_overflow_are_refused(tmp_path: Path) -> None:
    from crucible.checkpoint import save_checkpoint
    from tests.checkpoints import random_tensors, tiny_config
    from tests.conftest import byte_vocabulary

    config = tiny_config(vocab_size=264, token_count=259)
    tensors = random_tensors(config)
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], 3e38)
    model = tmp_path / "large"
    save_checkpoint(model, config, tensors.items(), files={"tokenizer.vocab": byte_vocabulary()})
    data = tmp_path / "text.txt"
    data.write_text("Hello")
    assert "position 1 hold NaN or infinity" in error_of("logits", model, "--tokens", "5,6")
    assert "position 0 hold NaN or infinity" in error_of("eval", model, "--data", data)
    for cache in ((), ("--no-cache",)):
        done = crucible("generate", model, "--prompt", "Hello", "--max-tokens", "2", *cache, code=2)
        assert b"NaN or infinity" in done.stderr


def test_quantize_writes_what_int8_computes_with(tiny_chat_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "int8"
    done = crucible("quantize", tiny_chat_checkpoint, target)
    assert done.stdout.decode() == f"{target}\n"
    for command in (("logits", "--tokens", "72,105", "--quant", "int8"), ("generate", "--prompt", "Hello")):
        before, after = (crucible(command[0], model, *command[1:]) for model in (tiny_chat_checkpoint, target))
        assert before.stdout == after.stdout
    assert "already int8" in error_of("quantize", target, tmp_path / "twice")
    assert "already exists" in error_of("quantize", tiny_chat_checkpoint, target)
    assert "neither a model directory nor" in error_of("quantize", tmp_path / "absent", tmp_path / "twice")
    assert [path.name for path in tmp_path.iterdir()] == ["int8"]


def test_a_perplexity_beyond_every_double() -> None:
    from crucible.commands.evaluate import perplexity

    assert perplexity(np.log(7.0)) == pytest.approx(7)
    assert perplexity(1e6) == float("inf")


def test_the_environment_counts_where_no_flag_does(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "text.txt"
    data.write_text("Hello, world")
    logits = ("logits", tiny_checkpoint, "--tokens", "72,105")
    int8, f32 = (crucible(*logits, "--quant", quant).stdout for quant in ("int8", "f32"))
    assert crucible(*logits).stdout == f32 != int8
    monkeypatch.setenv("CRUCIBLE_QUANT", "int8")
    assert crucible(*logits).stdout == int8
    assert crucible(*logits, "--quant", "f32").stdout == f32
    evaluate = ("eval", tiny_checkpoint, "--data", data)
    assert [line.split()[0] for line in crucible(*evaluate).stdout.decode().splitlines()] == ["quant", "int8"]
    generate = ("generate", tiny_checkpoint, "--prompt", "Hello", "--max-tokens", "1")
    for variable, value in (("QUANT", "foo"), ("DEVICE", "cuda"), ("THREADS", "0"), ("THREADS", "100000")):
        with monkeypatch.context() as patch:
            patch.setenv(f"CRUCIBLE_{variable}", value)
            for command in (logits, evaluate, generate, (*generate, "--no-cache")):
                assert variable.lower() in error_of(*command).lower()


def test_generate_follows_the_environment(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crucible.engine.core import EngineCore

    seen = []
    load = EngineCore.from_checkpoint

    def from_checkpoint(path: Path, config: EngineConfig, report: Callable[[str], None] | None) -> EngineCore:
        seen.append((config.quant, config.threads, config.max_batch))
        return load(path, config, report)

    monkeypatch.setattr(EngineCore, "from_checkpoint", from_checkpoint)
    command = ("generate", tiny_checkpoint, "--prompt", "Hello", "--max-tokens", "1")
    crucible(*command)
    monkeypatch.setenv("CRUCIBLE_QUANT", "f32")
    monkeypatch.setenv("CRUCIBLE_THREADS", "1")
    crucible(*command)
    crucible(*command, "--quant", "int8")
    assert seen == [("int8", None, 1), ("f32", 1, 1), ("int8", 1, 1)]
    crucible(*command, "--no-cache")
    assert len(seen) == 3  # no engine is loaded only to be closed


def test_compiling_is_announced_when_it_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, at the first kernel that is compiled; a kernel from the cache is silent."""
    from numba.core import config as numba_config

    from crucible.commands.options import COMPILING, Status, announce_compilation

    monkeypatch.setattr(numba_config, "CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "kernels.py"
    source.write_text(
        "import numba\n"
        "@numba.njit(cache=True)\ndef one(x):\n    return x + 1\n"
        "@numba.njit(cache=True)\ndef two(x):\n    return x + 2\n"
    )

    def run(value: float) -> None:
        spec = importlib.util.spec_from_file_location("kernels", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # new dispatchers, as in a new process
        assert (module.one(value), module.two(value)) == (value + 1, value + 2)

    said: list[str] = []
    with announce_compilation(said.append):
        run(1)
    assert said == [COMPILING]
    with announce_compilation(said.append):
        run(1)
    assert said == [COMPILING]
    with announce_compilation(said.append):
        run(1.5)  # another type: what was compiled does not serve it
    assert said == [COMPILING] * 2
    run(1j)
    assert said == [COMPILING] * 2  # nobody listens any more

    for terminal, expected in ((False, COMPILING + "\n"), (True, f"\r\x1b[Kloading …\r\x1b[K{COMPILING} …\r\x1b[K")):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        status = Status()
        status("loading")
        run(np.float32(1) if terminal else np.int8(1))
        status.clear()
        run(np.uint8(1) if terminal else np.int16(1))
        assert stream.getvalue() == expected


def test_ctrl_c_while_a_model_is_loaded_or_answers_is_quiet(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crucible.commands import generate
    from crucible.commands.options import Status
    from crucible.engine.core import EngineCore
    from crucible.llm import Delta

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    def interrupted_report(deltas: Iterator[Delta], prompt_tokens: int) -> None:
        next(deltas)
        raise KeyboardInterrupt

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    command = [str(part) for part in ("generate", tiny_checkpoint, "--prompt", "Hello", "--max-tokens", 20)]
    for owner, name, action in (
        (Status, "__call__", interrupt),
        (EngineCore, "collect", interrupt),
        (generate, "report", interrupted_report),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, action)
            assert main(command) == 130
        gc.collect()
        assert not ignored


def test_the_parsers_words_are_the_engines() -> None:
    from crucible import choices
    from crucible.config import engine

    assert engine.CHOICES == {
        "device": choices.DEVICES,
        "quant": choices.QUANTS,
        "gemm": choices.GEMMS,
        "decode_gemm": choices.DECODE_GEMMS,
        "attn": choices.ATTENTIONS,
        "prefill_attn": choices.PREFILL_ATTENTIONS,
        "prefill": choices.PREFILLS,
    }


def test_compiled_kernels_are_kept_in_the_cache(tmp_path: Path) -> None:
    """Numba reads the directory when a kernel is defined: set too late, kernels are compiled beside the sources."""
    code = (
        "import crucible.model.cpu_ops as ops; from crucible.kernels.cpu import norm, rope;"
        "print(*(k._cache.cache_path for k in (ops.linear.project, ops.attention, norm.rmsnorm, rope.rope_and_store)))"
    )
    environment = {**ENVIRONMENT, "CRUCIBLE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert all(path.startswith(str(tmp_path)) for path in done.stdout.split()), done.stdout
