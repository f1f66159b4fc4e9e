"""``prepare``: text to token shards, on all cores, in bounded memory, the same bytes whatever the number of processes.

The main process reads blocks of documents; workers encode them; the main process appends what they made in reading
order. Every few seconds the shards are synced and a small state file says how far they are good: a run that was
killed cuts them back to it, reads over the blocks that are in, and goes on. The manifest is written last.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from crucible.tokenizer import VOCABULARY_FILE
from crucible.vocabulary import Vocabulary
from crucible_train.documents import SPLIT_RULE, Encoded, EncodeJob
from crucible_train.encoder_pool import EncoderPool
from crucible_train.errors import TrainingError
from crucible_train.files import locked, write_atomically
from crucible_train.manifest import (
    MANIFEST_FILE,
    SPLITS,
    VERSION,
    Manifest,
    Settings,
    SourceInfo,
    SplitInfo,
)
from crucible_train.prepare_progress import PrepareProgress
from crucible_train.prepare_state import STATE_FILE, State, begin
from crucible_train.shard_writer import ShardWriter
from crucible_train.shards import token_dtype
from crucible_train.sources import BLOCK_BYTES, DOCUMENT_BYTES, Source, find_sources
from crucible_train.vocabularies import SEPARATOR, load_vocabulary, padded, separator_id

SYNC_SECONDS = 3.0
IN_FLIGHT_BYTES = 48 << 20
"""Text that is with the workers at most, unless a single block is more."""
SHARD_TOKENS = 100_000_000
VAL_FRACTION = 0.01
MAX_PROCESSES = 16
"""By default: one reader cannot feed more, and each takes some 60 MB."""


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    vocabulary: str | Path | Vocabulary = "gpt2",
    vocabulary_size: int | None = None,
    separator: str = SEPARATOR,
    text_field: str = "text",
    val_fraction: float = VAL_FRACTION,
    shard_tokens: int = SHARD_TOKENS,
    limit_tokens: int | None = None,
    processes: int | None = None,
    restart: bool = False,
    progress: bool = False,
    hub: Source | None = None,
) -> Manifest:
    """Writes the shards of ``inputs`` (and of the Hub dataset ``hub``) to the directory ``out``; its manifest.

    ``vocabulary_size``: see vocabularies.truncated. ``limit_tokens``: end with the document that reaches it, counting
    both splits. ``processes``: default all cores, one for little text. ``restart``: drop unfinished work. A directory
    that was finished with these settings is left as it is. Raises TrainingError for bad input and settings.
    """
    if not 0 <= val_fraction < 1:
        raise TrainingError(f"--val-fraction {val_fraction}: must be 0 or more and less than 1")
    for flag, value in (("shard-tokens", shard_tokens), ("tokens", limit_tokens), ("processes", processes)):
        if value is not None and value < 1:
            raise TrainingError(f"--{flag} {value}: must be at least 1")
    chosen = vocabulary if isinstance(vocabulary, Vocabulary) else load_vocabulary(vocabulary, vocabulary_size)
    sources: list[Source] = [*find_sources(inputs, text_field), *([hub] if hub else [])]
    if not sources:
        raise TrainingError("nothing to prepare: give files, directories or a dataset")
    data = chosen.to_bytes()
    settings = Settings(
        vocabulary_sha256=hashlib.sha256(data).hexdigest(),
        separator=separator,
        text_field=text_field,
        val_fraction=val_fraction,
        shard_tokens=shard_tokens,
        limit_tokens=limit_tokens,
        block_bytes=BLOCK_BYTES,
        document_bytes=DOCUMENT_BYTES,
        inputs=[(source.name, source.size) for source in sources],
    )
    separated_by = separator_id(chosen, separator)
    directory = Path(out)
    with locked(directory, "another prepare is writing there; wait for it"):
        state = begin(directory, settings, sources, restart)
        if isinstance(state, Manifest):
            return state
        write_atomically(directory / VOCABULARY_FILE, data)
        job = EncodeJob(directory / VOCABULARY_FILE, separated_by, text_field, val_fraction)
        work = Preparation(directory, state, sources, job, len(chosen.tokens))
        return work.run(processes or default_processes(sources), progress)


def default_processes(sources: Sequence[Source]) -> int:
    """All cores that this process may use; one where starting others takes longer than the work."""
    sizes = [source.size for source in sources]
    return 1 if all(sizes) and sum(sizes) < 4 * BLOCK_BYTES else min(len(os.sched_getaffinity(0)), MAX_PROCESSES)


@dataclass
class _Sent:
    """A block that is with the workers, or (``result`` is None) the end of a source."""

    source: int
    position: int
    size: int
    result: Future[Encoded] | None


class Preparation:
    """One run over the sources. What is saved is never ahead of the shards."""

    def __init__(self, directory: Path, state: State, sources: Sequence[Source], job: EncodeJob, id_count: int) -> None:
        self._directory = directory
        self._state = state
        self._sources = sources
        self._job = job
        self._id_count = id_count
        self._writers = {
            split: ShardWriter(
                directory,
                split,
                id_count=id_count,
                separator_id=job.separator_id,
                vocabulary_sha256=bytes.fromhex(state.settings.vocabulary_sha256),
                shard_tokens=state.settings.shard_tokens,
                written=state.splits[split].tokens,
            )
            for split in SPLITS
        }

    def run(self, processes: int, progress: bool) -> Manifest:
        """Works to the end; whatever stops it, what was saved last is there for the next run."""
        done = sum(source.size for source in self._sources[: len(self._state.sources)])
        total = sum(source.size for source in self._sources)
        limit = self._state.settings.limit_tokens
        with PrepareProgress(progress, total, limit, self._state.tokens) as bar, EncoderPool(processes) as pool:
            try:
                saved = time.monotonic()
                for sent in self._ahead(pool) if not self._enough() else ():
                    if sent.result is None:
                        self._end_source()
                        done += self._sources[sent.source].size
                    else:
                        self._take(pool.result(sent.result))
                        bar.update(self._state.tokens, done + sent.position)
                        if self._enough():
                            self._end_source()
                            break
                    if time.monotonic() - saved > SYNC_SECONDS:
                        self._save()
                        saved = time.monotonic()
            except BaseException:  # not saved: an interrupt may have come in the middle of a block
                for writer in self._writers.values():
                    writer.abandon()
                raise
        return self._finish()

    def _ahead(self, pool: EncoderPool) -> Iterator[_Sent]:
        """The blocks in order, a bounded number of them with the workers."""
        sent: deque[_Sent] = deque()
        first = len(self._state.sources)
        skip = self._state.blocks
        for number in range(first, len(self._sources)):
            position = 0
            for index, block in enumerate(self._sources[number].blocks()):
                position = block.position
                if number == first and index < skip:
                    continue
                sent.append(_Sent(number, position, block.size, pool.submit(self._job, block)))
                while len(sent) > pool.window or (sent and sum(item.size for item in sent) > IN_FLIGHT_BYTES):
                    yield sent.popleft()
            sent.append(_Sent(number, position, 0, None))
        yield from sent

    def _enough(self) -> bool:
        limit = self._state.settings.limit_tokens
        return limit is not None and self._state.tokens >= limit

    def _take(self, encoded: Encoded) -> None:
        """Appends a block, not past the document that reaches the limit."""
        state, limit = self._state, self._state.settings.limit_tokens
        if limit is not None:
            ends = state.tokens + encoded.lengths.cumsum()
            encoded = encoded.first(int((ends < limit).sum()) + 1)
        for split, ids, chosen in (("train", encoded.train, ~encoded.in_val), ("val", encoded.val, encoded.in_val)):
            self._writers[split].append(ids)
            count = state.splits[split]
            count.tokens += len(ids)
            count.documents += int(chosen.sum())
            count.bytes += int(encoded.text_bytes[chosen].sum())
        state.blocks += 1
        state.documents += len(encoded.lengths)
        state.empty += encoded.empty
        state.cut += encoded.cut

    def _end_source(self) -> None:
        source, state = self._sources[len(self._state.sources)], self._state
        if not state.documents:
            raise TrainingError(f"{source.name}: no text in it; leave it out")
        state.sources.append(SourceInfo(source.name, source.format, source.size, source.sha256(), state.documents))
        state.blocks = state.documents = 0

    def _save(self) -> None:
        for writer in self._writers.values():
            writer.sync()
        write_atomically(self._directory / STATE_FILE, msgspec.json.encode(self._state))

    def _finish(self) -> Manifest:
        self._save()
        splits = {}
        for split, count in self._state.splits.items():
            splits[split] = SplitInfo(count.tokens, count.documents, count.bytes, self._writers[split].finish())
        manifest = Manifest(
            version=VERSION,
            settings=self._state.settings,
            dtype=token_dtype(self._id_count).name,
            token_count=self._id_count,
            vocab_size=padded(self._id_count),
            separator_id=self._job.separator_id,
            split_rule=SPLIT_RULE,
            splits=splits,
            sources=self._state.sources,
            empty_documents=self._state.empty,
            cut_documents=self._state.cut,
        )
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        write_atomically(self._directory / MANIFEST_FILE, text + b"\n")
        (self._directory / STATE_FILE).unlink()
        return manifest
