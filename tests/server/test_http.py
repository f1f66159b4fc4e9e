"""HTTP itself: methods, errors of every route in one shape, framing, sizes, slow clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from crucible.server import http
from crucible.server.http import HEADER_S, LINGER_S, HttpServer
from crucible.server.service import bind
from tests.server.test_native_api import refusal
from tests.serving import Running, eventually

BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
POSTS = ("/v1/generate", "/v1/generate/stream")
GETS = ("/health", "/metrics")


LINE = b"POST /v1/generate HTTP/1.1"


def request(headers: bytes, body: bytes = b"", line: bytes = LINE, host: bytes = b"Host: x\r\n") -> bytes:
    """A raw request."""
    return line + b"\r\n" + host + headers + b"\r\n" + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> str:
    """The message of a raw answer's JSON error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head.lower()
    return str(json.loads(body)["error"]["message"])


def test_health(service: Running) -> None:
    response = service.get("/health")
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok", "version": "0.1.0", "model": "fake", "device": "cpu", "dtype": "float32", "quant": "f32",
        "max_batch": 8, "max_queue": 8, "context": 512, "vocab_size": 264, "parameters": 0, "step_age_s": 0.0,
        "chat_template": True,
        "sampling": {"temperature": 0.0, "top_k": 40, "seed": 1234, "max_tokens": 256},
    }


def test_metrics_are_numbers(service: Running) -> None:
    values = service.metrics()
    assert {"active_requests", "queued_requests", "kv_pages_used", "rejected_requests", "uptime_s"} <= set(values)
    assert all(isinstance(value, (int, float)) for value in values.values())


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_the_body(service: Running, path: str) -> None:
    head, got = service.http.head(path), service.get(path)
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize("path", [*POSTS, *GETS])
def test_options_lists_the_methods(service: Running, path: str) -> None:
    response = service.http.options(path)
    assert response.status_code in (200, 204)
    assert ("POST" if path in POSTS else "GET") in response.headers["allow"]
    assert response.content == b""


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "POST", "HEAD"])
@pytest.mark.parametrize("path", [*POSTS, *GETS])
def test_a_wrong_method_is_405_with_allow(service: Running, path: str, method: str) -> None:
    right = ("POST",) if path in POSTS else ("GET", "HEAD")
    if method in right:
        return
    response = service.http.request(method, path)
    assert response.status_code == 405
    assert right[0] in response.headers["allow"]
    if method != "HEAD":
        assert method in refusal(response, 405)


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/nothing", "/v1/generate/", "/health/x", "/%00", "/%ff%fe", "/a b?x=%ff"]
)
def test_an_unknown_path_is_a_json_404(service: Running, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        refusal(service.http.request(method, path), 404)


def test_a_strange_method_is_refused_in_json(service: Running) -> None:
    answer = service.raw(request(b"Connection: close\r\n", line=b"BREW /v1/generate HTTP/1.1"))
    assert status_of(answer) in (400, 405, 501)
    assert error_of(answer)


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json", None]
)
def test_json_and_no_content_type_are_taken(service: Running, kind: str | None) -> None:
    header = b"" if kind is None else b"Content-Type: " + kind.encode() + b"\r\n"
    answer = service.raw(request(header + b"Connection: close\r\nContent-Length: %d\r\n" % len(BODY), BODY))
    assert status_of(answer) == 200


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"])
def test_what_a_web_page_could_send_across_sites_is_415(service: Running, kind: str) -> None:
    response = service.http.post("/v1/generate", content=BODY, headers={"Content-Type": kind})
    assert "application/json" in refusal(response, 415)


def test_a_compressed_body_is_415(service: Running) -> None:
    refusal(service.http.post("/v1/generate", content=BODY, headers={"Content-Encoding": "gzip"}), 415)


def test_a_chunked_body_is_read(service: Running) -> None:
    response = service.http.post("/v1/generate", content=iter([BODY[:5], BODY[5:]]))
    assert response.json()["text"] == "hi"


def test_pipelined_requests_are_answered_in_order(service: Running) -> None:
    chunked = request(b"Transfer-Encoding: chunked\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
    health = request(b"", line=b"GET /health HTTP/1.1")
    last = request(b"Connection: close\r\nContent-Length: %d\r\n" % len(BODY), BODY)
    answer = service.raw(chunked + health + last)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.find(b'"text"') < answer.find(b'"status"') < answer.rfind(b'"text"')


@pytest.mark.parametrize(
    "data",
    [
        request(b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n"),
        request(b"Content-Length: 2\r\n", b"{}", host=b""),
        request(b"Content-Length: 2\r\n", b"{}", host=b"Host: a\r\nHost: b\r\n"),
        request(b"Content-Length: -1\r\n"),
        request(b"Content-Length: 2\r\nContent-Length: 3\r\n", b"{}"),
        request(b"Content-Length: x\r\n"),
        request(b"bad header\r\n"),
        request(b"", line=b"nonsense"),
        request(b"Transfer-Encoding: gzip\r\n"),
        request(b"Transfer-Encoding: chunked\r\n", b"zz\r\n"),
        request(b"Transfer-Encoding: chunked\r\n", b"1;" + b"a" * 2**20),
        request(b"Transfer-Encoding: chunked\r\n", b"0\r\nX: " + b"a" * 2**20),
        request(b"Content-Length: " + b"9" * 5000 + b"\r\n"),
        request(b"", line=b"GET http://[::1/health HTTP/1.1"),
        request(b"", line=b"GET /health HTTP/2.0"),
        request(b"X: " + b"a" * 70_000 + b"\r\n"),
        request(b"X: " + b"a" * 2**23 + b"\r\n"),
        request(b"", b"a" * 2**23, line=b"no request"),
    ],
)
def test_broken_framing_is_refused_in_json_and_the_connection_closed(service: Running, data: bytes) -> None:
    started = time.monotonic()
    answer = service.raw(data)
    assert time.monotonic() - started < 4, "the connection was kept open"
    assert status_of(answer) in (400, 431, 501)
    assert error_of(answer)


def test_a_body_that_is_too_large_gets_a_413_its_client_can_read(service: Running) -> None:
    refusal(service.http.post("/v1/generate", content=b"a" * (17 * 2**20)), 413)
    answer = service.raw(request(b"Content-Length: %d\r\n" % (17 * 2**20), b"a" * (17 * 2**20)))
    assert status_of(answer) == 413  # also for a client that first sends all of it
    assert service.post(prompt="a", max_tokens=1).status_code == 200


def test_a_large_body_within_the_limit_is_read(service: Running) -> None:
    body = b'{"prompt":"a","max_tokens":1}' + b" " * (15 * 2**20)
    assert service.http.post("/v1/generate", content=body).status_code == 200


def test_expect_continue(service: Running) -> None:
    with socket.create_connection(service.address, timeout=5) as connection:
        connection.sendall(request(b"Expect: 100-continue\r\nContent-Length: %d\r\n" % len(BODY)))
        assert b"100 Continue" in connection.recv(1000)
        connection.sendall(BODY)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    answer = service.raw(request(b"Expect: 100-continue\r\nContent-Length: 99999999\r\n"))
    assert status_of(answer) == 413


def test_idle_and_half_sent_requests_stop_nobody(service: Running) -> None:
    slow = []
    for number in range(160):
        connection = socket.create_connection(service.address, timeout=2)
        half = request(b"Content-Length: 1000\r\n", b"{") if number % 2 else b"POST /v1/generate HTTP/1.1\r\nX: "
        connection.sendall(half)
        slow.append(connection)
    try:
        with httpx.Client(base_url=service.url, verify=False, timeout=2) as client:  # connects anew
            assert client.get("/health").status_code == 200
            assert client.post("/v1/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    finally:
        for connection in slow:
            connection.close()


def test_over_the_limit_of_connections_the_most_silent_one_makes_room() -> None:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(healthy, listener, streams=1)
    server.most_connections = 6
    threading.Thread(target=server.run, daemon=True).start()
    connections = []
    for number in range(10):
        connections.append(socket.create_connection(listener.getsockname(), timeout=5))
        connections[-1].sendall(b"GET / HTTP/1.1\r\nX: ")
        eventually(lambda number=number: len(server.active_channels) == min(number + 1, 6))
    for connection in connections[:4]:
        assert connection.recv(1) == b""
    for connection in connections[4:]:
        connection.sendall(b"\r\nHost: x\r\n\r\n")
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
    for connection in connections:
        connection.close()
    server.stop_accepting()


def healthy(environ: dict[str, object], start_response: Callable[..., object]) -> list[bytes]:
    start_response("200 OK", [("Content-Length", "0")])
    return []


def test_an_answer_survives_what_its_client_still_sends(service: Running) -> None:
    with socket.create_connection(service.address, timeout=5) as connection:
        connection.sendall(b"no request\r\n\r\n")
        time.sleep(0.1)  # the server has answered and would be closed by now
        for _ in range(50):
            connection.sendall(b"a" * 2**16)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        assert status_of(answer) == 400


def test_a_connection_that_the_server_ended_is_dropped_in_time() -> None:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(healthy, listener, streams=1)
    threading.Thread(target=server.run, daemon=True).start()
    with socket.create_connection(listener.getsockname(), timeout=5) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        while connection.recv(65536):
            pass
        eventually(lambda: any(channel.lingers_until for channel in server.active_channels.values()))
        server.maintenance(time.time() + LINGER_S - 1)
        server.pull_trigger()
        time.sleep(0.1)
        assert server.active_channels
        server.maintenance(time.time() + LINGER_S + 1)
        server.pull_trigger()
        eventually(lambda: not server.active_channels)
    server.stop_accepting()


def test_a_drained_server_leaves_although_a_client_does_not_hang_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINGER_S", 0.3)
    listener = bind("127.0.0.1", 0)
    server = HttpServer(healthy, listener, streams=1)
    threading.Thread(target=server.run, daemon=True).start()
    with socket.create_connection(listener.getsockname(), timeout=5) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        while connection.recv(65536):
            pass
        server.stop_accepting()
        left = threading.Event()
        threading.Thread(target=server.leave_when_idle, args=(left.set,), daemon=True).start()
        assert not left.wait(0.2)
        assert left.wait(5)


def test_http_1_0_has_no_transfer_encoding(service: Running) -> None:
    answer = service.raw(request(b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", line=b"POST /v1/generate HTTP/1.0"))
    assert "HTTP/1.0" in error_of(answer)


def test_expect_continue_without_a_body_is_answered(service: Running) -> None:
    answer = service.raw(request(b"Expect: 100-continue\r\nConnection: close\r\n"))
    assert status_of(answer) == 400


def test_a_client_that_drips_its_headers_is_dropped_although_it_is_never_idle() -> None:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(lambda environ, start_response: [], listener, streams=1)
    threading.Thread(target=server.run, daemon=True).start()
    with socket.create_connection(listener.getsockname(), timeout=5) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nX: ")
        eventually(lambda: any(channel.request for channel in server.active_channels.values()))
        server.maintenance(time.time() + HEADER_S - 1)
        server.pull_trigger()
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        server.maintenance(time.time() + HEADER_S + 1)
        server.pull_trigger()
        connection.settimeout(5)
        assert connection.recv(1) == b""
    server.stop_accepting()


def test_keep_alive(service: Running) -> None:
    with httpx.Client(base_url=service.url) as client:
        for _ in range(3):
            assert client.post("/v1/generate", json={"prompt": "a", "max_tokens": 1}).json()["text"] == "a"
        assert client.get("/nothing").status_code == 404
        assert client.post("/v1/generate", content=b"{").status_code == 400
        assert client.get("/health").status_code == 200
