"""Choosing and shortening the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crucible.tokenizer import Tokenizer
from crucible_train.errors import TrainingError
from crucible_train.vocabularies import load_vocabulary, padded, separator_id, truncated
from tests.train.prepared import byte_vocabulary

TEXT = "The quick brown fox's jumps — naïve café 12345 \U0001f600\n\n  indented\tcode() {}"


def test_all_ranks_are_the_whole_vocabulary() -> None:
    whole = load_vocabulary("gpt2")
    assert load_vocabulary("gpt2", 50256).to_bytes() == whole.to_bytes()
    assert (len(whole.tokens), separator_id(whole), padded(len(whole.tokens))) == (50257, 50256, 50304)


def test_a_shortened_vocabulary_encodes_by_the_same_merges() -> None:
    short = load_vocabulary("gpt2", 1000)
    assert separator_id(short) == 1000
    assert len(short.tokens) == 1001
    tokenizer, whole = Tokenizer(short), Tokenizer.gpt2()
    ids = tokenizer.encode(TEXT)
    assert max(ids) < 1000
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) > len(whole.encode(TEXT))
    # Each of its tokens is what the whole vocabulary would have joined next.
    assert tokenizer.encode("<|endoftext|>") != [1000]
    assert tokenizer.encode(" the") == whole.encode(" the")


@pytest.mark.parametrize("size", [0, 255, 50257, 65537])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(TrainingError, match=f"--vocabulary-size {size}.*256 to 50256"):
        load_vocabulary("gpt2", size)


def test_only_ranked_vocabularies_are_shortened() -> None:
    merged = replace(byte_vocabulary(4), merges=np.array([[0, 0]], np.uint32))
    with pytest.raises(TrainingError, match="only a ranked vocabulary"):
        truncated(merged, 256)
    shuffled = replace(byte_vocabulary(1), tokens=[b"ab", *byte_vocabulary().tokens[1:256], b"\0", b"<|endoftext|>"])
    with pytest.raises(TrainingError, match="byte 0x00 is not among"):
        truncated(shuffled, 256)


def test_vocabularies_come_from_files_and_directories(tmp_path: Path) -> None:
    data = byte_vocabulary(3).to_bytes()
    (tmp_path / "tokenizer.vocab").write_bytes(data)
    assert load_vocabulary(tmp_path / "tokenizer.vocab").to_bytes() == data
    assert load_vocabulary(tmp_path).to_bytes() == data
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, what in (("missing", "missing"), ("tokenizer.json", r"tokenizer\.json"), ("none.json", r"none\.json")):
        with pytest.raises(TrainingError, match=what):
            load_vocabulary(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match="neither"):
        load_vocabulary(tmp_path / "empty")


def test_a_separator_must_be_a_special_token() -> None:
    with pytest.raises(TrainingError, match=r"--separator </s>.*it has <\|endoftext\|>"):
        separator_id(byte_vocabulary(), "</s>")
