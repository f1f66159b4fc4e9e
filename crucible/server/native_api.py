"""The native surface: POST /v1/generate and /v1/generate/stream."""

from __future__ import annotations

import json

import falcon
import msgspec

from crucible.config import SamplingParams
from crucible.engine.client import EngineClient
from crucible.engine.messages import EngineInfo
from crucible.errors import EngineError, RequestError
from crucible.protocol import (
    DEFAULT_MAX_TOKENS,
    MAX_SALT,
    ErrorDetail,
    GenerateRequest,
    GenerateResponse,
    StreamDone,
    Usage,
    decode_json,
)
from crucible.server import stream as sse
from crucible.server.body import read_json
from crucible.server.generation import Done, Event, Generation, Piece, check_prompt, choose_max_tokens, room
from crucible.server.text import Text


class NativeApi:
    """Both routes over one engine; everything is checked before anything is queued or a stream starts."""

    def __init__(self, client: EngineClient, text: Text, model_id: str) -> None:
        self._client, self._text, self._model_id = client, text, model_id

    def start(self, request: falcon.Request) -> Generation:
        """The request's body as a queued generation. Raises RequestError, QueueFullError, EngineError."""
        body = decode_json(read_json(request), GenerateRequest)
        token_ids, params = self._plan(body)
        gone = request.env.get("waitress.client_disconnected", lambda: False)
        decoder, salt = self._text.decoder(), body.cache_salt
        return Generation.start(self._client, token_ids, params, decoder, gone, cache_salt=salt)

    def _plan(self, body: GenerateRequest) -> tuple[list[int], SamplingParams]:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give exactly one of prompt and messages", "prompt")
        # Cheap refusals first: they must not depend on the engine.
        params = SamplingParams(
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_k=body.top_k,
            seed=body.seed,
            ignore_eos=bool(body.ignore_eos),
        )
        if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_SALT:
            raise RequestError(f"cache_salt must have 1 … {MAX_SALT} characters", "cache_salt")
        info = self._client.info()
        if body.messages is not None:
            if not body.messages:
                raise RequestError("messages is empty", "messages")
            self._check_length(sum(len(message.content) for message in body.messages), info, "messages")
            turns = [{"role": message.role, "content": message.content} for message in body.messages]
            token_ids, param, default = self._text.encode_chat(turns), "messages", None
        elif isinstance(body.prompt, str):
            self._check_length(len(body.prompt), info, "prompt")
            token_ids, param, default = self._text.encode(body.prompt), "prompt", DEFAULT_MAX_TOKENS
        else:
            token_ids, param, default = body.prompt or [], "prompt", DEFAULT_MAX_TOKENS
        check_prompt(token_ids, info, param)
        limit = choose_max_tokens(params.max_tokens, len(token_ids), info, default)
        # Above the vocabulary means all of it; a number of any size must still fit a message.
        top_k = None if params.top_k is None else min(params.top_k, info.vocab_size)
        return token_ids, msgspec.structs.replace(params, max_tokens=limit, top_k=top_k)

    def _check_length(self, characters: int, info: EngineInfo, param: str) -> None:
        """Refuse text that cannot fit before a second a megabyte is spent on its tokens."""
        most = room(info)
        if characters > most * self._text.longest:
            raise RequestError(f"text of {characters} characters does not fit the context of {most} tokens", param)

    def answer(self, request: falcon.Request) -> GenerateResponse:
        """The whole answer. Raises ClientGone when the client hangs up first, EngineError when the engine fails."""
        generation = self.start(request)
        pieces: list[Piece] = []
        last: Event | None = None
        try:
            for batch in generation.batches(silence_s=3600.0):
                pieces += [event for event in batch if isinstance(event, Piece)]
                last = batch[-1] if batch else None
        finally:
            generation.close()
        if last is None or isinstance(last, Piece) or last.finish_reason not in ("stop", "length"):
            message = None if last is None or isinstance(last, Piece) else last.error
            raise EngineError(message or "the engine ended the request without a result")
        return GenerateResponse(
            model=self._model_id,
            text="".join(piece.text for piece in pieces) + last.text,
            token_ids=[piece.token_id for piece in pieces],
            finish_reason="stop" if last.finish_reason == "stop" else "length",
            tokens_generated=last.tokens_generated,
            usage=usage_of(last),
        )


class GenerateResource:
    def __init__(self, api: NativeApi) -> None:
        self._api = api

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        response.data = msgspec.json.encode(self._api.answer(request))


class GenerateStreamResource:
    def __init__(self, api: NativeApi) -> None:
        self._api = api

    def on_post(self, request: falcon.Request, response: falcon.Response) -> None:
        sse.respond(response, sse.EventStream(self._api.start(request), render))


def usage_of(done: Done) -> Usage:
    """What a finished request took."""
    total = done.prompt_tokens + done.tokens_generated
    return Usage(done.prompt_tokens, done.tokens_generated, total, done.cached_tokens)


ascii_json = json.JSONEncoder(separators=(",", ":")).encode
"""JSON in ASCII: a raw U+2028 in an event's line would end it for some clients."""


def render(event: Event) -> str:
    """One SSE event of the native stream."""
    if isinstance(event, Piece):
        return f'event: token\ndata: {{"token_id":{event.token_id},"text":{ascii_json(event.text)}}}\n\n'
    done = StreamDone("error", event.tokens_generated, event.text)
    match event.finish_reason:
        case "stop" | "length" as reason:
            done.finish_reason, done.usage = reason, usage_of(event)
        case _:
            done.error = ErrorDetail(event.error or "cancelled", "server_error")
    return f"event: done\ndata: {ascii_json(msgspec.to_builtins(done))}\n\n"
