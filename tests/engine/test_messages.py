"""Frames: every message survives, however the byte stream is cut; broken peers are told apart."""

from __future__ import annotations

import itertools
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crucible.config import SamplingParams
from crucible.engine import messages as m
from crucible.errors import EngineError

ids = st.text(min_size=1, max_size=12)
counts = st.integers(0, 2**40)
to_engine = st.one_of(
    st.builds(
        m.Submit,
        ids,
        st.lists(st.integers(0, 2**31 - 1), max_size=20),
        st.builds(
            SamplingParams,
            max_tokens=st.none() | st.integers(1, 2**40),
            temperature=st.floats(1e-30, 100),
            seed=st.none() | st.integers(0, 2**64 - 1),
            ignore_eos=st.booleans(),
        ),
    ),
    st.builds(m.Cancel, ids),
    st.builds(m.MetricsRequest, counts),
)
from_engine = st.one_of(
    st.builds(m.Accepted, ids),
    st.builds(m.Rejected, ids, st.sampled_from(["queue_full", "invalid", "unavailable"]), st.text(), st.none() | ids),
    st.builds(
        m.StepOutput,
        st.lists(st.builds(m.TokenEvent, ids, st.integers(0, 2**31 - 1)), max_size=5),
        st.lists(st.builds(m.Finished, ids, st.sampled_from(["stop", "error"]), counts, counts, st.none() | st.text())),
    ),
    st.builds(m.MetricsReply, counts, st.dictionaries(st.text(), counts | st.floats(allow_nan=False), max_size=4)),
    st.builds(m.Failed, st.text()),
)


directions = st.one_of(
    st.tuples(st.just(m.ToEngine), st.lists(to_engine)), st.tuples(st.just(m.FromEngine), st.lists(from_engine))
)


@given(
    directions,
    st.lists(st.integers(0, 400), max_size=10),
)
def test_messages_survive_any_split_of_the_stream(sent: tuple[Any, list[msgspec.Struct]], cuts: list[int]) -> None:
    kind, expected = sent
    data = b"".join(m.frame(message) for message in expected)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader = m.FrameReader(kind)
    pieces = [data[start:end] for start, end in itertools.pairwise(bounds)]
    received = [message for piece in pieces for message in reader.feed(piece)]
    assert received == expected
    assert not reader.partial


def test_one_byte_at_a_time() -> None:
    reader = m.FrameReader(m.ToEngine)
    data = m.frame(m.Cancel("a")) + m.frame(m.Cancel("b"))
    received = [message for byte in data for message in reader.feed(bytes([byte]))]
    assert received == [m.Cancel("a"), m.Cancel("b")]


def test_a_frame_above_the_limit_is_refused_before_it_is_read() -> None:
    reader = m.FrameReader(m.ToEngine, limit=10)
    with pytest.raises(EngineError, match="frame of 11 bytes is above the limit of 10"):
        list(reader.feed((11).to_bytes(4, "big")))


def test_a_message_above_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MAX_FRAME_BYTES", 8)
    with pytest.raises(EngineError, match="above the limit"):
        m.frame(m.Cancel("x" * 9))


@pytest.mark.parametrize("body", [b"\xc1", b"\x91\xa4nope", m.frame(m.Accepted("a"))[4:], b""])
def test_a_broken_or_misdirected_frame_is_an_error(body: bytes) -> None:
    reader = m.FrameReader(m.ToEngine)
    with pytest.raises(EngineError, match="broken frame"):
        list(reader.feed(len(body).to_bytes(4, "big") + body))


def test_messages_before_a_broken_frame_still_arrive() -> None:
    reader = m.FrameReader(m.ToEngine)
    messages = reader.feed(m.frame(m.Cancel("a")) + b"\0\0\0\1\xc1")
    assert next(messages) == m.Cancel("a")
    with pytest.raises(EngineError):
        next(messages)


def test_receive_ends_at_the_end_of_file() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(m.frame(m.Cancel("a")) + m.frame(m.Cancel("b"))[:3])
        theirs.close()
        assert list(m.receive(ours, m.ToEngine)) == [m.Cancel("a")]
