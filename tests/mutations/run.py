"""Plants each bug of patches/ in a copy of the tree and expects the tests that the patch names to fail.

    python tests/mutations/run.py [--sample N [--seed S]] [--only NAME ...] [--list]

A patch is a unified diff (``patch -p1``, ``git apply``) under a few header lines:

    What: one line, the bug it plants
    Tests: tests/a.py::test_x tests/b.py -k 'pytest arguments'
    Check: validate rmsnorm        (or: check paged; only where those tests run this check of crucible's own)

Exit code 0: every bug was noticed. A patch that does not apply, a build that fails, a test that cannot be collected or
a run without a failed test counts as not noticed. The tree must be built in place (pip install -e . does that).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).parent / "patches"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "venv", "dist", "temp.*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
COMPILED = (".pyx", ".pxd", ".pxi", ".h", ".c")
TIMEOUT_S = 300
TESTS_FAILED = 1  # pytest's exit code; 2 and above are faults of the run, not failed tests


@dataclass(frozen=True)
class Mutation:
    """One patch: its file, what it plants, the tests that must notice, the files it touches, a check to test."""

    path: Path
    what: str
    tests: list[str]
    files: list[str]
    check: str = ""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def needs_build(self) -> bool:
        return any(name.endswith(COMPILED) for name in self.files)


def read(path: Path) -> Mutation:
    """Parses a patch file. Raises ValueError when a header line is missing."""
    text = path.read_text(encoding="utf-8")
    head = text.split("\n--- ", 1)[0]
    header = dict(re.findall(r"^(What|Tests|Check): *(.+)$", head, re.MULTILINE))
    files = re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE)
    if not {"What", "Tests"} <= set(header) or not files:
        raise ValueError(f"{path.name}: needs 'What:', 'Tests:' and a diff with a/ and b/ paths")
    return Mutation(path, header["What"], shlex.split(header["Tests"]), files, header.get("Check", ""))


def copy_tree(destination: Path) -> Path:
    """The working tree with its built modules; times are kept, so that only what a patch touches is rebuilt."""
    shutil.copytree(ROOT, destination, ignore=LEFT_OUT, symlinks=True)
    return destination


@contextmanager
def planted(mutation: Mutation, tree: Path) -> Iterator[str]:
    """The tree with the bug in it; afterwards its files are back, times included. Yields a complaint or ''."""
    saved = [
        (tree / name, (tree / name).read_bytes(), (tree / name).stat())
        for name in mutation.files
        if (tree / name).exists()
    ]
    applied = subprocess.run(["git", "apply", "-p1", str(mutation.path)], cwd=tree, capture_output=True, text=True)
    try:
        yield "" if applied.returncode == 0 else f"does not apply: {' '.join(applied.stderr.split())}"
    finally:
        for path, data, stat in saved:
            path.write_bytes(data)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def execute(command: list[str], tree: Path, cache: Path) -> tuple[int, str]:
    """Runs ``command`` on the tree alone: its package first on the path, its own kernel cache. Exit code and output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "CRUCIBLE_CACHE": str(cache),
        "GIT_CEILING_DIRECTORIES": str(tree.parent),
    }
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            text=True,
            timeout=TIMEOUT_S,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {TIMEOUT_S} s"
    return done.returncode, done.stdout


def verdict(mutation: Mutation, tree: Path, cache: Path) -> str:
    """'' when the bug is noticed, else why not."""
    with planted(mutation, tree) as complaint:
        if complaint:
            return complaint
        if mutation.needs_build:
            code, output = execute([sys.executable, "setup.py", "build_ext", "--inplace"], tree, cache)
            if code:
                return f"the build fails: {last_line(output)}"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests]
        code, output = execute(command, tree, cache)
        if code == TESTS_FAILED:
            return ""
        return f"not noticed by {' '.join(mutation.tests)}" if code == 0 else f"pytest exit {code}: {last_line(output)}"


def last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="a random N of them")
    parser.add_argument("--seed", default="", help="of the sample")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these patches")
    parser.add_argument("--list", action="store_true", help="print what there is")
    args = parser.parse_args()

    mutations = [read(path) for path in sorted(PATCHES.glob("*.patch"))]
    if args.only:
        unknown = set(args.only) - {mutation.name for mutation in mutations}
        if unknown:
            parser.error(f"no such patch: {', '.join(sorted(unknown))}")
        mutations = [mutation for mutation in mutations if mutation.name in args.only]
    if args.list:
        for mutation in mutations:
            print(f"{mutation.name:32}{mutation.what}")
        return 0
    total = len(mutations)
    if args.sample is not None and args.sample < total:
        mutations = sorted(random.Random(args.seed).sample(mutations, args.sample), key=lambda mutation: mutation.name)

    survivors = 0
    with tempfile.TemporaryDirectory(prefix="crucible-mutations-") as folder:
        # One copy serves every patch of Python code: its place is part of Numba's cache key. A patch of compiled code
        # gets a copy of its own, so that no object file of one bug meets another.
        shared = copy_tree(Path(folder, "tree"))
        for number, mutation in enumerate(mutations):
            started = time.monotonic()
            tree = copy_tree(Path(folder, f"tree{number}")) if mutation.needs_build else shared
            why = verdict(mutation, tree, Path(folder, "cache"))
            survivors += bool(why)
            outcome, seconds = "SURVIVED" if why else "noticed", time.monotonic() - started
            print(f"{outcome:9}{mutation.name:32}{seconds:6.1f} s  {why or mutation.what}", flush=True)
            if tree is not shared:
                shutil.rmtree(tree)
    print(f"mutations: {len(mutations) - survivors} of {len(mutations)} noticed ({total} in all)")
    return 1 if survivors or not mutations else 0


if __name__ == "__main__":
    sys.exit(main())
