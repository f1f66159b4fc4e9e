"""What the package promises about itself, checked without building it (CI builds and installs it)."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import crucible

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed() -> None:
    """An unlisted package works from the tree and is missing from the wheel."""
    found = {
        str(path.parent.relative_to(ROOT)).replace(os.sep, ".") for path in (ROOT / "crucible").rglob("__init__.py")
    }
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert found | {"crucible.cuda", "crucible_train"} == listed


def test_every_python_file_lies_in_a_package() -> None:
    for path in (ROOT / "crucible").rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path


def test_entry_points_exist() -> None:
    for target in PROJECT["project"]["scripts"].values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_compiled_modules_have_stubs() -> None:
    for source in (ROOT / "native").glob("*.pyx"):
        assert (ROOT / "crucible" / "native" / f"{source.stem}.pyi").exists(), source.name
        importlib.import_module(f"crucible.native.{source.stem}")


def test_the_public_names_are_lazy_and_there() -> None:
    assert crucible.SamplingParams(max_tokens=1).max_tokens == 1
    assert crucible.LLM.__name__ == "LLM"
    with pytest.raises(AttributeError, match="nonsense"):
        _ = crucible.nonsense
    assert re.fullmatch(r"\d+\.\d+\.\d+", crucible.__version__)


def readme_commands() -> list[str]:
    """The commands of the README's first screen, which are one line each."""
    return re.findall(r"^```sh\n(python3 .+)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE)[:2]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    """.ci/run extracts it; this is the same extraction, and it must find the second command."""
    script = (ROOT / ".ci" / "run").read_text()
    (extraction,) = re.findall(r"^test_command=\$\((sed .+)\)$", script, re.MULTILINE)
    found = subprocess.run(["bash", "-c", extraction], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.strip() == readme_commands()[1]
    assert found.strip().endswith("pytest")


def test_the_first_command_of_the_readme_asks_the_model() -> None:
    install, ask = readme_commands()[0].split(" && ")[1:]
    assert install == ".venv/bin/pip install -e ."
    assert ask.startswith(".venv/bin/crucible generate --prompt ")


def test_the_readme_names_only_files_that_exist() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_readme_and_the_changelog_name_every_command() -> None:
    from crucible.cli import build_parser

    (subparsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    readme, changelog = ((ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md"))
    for command in subparsers.choices:
        assert re.search(rf"`crucible {command}[ `]", readme), command
        assert re.search(rf"^- `crucible(`: .*\b{command}\b| {command}`)", changelog, re.MULTILINE), command


def test_only_the_configuration_reads_the_environment() -> None:
    for path in (ROOT / "crucible").rglob("*.py"):
        if path.parent != ROOT / "crucible" / "config":
            assert not re.search(r"\bos\.(environ|getenv)\b", path.read_text()), path


def test_mutations_are_well_formed() -> None:
    """Each patch names tests that exist; whether they notice is the runner's to find out."""
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "tests" / "mutations" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["mutations"] = runner  # dataclasses look the module up while it is loaded
    spec.loader.exec_module(runner)
    mutations = [runner.read(path) for path in sorted(runner.PATCHES.glob("*.patch"))]
    assert len(mutations) >= 12
    for mutation in mutations:
        for test in (argument for argument in mutation.tests if argument.startswith("tests/")):
            assert (ROOT / test.split("::")[0]).exists(), f"{mutation.name} names {test}"
        check = subprocess.run(
            ["git", "apply", "--check", "-p1", str(mutation.path)], cwd=ROOT, capture_output=True, text=True
        )
        assert check.returncode == 0, f"{mutation.name}: {check.stderr}"
