"""Everything that needs a GPU, in one run: tests, ``validate``, ``check all``, speeds, a server under load, sanitizer.

    python scripts/gpu_run.py [--commit HASH] [--only PART,…] [--preset 120m | --model MODEL]
    python scripts/gpu_run.py --only accuracy --add --text FILE… [--accuracy-model MODEL…]
    python scripts/gpu_run.py --render            # docs/gpu-runs.md again from docs/gpu-runs.json

accuracy compares the cross-entropy of at least 20 texts on the GPU with the CPU's, so it runs only when asked for.
Writes docs/gpu-runs.json (date, commit, device, driver, counts, tables) and makes docs/gpu-runs.md from it. A part that
fails is written down as failed; the exit code is then 1, or 2 where nothing can run. --preset makes a checkpoint with
random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_command import ROOT, Context, Document, Run, result, run_command
from gpu_parts import LEAST_TEXTS, accuracy, check, sanitizer, speed, tests, validate
from gpu_report import render
from gpu_serving import serve

JSON, MARKDOWN = ROOT / "docs" / "gpu-runs.json", ROOT / "docs" / "gpu-runs.md"
RUNNERS: dict[str, Callable[[Context], Document]] = {
    "tests": tests, "validate": validate, "check": check, "speed": speed, "accuracy": accuracy, "serve": serve,
    "sanitizer": sanitizer,
}  # fmt: skip
PARTS = tuple(RUNNERS)
ASKED_FOR = {"accuracy"}
"""Parts that run only when named: they need more than a GPU."""
WITH_MODEL = {"check", "speed", "serve"}


# ---- what it ran on


def describe_device() -> Document:
    """The first GPU, its driver and what CuPy brings. Exits with one line where there is none."""
    from crucible.commands.doctor import arch_of, nvidia_smi, properties, version
    from crucible.kernels.source import nvrtc_version

    found = properties()
    if not found:
        print("gpu_run: no GPU is visible; crucible doctor says what is missing", file=sys.stderr)
        raise SystemExit(2)
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
    """A native checkpoint of a preset's sizes with random weights; ``shrink`` divides layers and vocabulary.

    Its tokenizer is GPT-2's, as far as the vocabulary goes.
    """
    import numpy as np

    from crucible.checkpoint import expected_tensors, save_checkpoint
    from crucible.kernels.ops_table import model

    layers, hidden, ffn, heads, kv_heads, vocabulary = {"120m": (12, 768, 2048, 12, 3, 50304),
                                                        "smollm2": (30, 576, 1536, 9, 3, 49152)}[preset]  # fmt: skip
    vocabulary //= shrink
    count, tokenizer = gpt2(vocabulary)
    config = model(
        hidden, ffn, heads, kv_heads, 64, num_layers=layers // shrink, vocab_size=vocabulary, token_count=count,
        context_length=2048,
    )  # fmt: skip
    random = np.random.default_rng(1)

    def tensors() -> Any:
        for name, shape in expected_tensors(config).items():
            values = random.standard_normal(shape, dtype=np.float32)
            yield name, 1 + 0.1 * values if len(shape) == 1 else values / np.float32(shape[-1] ** 0.5)

    save_checkpoint(directory / preset, config, tensors(), files={"tokenizer.vocab": tokenizer})
    return directory / preset


def gpt2(most: int) -> tuple[int, bytes]:
    """How many tokens, and the file, of GPT-2's vocabulary without those of ids ``most`` and above."""
    from crucible.vocabulary import Vocabulary

    data = (ROOT / "crucible" / "data" / "gpt2.vocab").read_bytes()
    whole = Vocabulary.from_bytes(data, "gpt2.vocab")
    if len(whole.tokens) <= most:
        return len(whole.tokens), data
    return most, Vocabulary(whole.pattern, whole.tokens[:most]).to_bytes()  # merges are the tokens, in their order


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


def measure(
    parts: list[str], model: str, shown: str, commit: str | None, timeout: int, run: Run, *,
    texts: Sequence[str] = (), accuracy_models: Sequence[str] = (),
) -> Document:  # fmt: skip
    """All parts, one after the other; one that breaks is a failed result."""
    context = Context(run, model, timeout, texts, accuracy_models)
    document: Document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit, "model": shown,
        "device": describe_device(), "results": [], "tables": [], "notes": [],
    }  # fmt: skip
    for part in parts:
        started = time.monotonic()
        try:
            found = RUNNERS[part](context)
        except Exception as error:  # the other parts still have something to say
            found = {"results": [result(part, 1, f"{type(error).__name__}: {error}", started)]}
        for key, values in found.items():
            document[key] += [{"part": part, **value} for value in values]
    return document


def must_fit(document: Document, earlier: Document) -> None:
    """Exits where ``earlier`` ran on another commit, model or device."""
    for key in ("commit", "model", "device"):
        if document[key] != earlier[key]:
            sys.exit(f"gpu_run: --add of a run of another {key}: {earlier[key]}, now {document[key]}")


def joined(document: Document, earlier: Document) -> Document:
    """``document`` and what ``earlier`` has of other parts. Exits where they do not fit."""
    must_fit(document, earlier)
    ran = {entry["part"] for entry in document["results"]}
    both = dict(document)
    for key in ("results", "tables"):
        entries = [entry for entry in earlier[key] if entry["part"] not in ran] + document[key]
        both[key] = sorted(entries, key=lambda entry: PARTS.index(entry["part"]))
    both["notes"] = earlier["notes"]
    return both


def recorded(path: Path, parser: argparse.ArgumentParser) -> Document:
    """The document of an earlier run; a usage error where there is none."""
    try:
        document: Document = json.loads(path.read_text(encoding="utf-8"))
        render(document)
    except OSError as error:
        parser.error(f"{path}: {error.strerror}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"{path} is no record of a run ({type(error).__name__}: {error})")
    return document


def check_arguments(args: argparse.Namespace, parts: list[str], parser: argparse.ArgumentParser) -> None:
    """A usage error for what could not work, before anything runs or is written over."""
    from crucible.errors import CrucibleError
    from crucible.models import resolve

    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only knows {', '.join(PARTS)}, got {unknown[0]}")
    if len(set(parts)) < len(parts):
        parser.error(f"--only names a part twice: {args.only}")
    if args.timeout < 1:
        parser.error(f"--timeout must be at least 1 second, got {args.timeout}")
    if "accuracy" in parts:
        if len(args.text) < LEAST_TEXTS:
            parser.error(f"accuracy needs --text with at least {LEAST_TEXTS} files, got {len(args.text)}")
        if not (args.accuracy_model or args.model):
            parser.error("accuracy needs --accuracy-model, or --model")
        if missing := [text for text in args.text if not Path(text).is_file()]:
            parser.error(f"--text: {missing[0]} is no file")
    elif args.text or args.accuracy_model:
        parser.error("--text and --accuracy-model are for accuracy, which --only does not name")
    for name in [*([args.model] if args.model else []), *(args.accuracy_model or [])]:
        try:
            resolve(name)
        except CrucibleError as error:
            parser.error(str(error))


def wherever(name: str) -> str:
    """A path for commands, which run in ROOT; what is none here may be the name of a pulled model."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", metavar="HASH", help="of the source (default: git's HEAD, if this is a clone)")
    usual = ",".join(part for part in PARTS if part not in ASKED_FOR)
    parser.add_argument(
        "--only", metavar="PART,…", default=usual, help=f"of {', '.join(PARTS)} (default: all but accuracy)"
    )
    parser.add_argument("--preset", choices=("120m", "smollm2"), default="120m", help="random weights (default: 120m)")
    parser.add_argument("--model", metavar="MODEL", help="a model directory or pulled model instead")
    parser.add_argument("--text", nargs="+", metavar="FILE", default=[], help="UTF-8 texts for accuracy, 20 or more")
    parser.add_argument(
        "--accuracy-model",
        nargs="+",
        metavar="MODEL",
        help="models for accuracy, which need tokenizers (default: MODEL)",
    )
    parser.add_argument("--timeout", type=int, default=580, metavar="S", help="seconds a command (default: 580)")
    parser.add_argument("--json", type=Path, default=JSON, metavar="FILE")
    parser.add_argument("--markdown", type=Path, default=MARKDOWN, metavar="FILE")
    parser.add_argument("--add", action="store_true", help="keep the JSON's results of parts that are not run now")
    parser.add_argument("--render", action="store_true", help="only make the page again from the JSON")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.render:
        write(args.markdown, render(recorded(args.json, parser)))
        return 0
    parts = args.only.split(",")
    check_arguments(args, parts, parser)
    shown, commit = args.model or f"{args.preset}, random weights", commit_of(args.commit)
    now = {"commit": commit, "model": shown, "device": describe_device()}  # before anything takes time
    earlier = recorded(args.json, parser) if args.add and args.json.is_file() else None
    if earlier is not None:
        must_fit(now, earlier)
    with tempfile.TemporaryDirectory() as directory:
        needed = args.model is None and WITH_MODEL & set(parts)
        model = str(make_model(args.preset, Path(directory))) if needed else wherever(args.model or "")
        judged = [wherever(name) for name in args.accuracy_model or ([args.model] if args.model else [])]
        texts = [wherever(text) for text in args.text]
        document = measure(parts, model, shown, commit, args.timeout, run_command, texts=texts, accuracy_models=judged)
    if earlier is not None:
        document = joined(document, earlier)
    write(args.json, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    write(args.markdown, render(document))
    return 0 if all(entry["ok"] for entry in document["results"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
