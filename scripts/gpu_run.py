"""Everything that needs a GPU, in one run: tests, ``validate``, ``check all`` and a first speed table.

    python scripts/gpu_run.py [--commit HASH] [--only PART,…] [--preset 120m | --model MODEL]
    python scripts/gpu_run.py --render            # docs/gpu-runs.md again from docs/gpu-runs.json

Writes docs/gpu-runs.json (date, commit, device, driver, counts, tables) and makes docs/gpu-runs.md from it. A part that
fails is written down as failed; the exit code is then 1. --preset makes a checkpoint with random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_report import bench_tables, check_counts, last_line, merged, render, test_counts, worst_errors

ROOT = Path(__file__).resolve().parents[1]
JSON, MARKDOWN = ROOT / "docs" / "gpu-runs.json", ROOT / "docs" / "gpu-runs.md"
PARTS = ("tests", "validate", "check", "speed")
BATCHES = "1,4,8,16,32,64,128,256"
PREFILLS = (("1", "128,512,1023"), ("4", "256"), ("16", "64"))
Document = dict[str, Any]
Run = Callable[[list[str], int], tuple[int, str]]


# ---- running


def run_command(command: list[str], timeout: int) -> tuple[int, str]:
    """Exit code and output of a Python command, shown as it comes; a code of its own after ``timeout`` seconds."""
    print(f"$ python {' '.join(command)}", flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    lines, late = [], threading.Event()
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                lines.append(line)
        finally:
            timer.cancel()
    if late.is_set():
        return 124, "".join([*lines, f"stopped after {timeout} s\n"])
    return process.returncode, "".join(lines)


def result(what: str, code: int, text: str, started: float) -> dict[str, Any]:
    return {"what": what, "result": text, "ok": code == 0, "seconds": round(time.monotonic() - started, 1)}


def tests(run: Run, model: str, timeout: int) -> Document:
    started = time.monotonic()
    code, output = run(["-m", "pytest", "-m", "gpu", "-q", "tests"], timeout)
    return {"results": [result("`pytest -m gpu`", code, test_counts(output), started)]}


def validate(run: Run, model: str, timeout: int) -> Document:
    started = time.monotonic()
    code, output = run(["-m", "crucible.cli", "validate", "--device", "cuda"], timeout)
    text = last_line(output).removeprefix("validate: ")
    rows = worst_errors(output)
    table = {
        "title": "Largest errors of `crucible validate` (max |difference| / max |value|, against the float64 oracle)",
        "columns": ["kernels", "cases", "largest error", "its bound"], "rows": rows,
    }  # fmt: skip
    found: Document = {"results": [result("`crucible validate`: every kernel", code, text, started)]}
    return {**found, "tables": [table]} if rows else found


def check(run: Run, model: str, timeout: int) -> Document:
    results = []
    for quant, fuzz in (("int8", "200"), ("f32", "20")):
        started = time.monotonic()
        code, output = run(
            ["-m", "crucible.cli", "check", "all", model, "--device", "cuda", "--quant", quant, "--fuzz", fuzz], timeout
        )
        what = f"`crucible check all`, {quant}, {fuzz} random cases of attention"
        results.append(result(what, code, check_counts(output), started))
    return {"results": results}


def speed(run: Run, model: str, timeout: int) -> Document:
    """``crucible bench decode`` and ``prefill``, int8."""
    commands = [["decode", "--batch", BATCHES, "--prompt-tokens", "128", "--steps", "128"]]
    commands += [["prefill", "--requests", requests, "--tokens", tokens] for requests, tokens in PREFILLS]
    begun = time.monotonic()
    results: list[Document] = []
    tables: list[Document] = []
    with tempfile.TemporaryDirectory() as directory:
        for index, (mode, *options) in enumerate(commands):
            started, path = time.monotonic(), Path(directory) / f"{index}.json"
            words = ["bench", mode, model, *options, "--device", "cuda", "--quant", "int8", "--json", str(path)]
            code, output = run(["-m", "crucible.cli", *words], timeout)
            if path.is_file():
                tables += bench_tables(json.loads(path.read_text(encoding="utf-8")))
            if code:
                what = f"`crucible bench {mode} {' '.join(options)}`"
                results.append(result(what, code, last_line(output), started))
    if not results:
        results.append(result("`crucible bench decode`, `prefill`", 0, f"{len(commands)} runs, see below", begun))
    return {"results": results, "tables": merged(tables)}


RUNNERS: dict[str, Callable[[Run, str, int], Document]] = {
    "tests": tests, "validate": validate, "check": check, "speed": speed,
}  # fmt: skip


# ---- what it ran on


def describe_device() -> Document:
    """The first GPU, its driver and what CuPy brings. Exits with one line where there is none."""
    from crucible.commands.doctor import arch_of, nvidia_smi, properties, version
    from crucible.kernels.source import nvrtc_version

    found = properties()
    if not found:
        sys.exit("gpu_run: no GPU is visible; crucible doctor says what is missing")
    import cupy

    smi = nvidia_smi() or {}
    runtime = cupy.cuda.runtime
    return {
        "name": found[0]["name"].decode(),
        "arch": arch_of(found[0]),
        "power_limit_w": smi.get("enforced.power.limit"),
        "memory_gib": round(found[0]["totalGlobalMem"] / 2**30),
        "driver": smi.get("driver_version"),
        "driver_cuda": version(runtime.driverGetVersion()),
        "cuda": version(runtime.runtimeGetVersion()),
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "cupy": cupy.__version__,
    }


def make_model(preset: str, directory: Path, shrink: int = 1) -> Path:
    """A native checkpoint of a preset's sizes with random weights; ``shrink`` divides layers and vocabulary."""
    import numpy as np

    from crucible.checkpoint import expected_tensors, save_checkpoint
    from crucible.kernels.ops_table import model

    layers, hidden, ffn, heads, kv_heads, vocabulary = {"120m": (12, 768, 2048, 12, 3, 50304),
                                                        "smollm2": (30, 576, 1536, 9, 3, 49152)}[preset]  # fmt: skip
    config = model(
        hidden, ffn, heads, kv_heads, 64, num_layers=layers // shrink, vocab_size=vocabulary // shrink,
        token_count=vocabulary // shrink,
        context_length=1024,
    )  # fmt: skip
    random = np.random.default_rng(1)

    def tensors() -> Any:
        for name, shape in expected_tensors(config).items():
            values = random.standard_normal(shape, dtype=np.float32)
            yield name, 1 + 0.1 * values if len(shape) == 1 else values / np.float32(shape[-1] ** 0.5)

    save_checkpoint(directory / preset, config, tensors())
    return directory / preset


def write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def commit_of(given: str | None) -> str | None:
    if given is not None:
        return given
    try:
        found = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def measure(parts: list[str], model: str, shown: str, commit: str | None, timeout: int, run: Run) -> Document:
    """All parts, one after the other; one that breaks is a failed result."""
    document: Document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit, "model": shown,
        "device": describe_device(), "results": [], "tables": [], "notes": [],
    }  # fmt: skip
    for part in parts:
        started = time.monotonic()
        try:
            found = RUNNERS[part](run, model, timeout)
        except Exception as error:  # the other parts still have something to say
            found = {"results": [result(part, 1, f"{type(error).__name__}: {error}", started)]}
        for key, values in found.items():
            document[key] += [{"part": part, **value} for value in values]
    return document


def joined(document: Document, earlier: Document) -> Document:
    """``document`` and what ``earlier`` has of other parts. Exits where that ran on another commit or device."""
    for key in ("commit", "model", "device"):
        if document[key] != earlier[key]:
            sys.exit(f"gpu_run: --add of a run of another {key}: {earlier[key]}, now {document[key]}")
    ran = {entry["part"] for entry in document["results"]}
    both = dict(document)
    for key in ("results", "tables"):
        entries = [entry for entry in earlier[key] if entry["part"] not in ran] + document[key]
        both[key] = sorted(entries, key=lambda entry: PARTS.index(entry["part"]))
    both["notes"] = earlier["notes"]
    return both


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", metavar="HASH", help="of the source (default: git's HEAD, if this is a clone)")
    parser.add_argument("--only", metavar="PART,…", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--preset", choices=("120m", "smollm2"), default="120m", help="random weights (default: 120m)")
    parser.add_argument("--model", metavar="MODEL", help="a model directory or pulled model instead")
    parser.add_argument("--timeout", type=int, default=580, metavar="S", help="seconds a command (default: 580)")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE")
    parser.add_argument("--markdown", type=Path, default=MARKDOWN, metavar="FILE")
    parser.add_argument("--add", action="store_true", help="keep the JSON's results of parts that are not run now")
    parser.add_argument("--render", action="store_true", help="only make the page again from the JSON")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.render:
        write(args.markdown, render(json.loads(args.json.read_text(encoding="utf-8"))))
        return 0
    parts = args.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only knows {', '.join(PARTS)}, got {unknown[0]}")
    describe_device()  # before anything takes time
    with tempfile.TemporaryDirectory() as directory:
        needed = args.model is None and {"check", "speed"} & set(parts)
        model = str(make_model(args.preset, Path(directory))) if needed else args.model or ""
        shown = args.model or f"{args.preset}, random weights"
        document = measure(parts, model, shown, commit_of(args.commit), args.timeout, run_command)
    if args.add and args.json.is_file():
        document = joined(document, json.loads(args.json.read_text(encoding="utf-8")))
    write(args.json, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    write(args.markdown, render(document))
    return 0 if all(entry["ok"] for entry in document["results"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
