"""The native routes over the fakes: answers, streams, and every refusal by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from crucible.errors import RequestError
from crucible.protocol import decode_json
from tests.serving import Running, events, eventually, serving

ROUTES = ("/v1/generate", "/v1/generate/stream")


def refusal(response: httpx.Response, status: int, param: str | None = None) -> str:
    """The message of an error response after its shape has been checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param"}
    assert error["param"] == param, error
    assert error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    return str(error["message"])


def test_an_answer(service: Running) -> None:
    response = service.post(prompt="ab", max_tokens=5)
    assert response.status_code == 200
    assert response.json() == {
        "model": "fake",
        "text": "ababa",
        "token_ids": [97, 98, 97, 98, 97],
        "finish_reason": "length",
        "tokens_generated": 5,
        "usage": {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7, "cached_tokens": 0},
    }


def test_an_eos_is_counted_and_gives_neither_event_nor_text(service: Running) -> None:
    answer = service.post(prompt=[97, 256], max_tokens=9).json()
    assert (answer["text"], answer["token_ids"]) == ("a", [97])
    assert (answer["finish_reason"], answer["tokens_generated"]) == ("stop", 2)
    stream = service.post("/v1/generate/stream", prompt=[97, 256], max_tokens=9)
    assert events(stream.text) == [
        ("token", {"token_id": 97, "text": "a"}),
        ("done", {
            "finish_reason": "stop", "tokens_generated": 2, "text": "",
            "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, "cached_tokens": 0},
        }),
    ]
    assert service.post(prompt=[97, 256], max_tokens=4, ignore_eos=True).json()["finish_reason"] == "length"


def test_a_stream_has_the_headers_that_proxies_need(service: Running) -> None:
    response = service.post("/v1/generate/stream", prompt="a", max_tokens=1)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


PROMPTS: list[Any] = [
    "héllo",
    "日本語😀",
    "a\u2028b\u2029c\u0085d\r\ne\x0bf\x1cg",
    "\"\\/\b\0",
    [0xC3, 0x28, 0xF0, 0x9F],
]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_tokens", [1, 7, 30])
def test_a_stream_adds_up_to_the_whole_answer(service: Running, prompt: Any, max_tokens: int) -> None:
    whole = service.post(prompt=prompt, max_tokens=max_tokens).json()
    stream = service.post("/v1/generate/stream", prompt=prompt, max_tokens=max_tokens)
    found = events(stream.text)
    assert "".join(data["text"] for _, data in found) == whole["text"]
    assert [data["token_id"] for name, data in found if name == "token"] == whole["token_ids"]
    assert found[-1][0] == "done"
    assert found[-1][1]["tokens_generated"] == len(found) - 1 == max_tokens


def test_a_stream_survives_clients_that_split_lines_as_python_does(service: Running) -> None:
    body = service.post("/v1/generate/stream", prompt="\u2028\u2029\u0085\x0b\x0c\x1e", max_tokens=40).content
    assert body.isascii()
    for line in body.decode().splitlines():
        if line.startswith("data: "):
            json.loads(line[6:])


def test_without_max_tokens_a_prompt_gets_256_and_no_more_than_fit(service: Running) -> None:
    assert service.post(prompt="a").json()["tokens_generated"] == 256
    assert service.post(prompt="a" * 500).json()["tokens_generated"] == 12
    assert service.post(prompt="a", max_tokens=None).json()["tokens_generated"] == 256


def test_without_max_tokens_a_conversation_may_fill_the_context(service: Running) -> None:
    answer = service.post(messages=[{"role": "user", "content": "a"}]).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["text"].startswith("<user>a<user>a")


def test_usage_tells_what_was_cached_and_a_salt_keeps_caches_apart(service: Running) -> None:
    def cached(route: str, **body: Any) -> int:
        answer = service.post(route, prompt="cached " * 7, max_tokens=2, **body)
        usage = answer.json()["usage"] if route == "/v1/generate" else events(answer.text)[-1][1]["usage"]
        assert usage["prompt_tokens"] == 49
        return int(usage["cached_tokens"])

    for route in ROUTES:
        salt = f"mine, at {route}"
        assert cached(route, cache_salt=salt) == 0
        assert cached(route, cache_salt=salt) == 48
        assert cached(route, cache_salt=salt + " ") == 0
    assert cached("/v1/generate") == 0
    assert cached("/v1/generate", cache_salt=None) == 48


BAD_VALUES: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (0, -1, 1.5, 1.0, "16", True, [4], 10**9, 2**70)),
    *(("temperature", value) for value in (-0.1, "hot", True, [1])),
    *(("top_k", value) for value in (0, -1, 1.5, "2", True)),
    *(("seed", value) for value in (2**64, 10**20, -1, -(2**63) - 1, "100", 1.5, True)),
    *(("ignore_eos", value) for value in (1, "true", [])),
    *(("cache_salt", value) for value in ("", "s" * 257, 1, ["a"])),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("param", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_by_name(service: Running, route: str, param: str, value: Any) -> None:
    body = {"prompt": "a", "temperature": 1.0, "max_tokens": 2, param: value}
    refusal(service.post(route, **body), 400, param)


@pytest.mark.parametrize("param", ["top_k", "seed"])
def test_sampling_fields_without_a_temperature_are_refused(service: Running, param: str) -> None:
    assert "temperature" in refusal(service.post(prompt="a", **{param: 5}), 400, param)
    assert "temperature" in refusal(service.post(prompt="a", temperature=0, **{param: 5}), 400, param)
    assert service.post(prompt="a", temperature=0.5, max_tokens=1, **{param: 5}).status_code == 200


def test_a_top_k_above_the_vocabulary_means_all_of_it(service: Running) -> None:
    for top_k in (264, 10**6, 2**64, 10**30):
        assert service.post(prompt="a", temperature=1.0, top_k=top_k, max_tokens=1).status_code == 200


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt"),
    ([], "prompt"),
    ([-1], "prompt"),
    ([257], "prompt"),
    ([97, 2**31], "prompt"),
    ([2**63], "prompt"),
    ([2**80], "prompt"),
    ([1.0], "prompt[0]"),
    ([True], "prompt[0]"),
    (["a", 1], "prompt[0]"),
    ([1, None], "prompt[1]"),
    ([[1]], "prompt[0]"),
    ({"a": 1}, "prompt"),
    (5, "prompt"),
    (True, "prompt"),
    ("x" * 512, "prompt"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused(service: Running, route: str, prompt: Any, param: str) -> None:
    refusal(service.post(route, prompt=prompt, max_tokens=1), 400, param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "a", "name": "b"}], "messages[0].name"),
        ([{"role": "user", "content": "a"}, 7], "messages[1]"),
        ([{"role": "wizard", "content": "a"}], "messages"),
        ([{"role": "user", "content": "a" * 600}], "messages"),
    ],
)
def test_bad_messages_are_refused(service: Running, messages: Any, param: str) -> None:
    refusal(service.post(messages=messages), 400, param)


def test_exactly_one_of_prompt_and_messages(service: Running) -> None:
    refusal(service.post(max_tokens=1), 400, "prompt")
    refusal(service.post(prompt="a", messages=[{"role": "user", "content": "a"}]), 400, "prompt")


def test_unknown_fields_are_all_named(service: Running) -> None:
    message = refusal(service.post(prompt="a", topk=4, max_token=5), 400, "topk")
    assert "topk, max_token;" in message


def test_prompt_and_max_tokens_together_must_fit(service: Running) -> None:
    assert service.post(prompt="a" * 500, max_tokens=12).status_code == 200
    assert "room for 12" in refusal(service.post(prompt="a" * 500, max_tokens=13), 400, "max_tokens")


def test_what_the_engine_refuses_is_a_400_before_a_stream_starts(service: Running) -> None:
    for route in ROUTES:
        refusal(service.post(route, prompt="!refuse", max_tokens=1), 400, "prompt")


BAD_BODIES = [
    b"", b"{", b"[]", b'"x"', b"null", b"1", b'{"prompt":"a"}{}', b"{'prompt':1}", b'{"prompt":"a",}',
    b"\xef\xbb\xbf{}",
    b'{"prompt":"\xc4\xe3\xba\xc3"}', b'{"prompt":"\xff\xfe"}', b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":"\xc0\xaf"}',
    b'{"prompt":"\\ud800"}', b'{"prompt":"\\udc00x"}', b'{"prompt":"a\nb"}', b'{"prompt":"a","temperature":NaN}',
    b'{"prompt":"a","temperature":-Infinity}', b'\xff\xfe{\0}\0',
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("body", BAD_BODIES)
def test_a_body_that_is_not_a_json_object_is_refused(service: Running, route: str, body: bytes) -> None:
    response = service.http.post(route, content=body, headers={"Content-Type": "application/json"})
    refusal(response, 400)


@pytest.mark.parametrize("depth", [500, 2000, 10_000, 100_000])
@pytest.mark.parametrize("field", ["prompt", "x"])
def test_deep_nesting_is_refused(service: Running, depth: int, field: str) -> None:
    body = f'{{"max_tokens":1,"{field}":' + "[" * depth + "0" + "]" * depth + "}"
    response = service.http.post("/v1/generate", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    body = f'{{"{field}":' + "[" * depth
    assert service.http.post("/v1/generate", content=body).status_code == 400
    assert service.post(prompt="a", max_tokens=1).status_code == 200


def test_deep_nesting_is_refused_where_a_field_takes_anything() -> None:
    class Anything(msgspec.Struct):
        x: Any

    with pytest.raises(RequestError, match="nested too deeply"):
        decode_json(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", Anything)


def test_numbers_out_of_range_are_refused(service: Running) -> None:
    for field, number, param in (("temperature", "1e999", "temperature"), ("seed", "9" * 5000, "seed")):
        body = f'{{"prompt":"a","{field}":{number}}}'
        refusal(service.http.post("/v1/generate", content=body), 400, param)


def test_a_failed_engine_is_a_503_with_its_reason() -> None:
    with serving() as running:
        message = refusal(running.post(prompt="!raise", max_tokens=1), 503)
        assert "the engine failed: RuntimeError: made to fail" in message
        eventually(lambda: any("is back" in line for line in running.errors))
        eventually(lambda: running.get("/health").status_code == 200)
        stream = running.post("/v1/generate/stream", prompt="!raise", max_tokens=1)
        assert stream.status_code == 200
        name, data = events(stream.text)[-1]
        assert (name, data["finish_reason"]) == ("done", "error")
        assert "made to fail" in data["error"]["message"]
        eventually(lambda: sum("is back" in line for line in running.errors) == 2)
        eventually(lambda: running.post(prompt="a", max_tokens=1).status_code == 200)
