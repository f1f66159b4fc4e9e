"""The parts of gpu_run.py that are commands; the one with a server is in gpu_serving.py.

A part gets a Context and returns results and tables, which gpu_run.py writes down.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from pathlib import Path

from gpu_command import Context, Document, result
from gpu_report import (
    Scores,
    bench_tables,
    check_counts,
    last_line,
    merged,
    sanitizer_summary,
    scores,
    test_counts,
    worst_errors,
)

BATCHES = "1,4,8,16,32,64,128,256"
DECODE = ("--prompt-tokens", "128", "--steps", "128")
PREFILLS = (("1", (128, 512, 1024)), ("4", (256,)), ("16", (64,)))

LEAST_TEXTS = 20
AGAINST_CPU = 1e-4
"""Largest |GPU − CPU| in nats a token, and largest difference of the scalar kernels from those on tensor cores."""
QUANTISATION = 0.002
"""Most nats a token that int8 may cost over float32."""


def tests(context: Context) -> Document:
    started = time.monotonic()
    code, output = context.run(["-m", "pytest", "-m", "gpu", "-q", "tests"], context.timeout)
    return {"results": [result("`pytest -m gpu`", code, test_counts(output), started)]}


def validate(context: Context) -> Document:
    started = time.monotonic()
    code, output = context.run(["-m", "crucible.cli", "validate", "--device", "cuda"], context.timeout)
    text = last_line(output).removeprefix("validate: ")
    rows = worst_errors(output)
    table = {
        "title": "Largest errors of `crucible validate` (max |difference| / max |value|, against the float64 oracle)",
        "columns": ["kernels", "cases", "largest error", "its bound"], "rows": rows,
    }  # fmt: skip
    found: Document = {"results": [result("`crucible validate`: every kernel", code, text, started)]}
    return {**found, "tables": [table]} if rows else found


def check(context: Context) -> Document:
    results = []
    for quant, fuzz in (("int8", "200"), ("f16", "20"), ("f32", "20")):
        started = time.monotonic()
        words = ["check", "all", context.model, "--device", "cuda", "--quant", quant, "--fuzz", fuzz]
        code, output = context.run(["-m", "crucible.cli", *words], context.timeout)
        what = f"`crucible check all`, {quant}, {fuzz} random cases of attention"
        results.append(result(what, code, check_counts(output), started))
    return {"results": results}


def speed(context: Context) -> Document:
    """``crucible bench decode`` and ``prefill``, int8."""
    longest = longest_prompt(context.model)
    commands = [["decode", "--batch", BATCHES, "--sampling", "greedy", *DECODE]]
    commands += [["decode", "--batch", "1,16,64,256", "--sampling", "greedy,sampled,mixed", *DECODE]]
    for requests, lengths in PREFILLS:
        tokens = ",".join(str(min(length, longest)) for length in lengths)
        commands.append(["prefill", "--requests", requests, "--tokens", tokens])
    begun = time.monotonic()
    results: list[Document] = []
    tables: list[Document] = []
    with tempfile.TemporaryDirectory() as directory:
        for index, (mode, *options) in enumerate(commands):
            started, path = time.monotonic(), Path(directory) / f"{index}.json"
            words = ["bench", mode, context.model, *options, "--device", "cuda", "--quant", "int8", "--json", str(path)]
            code, output = context.run(["-m", "crucible.cli", *words], context.timeout)
            if path.is_file():
                tables += bench_tables(json.loads(path.read_text(encoding="utf-8")))
            if code:
                what = f"`crucible bench {mode} {' '.join(options)}`"
                results.append(result(what, code, last_line(output), started))
    if not results:
        results.append(result("`crucible bench decode`, `prefill`", 0, f"{len(commands)} runs, see below", begun))
    return {"results": results, "tables": merged(tables)}


def longest_prompt(model: str) -> int:
    """Tokens of a prompt that leave room for one more in the model's context; the model is opened for it."""
    from crucible.checkpoint import open_checkpoint
    from crucible.models import resolve

    with open_checkpoint(resolve(model)) as checkpoint:
        return checkpoint.config.context_length - 1


def stored_as_int8(model: str) -> bool:
    from crucible.checkpoint import open_checkpoint
    from crucible.models import resolve

    with open_checkpoint(resolve(model)) as checkpoint:
        return "int8" in checkpoint.dtypes().values()


# ---- accuracy


def accuracy(context: Context) -> Document:
    """Cross-entropy of texts: GPU and CPU, int8 and float32, scalar kernels and tensor cores."""
    started = time.monotonic()
    count, models = len(context.texts), context.accuracy_models
    missing = "no --text" if not count else "no --accuracy-model or --model" if not models else ""
    if not missing and count < LEAST_TEXTS:
        missing = f"--text names {count} texts, at least {LEAST_TEXTS} are needed"
    if missing:
        return {"results": [result("accuracy", 1, missing, started)]}
    document: Document = {"results": [], "tables": []}
    for model in models:
        try:
            found = accuracy_of(context, model)
        except Exception as error:  # the other models still have something to say
            text = f"{type(error).__name__}: {error}"
            found = {"results": [result(f"accuracy of {Path(model).name}", 1, text, started)], "tables": []}
        document["results"] += found["results"]
        document["tables"] += found["tables"]
    document["tables"] = merged(document["tables"])
    return document


def accuracy_of(context: Context, model: str) -> Document:
    name, results, rows = Path(model).name, [], []
    stored = stored_as_int8(model)

    def evaluate(quant: str, *options: str, gemm: str = "auto") -> tuple[int, str, Scores | None]:
        words = ["eval", model, "--data", *context.texts, "--tokens", "512", "--device", "cuda", "--quant", quant]
        environment = {"CRUCIBLE_GEMM": gemm}
        code, output = context.run(["-m", "crucible.cli", *words, *options], context.timeout, environment=environment)
        return code, output, scores(output, quant)

    def compare(what: str, pair: list[Scores | None], low: float, high: float, started: float) -> None:
        """A result: what the first of ``pair`` costs over the second, which must lie in low … high."""
        ours, theirs = pair
        if ours is None or theirs is None:
            return  # that run is a failed result already
        delta = round(ours.nats - theirs.nats, 6)  # of two numbers with six digits
        limit = "" if math.isinf(high) else f" (bound {high:g})"
        text = f"{delta:+.6f} nats/token{limit}"
        results.append(result(f"{name}: {what}", 0 if low <= delta <= high else 1, text, started))

    kinds: dict[str, Scores | None] = {}
    for quant in ("int8", "f32"):
        started = time.monotonic()
        code, output, found = evaluate(quant, "--against", "cpu")
        kinds[quant] = found
        what = f"{name}: `crucible eval --against cpu`, {quant}, {len(context.texts)} texts"
        if found is None or found.difference is None:
            results.append(result(what, code or 1, last_line(output), started))
            continue
        fine = code == 0 and abs(found.mean) <= AGAINST_CPU
        text = f"{found.difference} nats/token over the CPU (bound {AGAINST_CPU:g}), {found.choices}"
        results.append(result(what, 0 if fine else code or 1, text, started))
        rows.append([name, quant, f"{found.tokens:,}", f"{found.nats:.6f}", found.cpu, found.difference, found.choices])
    what = "int8 − f32" + (", of a model stored as int8: its own dequantised weights" if stored else "")
    pair = [kinds["int8"], kinds["f32"]]
    compare(what, pair, -math.inf, math.inf if stored else QUANTISATION, time.monotonic())

    started = time.monotonic()
    windows: dict[str, Scores | None] = {}
    for gemm in ("scalar", "auto"):
        code, output, found = evaluate("int8", "--prefill-ctx", "256", gemm=gemm)
        windows[gemm] = found if code == 0 else None
        if windows[gemm] is None:
            what = f"{name}: `crucible eval --prefill-ctx 256`, CRUCIBLE_GEMM={gemm}"
            results.append(result(what, code or 1, last_line(output), started))
    what = "scalar − tensor cores, int8, windows of 256"
    compare(what, [windows["scalar"], windows["auto"]], -AGAINST_CPU, AGAINST_CPU, started)
    columns = ["model", "weights", "tokens", "nats/token", "on the CPU", "GPU − CPU", "choices"]
    title = "Cross-entropy of texts, GPU beside CPU"
    return {"results": results, "tables": [{"title": title, "columns": columns, "rows": rows}] if rows else []}


# ---- compute-sanitizer


def sanitizer(context: Context) -> Document:
    """The kernels' tests under compute-sanitizer, where the machine has it."""
    results = []
    for tool, options in (("memcheck", ["--report-api-errors", "no"]), ("racecheck", [])):
        started = time.monotonic()
        what = f"`compute-sanitizer --tool {tool}`, tests of the kernels"
        if shutil.which("compute-sanitizer") is None:
            results.append(result(what, 0, "not on this machine", started))
            continue
        # Tests are many times slower in it: the time limit here is that of the whole command.
        code, output = context.run(
            ["-m", "pytest", "-q", "-m", "gpu", "-o", "timeout=0", "tests/kernels/cuda"], context.timeout,
            under=["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "9"],
        )  # fmt: skip
        summary = sanitizer_summary(output)
        results.append(result(what, code if summary else code or 1, summary or last_line(output), started))
    return {"results": results}
