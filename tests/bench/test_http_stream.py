from __future__ import annotations

import pytest

from crucible.bench.http_stream import Address, Disconnected, EventParser, ProtocolError, ResponseParser
from crucible.errors import ConfigError

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4\r\nab\r\n\r\n5;x=y\r\ncdefg\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 429 Too Many\r\ncontent-length: 7\r\n\r\nabcdefg"
STREAM = (
    b": accepted\n\nevent: token\ndata: {\"a\":1}\n\n: ping\n\ndata: x\r\ndata: y\r\n\r\nevent: nothing\n\n"
    b"event: done\ndata:z\n\n"
)


def feed(parser: ResponseParser, *parts: bytes) -> bytes:
    return b"".join(parser.feed(part) for part in parts)


@pytest.mark.parametrize(("message", "body"), [(CHUNKED, b"ab\r\ncdefg"), (SIZED, b"abcdefg")])
def test_a_response_may_be_split_anywhere(message: bytes, body: bytes) -> None:
    for first in range(len(message) + 1):
        for second in (first, first + 1, first + 5):
            parser = ResponseParser()
            assert feed(parser, message[:first], message[first:second], message[second:]) == body
            assert parser.complete
            assert parser.keep_alive
    parser = ResponseParser()
    assert feed(parser, *[bytes([byte]) for byte in message]) == body
    assert parser.status == (200 if message is CHUNKED else 429)


def test_a_response_is_complete_only_at_its_end() -> None:
    for message in (CHUNKED, SIZED):
        parser = ResponseParser()
        parser.feed(message[:-1])
        assert not parser.complete
        with pytest.raises(Disconnected):
            parser.end()


def test_without_a_length_the_close_is_the_end() -> None:
    parser = ResponseParser()
    assert feed(parser, b"HTTP/1.0 200 OK\r\n\r\nab", b"c") == b"abc"
    assert not parser.complete
    parser.end()
    assert parser.complete
    assert not parser.keep_alive


def test_what_needs_no_body() -> None:
    for head in (b"HTTP/1.1 204 No\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"):
        parser = ResponseParser()
        assert parser.feed(head) == b""
        assert parser.complete
        assert parser.keep_alive == (b"204" in head)


@pytest.mark.parametrize(
    "message",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
    ],
)
def test_what_is_not_http(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(message)


def test_events_may_be_split_anywhere() -> None:
    expected = [(b"token", b'{"a":1}'), (b"", b"x\ny"), (b"done", b"z")]
    for cut in range(len(STREAM) + 1):
        parser = EventParser()
        assert parser.feed(STREAM[:cut]) + parser.feed(STREAM[cut:]) == expected
    parser = EventParser()
    assert [event for byte in STREAM for event in parser.feed(bytes([byte]))] == expected


def test_an_event_line_must_end() -> None:
    parser = EventParser()
    with pytest.raises(ProtocolError):
        parser.feed(b"data: " + b"x" * 2**21)


def test_address() -> None:
    address = Address.parse("http://[::1]:8080/base/")
    assert (address.host, address.port, address.secure, address.prefix) == ("::1", 8080, False, "/base")
    assert Address.parse("https://host").port == 443
    request = address.request("POST", "/v1/x", b"{}", {"A": "b"})
    assert request.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: [::1]:8080\r\n")
    assert request.endswith(b"Content-Length: 2\r\nA: b\r\n\r\n{}")


@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://x", "http://", "http://x:99999", "http://x/?q=1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="http"):
        Address.parse(url)
