"""Exported vocabularies give the ids that ours gives: read back by ourselves, by tokenizers and by tiktoken."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.errors import CrucibleError
from crucible.tokenizer import Tokenizer, Vocabulary
from crucible_train.errors import TrainingError
from crucible_train.export_tokenizer import (
    check_same,
    export_tokenizer,
    merges,
    spelled,
    tiktoken_ranks,
    tokenizer_json,
    unreachable,
)
from crucible_train.vocabularies import load_vocabulary, truncated

GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2 = load_vocabulary("gpt2")
SMALL = truncated(GPT2, 2048)
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=12), st.sampled_from([" the", "  ", "\n\n", "'ll", " 12345", "naïve", " don't", "\t x"])
    ),
    max_size=12,
).map("".join)


def hugging_face(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_json(vocabulary).decode())


SMALL_JSON = hugging_face(SMALL)


def test_gpt2s_merges_follow_from_its_ranks() -> None:
    pairs = merges(GPT2)
    assert len(pairs) == 50000
    assert [f"{spelled(left)} {spelled(right)}" for left, right in pairs[:4]] == ["Ġ t", "Ġ a", "h e", "i n"]
    assert [left + right for left, right in pairs] == list(GPT2.tokens[256:50256])
    assert unreachable(GPT2, pairs) == 0


def test_the_rank_file_is_tiktokens_own() -> None:
    assert hashlib.sha256(tiktoken_ranks(GPT2)).hexdigest() == GPT2_SHA256


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_a_shortened_vocabulary_encodes_alike_everywhere(text: str) -> None:
    ids = Tokenizer(SMALL).encode(text)
    assert SMALL_JSON.encode(text, add_special_tokens=False).ids == ids or "<|endoftext|>" in text
    ranks = {SMALL.tokens[number]: number for number in range(2048)}
    pattern = tiktoken_pattern()
    theirs = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 2048})
    assert theirs.encode_ordinary(text) == ids


def tiktoken_pattern() -> str:
    from crucible.foreign_vocabulary import SPLIT_PATTERNS

    return next(regex for regex, name in SPLIT_PATTERNS.items() if name == "gpt2")


@pytest.mark.parametrize("pattern", ["gpt2", "smollm", "llama3", "qwen2"])
def test_every_pattern_survives_the_way_through_tokenizers(pattern: str) -> None:
    explicit = np.array([[SMALL.tokens.index(part) for part in pair] for pair in merges(SMALL)], np.uint32)
    vocabulary = Vocabulary(
        pattern, SMALL.tokens, SMALL.special, merges=explicit, whole_pieces=pattern == "llama3", nfc=pattern == "qwen2"
    )
    text = "Hello  World's 12345 naïve\n\n\tfoo  \u0065\u0301 don'T x"
    ids = Tokenizer(vocabulary).encode(text)
    assert hugging_face(vocabulary).encode(text, add_special_tokens=False).ids == ids
    check_same(vocabulary, tokenizer_json(vocabulary))
    again = Vocabulary.from_tokenizer_json(tokenizer_json(vocabulary))
    assert (again.pattern, again.nfc, again.special) == (pattern, vocabulary.nfc, vocabulary.special)
    assert list(again.tokens) == list(vocabulary.tokens)


def test_whole_pieces_stay_whole_in_tokenizers() -> None:
    pairs = np.array([[SMALL.tokens.index(part) for part in pair] for pair in merges(SMALL)], np.uint32)
    for whole in (True, False):
        vocabulary = Vocabulary("llama3", [*SMALL.tokens, b"Qxzj"], SMALL.special, merges=pairs, whole_pieces=whole)
        ids = hugging_face(vocabulary).encode("Qxzj").ids
        assert (ids == [2049]) is whole
        assert ids == Tokenizer(vocabulary).encode("Qxzj")


def test_what_goes_before_a_text_and_added_tokens_survive() -> None:
    tokens = [*SMALL.tokens, b"<tool>", b"<s>"]
    vocabulary = Vocabulary("gpt2", tokens, frozenset({2048, 2050}), frozenset({2049}), prefix_ids=(2050,))
    again = Vocabulary.from_tokenizer_json(tokenizer_json(vocabulary))
    assert (again.prefix_ids, again.added, again.special) == ((2050,), {2049}, {2048, 2050})
    assert hugging_face(vocabulary).encode("a<tool>b").ids == Tokenizer(vocabulary).encode_prompt("a<tool>b")


def test_a_special_token_spelled_like_another_is_refused() -> None:
    vocabulary = Vocabulary("gpt2", [*SMALL.tokens[:2048], b"the"], frozenset({2048}))
    with pytest.raises(TrainingError, match="'the' is spelled like token"):
        tokenizer_json(vocabulary)


def test_merges_out_of_rank_order_have_no_rank_file() -> None:
    pairs = np.array([[SMALL.tokens.index(part) for part in pair] for pair in merges(SMALL)], np.uint32)
    same = Vocabulary("gpt2", SMALL.tokens, SMALL.special, merges=pairs, whole_pieces=False)
    assert tiktoken_ranks(same) == tiktoken_ranks(SMALL)
    other = Vocabulary("gpt2", SMALL.tokens, SMALL.special, merges=pairs[::-1].copy(), whole_pieces=False)
    with pytest.raises(TrainingError, match="not in the order of its ids"):
        tiktoken_ranks(other)


def test_formats_by_suffix_and_one_line_for_faults(tmp_path: Path) -> None:
    for name in ("t.json", "t.tiktoken", "t.vocab"):
        written = export_tokenizer("gpt2", tmp_path / name)
        assert name == "t.tiktoken" or Tokenizer.from_file(written).encode("The World") == [464, 2159]
    assert export_tokenizer(tmp_path / "t.vocab", tmp_path / "x", "tiktoken").read_bytes() == tiktoken_ranks(GPT2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.tiktoken", "t.vocab", "x"]
    for source, target, words in [
        ("gpt2", tmp_path / "y", "which format"),
        (tmp_path / "none.vocab", tmp_path / "y.json", "none.vocab"),
        (tmp_path, tmp_path / "y.json", "neither a run directory nor a model directory"),
        ("gpt2", tmp_path / "t.json" / "z.json", "cannot be written"),
    ]:
        with pytest.raises(CrucibleError, match=re.escape(words)) as caught:
            export_tokenizer(source, target)
        assert "\n" not in str(caught.value)
