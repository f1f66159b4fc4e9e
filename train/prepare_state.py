"""How far a preparation is, and where the next one goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from crucible_train.errors import TrainingError
from crucible_train.files import write_atomically
from crucible_train.manifest import MANIFEST_FILE, SPLITS, Manifest, Settings, SourceInfo, read_manifest
from crucible_train.sources import Source

STATE_FILE = ".prepare.json"


class SplitCount(msgspec.Struct):
    """What a split holds so far."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0


class State(msgspec.Struct):
    """How far the work is: the shards are good to ``splits``; of source ``len(sources)`` so many blocks are in."""

    settings: Settings
    stamps: list[int]
    splits: dict[str, SplitCount]
    sources: list[SourceInfo] = []
    blocks: int = 0
    documents: int = 0
    empty: int = 0
    cut: int = 0

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())


def begin(directory: Path, settings: Settings, sources: Sequence[Source], restart: bool) -> State | Manifest:
    """Where to go on: the state of unfinished work, a fresh one, or the manifest of what is finished already."""
    if (directory / MANIFEST_FILE).exists():
        manifest = read_manifest(directory)
        _check_same(directory, manifest.settings, settings)
        for source, info in zip(sources, manifest.sources, strict=False):
            if source.size and source.sha256() != info.sha256:
                raise TrainingError(f"{source.name}: changed since {directory} was made of it; choose another --out")
        (directory / STATE_FILE).unlink(missing_ok=True)
        return manifest
    fresh = State(settings, [source.stamp for source in sources], {split: SplitCount() for split in SPLITS})
    path = directory / STATE_FILE
    if path.exists() and not restart:
        try:
            state = msgspec.json.decode(path.read_bytes(), type=State)
        except (msgspec.DecodeError, UnicodeDecodeError, OSError):
            raise TrainingError(f"{path}: unreadable; begin again with --restart") from None
        _check_same(directory, state.settings, settings)
        for source, stamp in zip(sources, state.stamps, strict=True):
            if source.stamp != stamp:
                raise TrainingError(f"{source.name}: changed since it was begun with; begin again with --restart")
        return state
    if not path.exists() and any(entry.name != f".{STATE_FILE}.tmp" for entry in directory.iterdir()):
        raise TrainingError(f"{directory}: not empty and not prepared data; choose another --out")
    write_atomically(path, msgspec.json.encode(fresh))
    return fresh


def _check_same(directory: Path, there: Settings, asked: Settings) -> None:
    for name in Settings.__struct_fields__:
        old, new = getattr(there, name), getattr(asked, name)
        if old != new:
            shown = f"{name} {old}, not {new}" if name != "inputs" else "inputs that differ in name, size or order"
            raise TrainingError(f"{directory}: holds data of other settings ({shown}); choose another --out")
