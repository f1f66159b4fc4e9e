from __future__ import annotations

import json

from crucible.bench.surfaces import Job, Progress, surface


def test_native_body_and_events() -> None:
    native = surface("native")
    assert json.loads(native.body(Job((1, 2), 3))) == {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
    progress = Progress()
    assert native.read(progress, b"token", b"not even parsed") == 1
    assert native.read(progress, b"other", b"{}") == 0
    assert not progress.done
    assert native.read(progress, b"done", b'{"finish_reason":"stop","tokens_generated":2,"text":""}') == 0
    assert progress == Progress(events=1, tokens=2, done=True)


def test_native_failure_inside_the_stream() -> None:
    progress = Progress()
    done = b'{"finish_reason":"error","tokens_generated":0,"text":"","error":{"message":"broke","type":"x"}}'
    surface("native").read(progress, b"done", done)
    assert progress.done
    assert progress.error == "broke"


def test_openai_body() -> None:
    body = json.loads(surface("openai", "m").body(Job("text", 3)))
    assert (body["model"], body["prompt"], body["max_tokens"], body["stream"]) == ("m", "text", 3, True)
    assert "model" not in json.loads(surface("openai").body(Job("text", 3)))


def test_openai_events_that_count_as_tokens() -> None:
    openai, progress = surface("openai"), Progress()
    token = {"choices": [{"text": "a", "finish_reason": None}]}
    unfinished_character = {"choices": [{"text": "", "finish_reason": None}]}
    last = {"choices": [{"text": "", "finish_reason": "length"}], "unknown": [1]}
    usage = {"choices": [], "usage": {"completion_tokens": 4}}
    counts = [openai.read(progress, b"", json.dumps(v).encode()) for v in (token, unfinished_character, last, usage)]
    assert counts == [1, 1, 0, 0]
    assert openai.read(progress, b"", b"[DONE]") == 0
    assert progress == Progress(events=2, tokens=4, done=True)
    openai.read(progress, b"", b'{"error": {"message": "broke"}}')
    assert progress.error is not None
    assert "broke" in progress.error
