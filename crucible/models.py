"""Which directory a MODEL argument means, and where pulled models lie."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from crucible.config.paths import cache_directory
from crucible.errors import CheckpointError

DEFAULT_MODEL = "smollm2-135m-instruct"


def embedded_directory() -> Path | None:
    """The model inside the package, if this build has one."""
    path = Path(__file__).parent / "data" / "model"
    return path if (path / "config.json").is_file() else None


def pulled_directory(name: str) -> Path:
    """Where ``crucible pull NAME`` puts a model (``hf:ORG/NAME`` included), pulled or not.

    Raises CheckpointError for what cannot be such a name.
    """
    if not re.fullmatch(r"(hf:\w[\w.-]*/)?\w[\w.-]*", name):
        raise CheckpointError(f"{name!r} is neither a model directory nor the name of a model")
    return cache_directory() / "models" / name.replace(":", "--").replace("/", "--")


def resolve(model: str | Path | None) -> Path:
    """The directory that MODEL means: a directory, a pulled name, or with None the default model.

    The default is the embedded model, else smollm2-135m-instruct, which is then pulled if it has not been. Raises
    CheckpointError saying what to do.
    """
    if model is None:
        embedded = embedded_directory()
        if embedded is not None:
            return embedded
        from crucible.pull import pull

        return pull(DEFAULT_MODEL, progress=sys.stderr.isatty())
    path = Path(model)
    if path.is_dir() and str(model):
        return path
    if path.is_file():
        raise CheckpointError(f"{path}: a file, not a model directory; convert it: crucible import {path} DIRECTORY")
    directory = pulled_directory(str(model))
    if (directory / "config.json").is_file():
        return directory
    from crucible.pull import KNOWN_MODELS

    if str(model) in KNOWN_MODELS or str(model).startswith("hf:"):
        raise CheckpointError(f"{model} has not been pulled yet; run: crucible pull {model}")
    names = ", ".join(KNOWN_MODELS)
    raise CheckpointError(f"{model}: no such directory or pulled model; crucible pull knows {names} and hf:ORG/NAME")
