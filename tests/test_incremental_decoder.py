from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.errors import TokenizerError
from crucible.tokenizer import IncrementalDecoder, Tokenizer, Vocabulary

BYTES = Tokenizer(Vocabulary("gpt2", [*(bytes([byte]) for byte in range(256)), b"<end>"], frozenset([256])))
GPT2 = Tokenizer.gpt2()


def pushed(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special=skip_special)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


sequences = st.sampled_from([b"a", "é".encode(), "日".encode(), "😊".encode()])
broken = st.sampled_from(
    [b"\x80", b"\xc0", b"\xe0\x80", b"\xed\xa0", b"\xf0\x8f", b"\xf4\x90", b"\xf0\x9f\x98", b"\xff"]
)


@settings(max_examples=1000, deadline=None)
@given(data=st.one_of(st.binary(max_size=12), st.lists(sequences | broken, max_size=6).map(b"".join)))
def test_pieces_join_to_the_batch_decode(data: bytes) -> None:
    assert "".join(pushed(BYTES, list(data))) == data.decode("utf-8", errors="replace")


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 50256), max_size=20))
def test_random_tokens_join_to_the_batch_decode(ids: list[int]) -> None:
    for skip in (False, True):
        assert "".join(pushed(GPT2, ids, skip_special=skip)) == GPT2.decode(ids, skip_special=skip)


@pytest.mark.parametrize("text", ["plain", "né", "日本", "a😊b\u2028", "\U0010ffff\ud7ff\ue000"])
def test_a_character_comes_with_its_last_byte(text: str) -> None:
    data = text.encode()
    for count, pieces in enumerate(zip(*[iter(pushed(BYTES, list(data)))], strict=True), start=0):
        assert len(pieces) == 1
        expected = "".join(pushed(BYTES, list(data))[: count + 1])
        assert expected == data[: count + 1].decode("utf-8", errors="ignore")


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\xed\xa0\x80x", ["", "��", "�", "x", ""]),  # a surrogate is known to be none at its second byte
        (b"\xe2\x80A", ["", "", "�A", ""]),
        (b"\xf0\x80\x80A", ["", "��", "�", "A", ""]),
        (b"\xe2\xe2\xe2", ["", "�", "�", "�"]),
        (b"\x80\x80 ", ["�", "�", " ", ""]),
        (b"\xe0\x80", ["", "��", ""]),
        (b"\xf0\x8f", ["", "��", ""]),
        (b"\xc1a", ["�", "a", ""]),
        (b"\xf4\x90", ["", "��", ""]),
        (b"\xf0\x9f\x98", ["", "", "", "�"]),
    ],
)
def test_bytes_are_held_only_while_they_may_become_a_character(data: bytes, pieces: list[str]) -> None:
    assert pushed(BYTES, list(data)) == pieces


def test_special_tokens() -> None:
    ids = [0xC3, 256, 0xA9]
    assert pushed(BYTES, ids) == ["", "", "é", ""]
    assert pushed(BYTES, ids, skip_special=False) == ["", "�<end>", "�", ""]


def test_flush_ends_one_text() -> None:
    decoder = IncrementalDecoder(BYTES)
    assert decoder.push(0xC3) == ""
    assert decoder.flush() == "�"
    assert decoder.flush() == ""
    assert decoder.push(0x61) == "a"
    with pytest.raises(TokenizerError, match="token id 999 has no token"):
        decoder.push(999)


def test_an_id_that_the_vocabulary_leaves_out_has_no_text() -> None:
    holes = Tokenizer(Vocabulary("gpt2", [*(bytes([byte]) for byte in range(256)), b"", b"<end>"], frozenset([257])))
    assert pushed(holes, [0x61, 256, 0xC3, 256, 0xA9, 256]) == ["a", "", "", "", "é", "", ""]
    for outside in (258, -1):
        with pytest.raises(TokenizerError):
            IncrementalDecoder(holes).push(outside)
