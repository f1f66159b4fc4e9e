"""``crucible bench tokenizer``: encoding speed of one thread, against tiktoken where it is installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crucible.bench.report import Column, Report, Row, Table
from crucible.bench.statistics import alternating, paired_ratios, summarize, verdict
from crucible.errors import TokenizerError
from crucible.models import resolve
from crucible.tokenizer import Tokenizer

COLUMNS = (
    Column("encoder", "encoder"),
    Column("mb_s", "MB/s", ",.2f", detail=True),
    Column("tok_s", "tokens/s", ",.0f"),
    Column("bytes_a_token", "bytes/token"),
)
RATIO_COLUMNS = (
    Column("pair", "pair"),
    Column("ratio", "ratio", ",.2f", detail=True),
    Column("verdict", "verdict"),
)


@dataclass
class Encoder:
    """``make``: a function from text to something whose length is the number of tokens. Made anew for each trial, so
    that nothing an encoder remembers of the text is left from the last one."""

    name: str
    make: Callable[[], Callable[[str], Any]]


def tokenizer(
    model: str | None,
    command: str,
    say: Callable[[str], None],
    *,
    data: str | None,
    megabytes: float,
    trials: int,
) -> Report:
    """Each encoder once a trial over the same text, in alternating order."""
    report = Report("tokenizer", command, trials)
    text = load_text(data, megabytes)
    size = len(text.encode())
    encoders = choose(model, report)
    report.settings |= {"text": data or "Python's own help topics", "bytes": size}
    counts = {encoder.name: len(encoder.make()(text)) for encoder in encoders}  # also the warm-up
    if len(set(counts.values())) > 1:
        raise TokenizerError(f"the encoders disagree about the number of tokens: {counts}")
    results: list[list[dict[str, float | None]]] = [[] for _ in encoders]
    for trial in range(trials):
        for index in alternating(len(encoders), trial):
            encoder = encoders[index]
            say(f"trial {trial + 1}/{trials}, {encoder.name}")
            encode = encoder.make()
            begin = time.perf_counter()
            tokens = len(encode(text))
            seconds = time.perf_counter() - begin
            results[index].append(
                {"mb_s": size / 1e6 / seconds, "tok_s": tokens / seconds, "bytes_a_token": size / tokens}
            )
    rows: list[Row] = [
        {"encoder": encoder.name, **summarize(result)} for encoder, result in zip(encoders, results, strict=True)
    ]
    report.tables.append(Table("Encoding, one thread", COLUMNS, rows))
    if len(encoders) > 2:
        pairs: list[Row] = []
        for encoder, result in zip(encoders[:-1], results[:-1], strict=True):
            ratio = paired_ratios([t["mb_s"] for t in result], [t["mb_s"] for t in results[-1]])
            if ratio is not None:
                name = f"{encoder.name} / {encoders[-1].name}"
                pairs.append({"pair": name, "ratio": ratio, "verdict": verdict(ratio)})
        report.tables.append(Table("Against tiktoken, paired within each trial", RATIO_COLUMNS, pairs))
    report.finish()
    return report


def choose(model: str | None, report: Report) -> list[Encoder]:
    """Ours, and for GPT-2's vocabulary tiktoken over the same ranks (it would fetch its own) as the last."""
    path = None if model is None else resolve(model)

    def load() -> Tokenizer:
        return Tokenizer.gpt2() if path is None else Tokenizer.for_checkpoint(path)

    encoders = [
        Encoder("crucible, list", lambda: load().encode),
        Encoder("crucible, array", lambda: load().encode_array),
    ]
    report.settings["vocabulary"] = model or "GPT-2"
    if model is not None or importlib.util.find_spec("tiktoken") is None:
        report.notes.append("tiktoken is compared where it is installed and the vocabulary is GPT-2's (no MODEL)")
        return encoders
    tiktoken: Any = importlib.import_module("tiktoken")
    pattern = getattr(importlib.import_module("tiktoken_ext.openai_public"), "r50k_pat_str", None)
    if pattern is None:
        report.notes.append("this tiktoken does not name GPT-2's pattern (r50k_pat_str), so it is not compared")
        return encoders
    ours = load()
    special = ours.special_tokens
    ranks = {ours.token_bytes(i): i for i in range(ours.token_count) if i not in ours.special_ids}
    theirs = tiktoken.Encoding("gpt2-ranks", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    report.settings["tiktoken"] = importlib.metadata.version("tiktoken")
    return [*encoders, Encoder("tiktoken, list", lambda: theirs.encode_ordinary)]


def load_text(data: str | None, megabytes: float) -> str:
    """At most ``megabytes`` of the file, cut between characters; without a file, Python's help topics (English prose).

    Raises TokenizerError for what is not UTF-8, OSError.
    """
    limit = round(megabytes * 1e6)
    if data is None:
        topics: Any = importlib.import_module("pydoc_data.topics")
        raw = "\n\n".join(topics.topics.values()).encode()[:limit]
    else:
        with Path(data).open("rb") as file:
            raw = file.read(limit)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if len(raw) < limit or error.start < len(raw) - 3:
            raise TokenizerError(
                f"{data} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}"
            ) from None
        text = raw[: error.start].decode("utf-8")
    if not text:
        raise TokenizerError(f"{data}: no text in it")
    return text
