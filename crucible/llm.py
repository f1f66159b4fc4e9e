"""LLM: a model in this process. No server, no sockets; the same engine core that serves HTTP.

from crucible import LLM, SamplingParams
llm = LLM()
print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crucible.checkpoint import open_checkpoint
from crucible.config import EngineConfig, SamplingParams
from crucible.engine.core import EngineCore
from crucible.engine.messages import Finished, TokenEvent
from crucible.errors import EngineError, QueueFullError, RequestError
from crucible.model_text import ModelText
from crucible.models import resolve
from crucible.tokenizer import IncrementalDecoder, Tokenizer

if TYPE_CHECKING:
    from crucible.chat_template import ChatTemplate

TokenIds: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"
Prompt: TypeAlias = "str | TokenIds"
Inbox: TypeAlias = "deque[TokenEvent | Finished]"


@dataclass(frozen=True)
class Completion:
    """A finished request.

    text: the generated text, special tokens left out; empty for a model without a tokenizer. token_ids: the ids it
    came from, without an end-of-sequence id. finish_reason: ``stop`` (an end-of-sequence id) or ``length``.
    completion_tokens counts an end-of-sequence id too.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Delta:
    """One step of a stream: the text that became certain, the id behind it (``None`` in the last delta), the tokens
    generated so far, and in the last delta the finish reason."""

    text: str
    token_id: int | None
    completion_tokens: int
    finish_reason: str | None = None


class LLM:
    """A loaded model. Not thread-safe: one thread at a time; serve over HTTP for more.

    Calls may interleave: while a stream is open, other calls compute, and the stream's request along with theirs.

    model: a directory or pulled name; ``None`` is the default model, pulled on first use. on_progress receives one
    line a loading stage. Other keywords are EngineConfig's (quant, context, max_batch, threads, …). Raises
    CheckpointError, TokenizerError and ConfigError.
    """

    def __init__(
        self, model: str | Path | None = None, *, on_progress: Callable[[str], None] | None = None, **settings: Any
    ) -> None:
        self.config = EngineConfig.from_environment(**settings)
        self.path = resolve(None if model is None else str(model))
        with open_checkpoint(self.path) as checkpoint:
            self._text = ModelText(self.path, checkpoint.config)  # what it refuses is refused before weights are loaded
        self.core = EngineCore.from_checkpoint(self.path, self.config, on_progress)
        info = self.core.engine_info()
        self.context = min(info.context, info.kv_pages * info.page_tokens)
        self._closed = False
        self._numbers = itertools.count()
        self._inboxes: dict[str, Inbox] = {}  # by request, from its submission to its end

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives back the model's memory; the LLM cannot compute afterwards."""
        if not self._closed:
            self._closed = True
            self.core.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; ``None`` where its directory has none (ids still work)."""
        return self._text.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template; the plain transcript where it has none."""
        return self._text.template

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Ids of ``text``; with ``chat`` and a model that has a chat template, of a user's message holding it."""
        return self._text.encode(text, chat=chat)

    def generate(self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Completions in the order of the prompts, computed together in one batch.

        A prompt is text (encoded as it is, no chat template) or token ids (a list, or an array of whole numbers; rows
        of a matrix are prompts). Raises RequestError for a prompt that can never be served; the others are then
        withdrawn.
        """
        return self._complete([self._ids(prompt) for prompt in as_list(prompts)], checked(params))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """The assistant's reply to a conversation (a list of {"role", "content"}), or to each of several."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        tokenizer = self._text.required()
        ids = [self.template.encode(conversation, tokenizer) for conversation in conversations]
        return self._complete(ids, checked(params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta]:
        """The completion of one prompt as it is made. Closing the iterator cancels the request."""
        decoder = IncrementalDecoder(self._text.required())
        request, inbox = self._submit(self._ids(prompt), checked(params))
        count = 0
        try:
            while True:
                event = self._next(request, inbox)
                if isinstance(event, Finished):
                    raise_failure(event.finish_reason, event.error)
                    yield Delta(decoder.flush(), None, event.completion_tokens, event.finish_reason)
                    return
                count += 1
                yield Delta(decoder.push(event.token_id), event.token_id, count)
        finally:
            self._withdraw([request])

    def _complete(self, prompts: Sequence[TokenIds], params: SamplingParams) -> list[Completion]:
        """Runs the engine until every prompt has its completion; the queue is refilled as it empties."""
        waiting = deque(enumerate(prompts))
        live: dict[str, tuple[int, Inbox, list[int]]] = {}
        done: dict[int, Completion] = {}
        try:
            while len(done) < len(prompts):
                while waiting:
                    index, prompt = waiting[0]
                    try:
                        request, inbox = self._submit(prompt, params)
                    except QueueFullError:
                        break
                    waiting.popleft()
                    live[request] = index, inbox, []
                self._step()
                for request, (index, inbox, ids) in list(live.items()):
                    while inbox:
                        event = inbox.popleft()
                        if isinstance(event, TokenEvent):
                            ids.append(event.token_id)
                            continue
                        del live[request]
                        raise_failure(event.finish_reason, event.error)
                        counts = event.prompt_tokens, event.completion_tokens
                        done[index] = Completion(self._text.decode(ids), ids, event.finish_reason, *counts)
        finally:
            self._withdraw(list(live))
        return [done[index] for index in range(len(prompts))]

    def _submit(self, ids: TokenIds, params: SamplingParams) -> tuple[str, Inbox]:
        request = f"llm-{next(self._numbers)}"
        self.core.add_request(request, ids, params)
        inbox = self._inboxes[request] = deque()
        return request, inbox

    def _step(self) -> None:
        """Steps the engine and puts what happened into the inboxes, whichever call the requests belong to."""
        output = self.core.step()
        for token in output.tokens:
            if token.request_id in self._inboxes:
                self._inboxes[token.request_id].append(token)
        for finished in output.finished:
            if finished.request_id in self._inboxes:
                self._inboxes.pop(finished.request_id).append(finished)

    def _next(self, request: str, inbox: Inbox) -> TokenEvent | Finished:
        """The next event of a request; steps the engine until there is one."""
        while not inbox:
            if not self.core.has_work():
                raise EngineError("the request is gone: the step that would have reported its end was interrupted")
            self._step()
        return inbox.popleft()

    def _withdraw(self, requests: list[str]) -> None:
        """Cancels those that an interrupted call leaves behind and waits until their pages are free."""
        live = [request for request in requests if request in self._inboxes]
        for request in live:
            self.core.cancel(request)
        # A closed or failed engine has given everything up, and its step would raise.
        while self.core.failure is None and any(request in self._inboxes for request in live) and self.core.has_work():
            self._step()
        for request in live:
            self._inboxes.pop(request, None)

    def _ids(self, prompt: object) -> TokenIds:
        """The token ids of a prompt; their range is the engine's to judge. Raises RequestError for what is neither."""
        if isinstance(prompt, str):
            return self._text.required().encode_prompt(prompt)
        if isinstance(prompt, np.ndarray) or is_list(prompt):
            return prompt  # type: ignore[return-value]
        raise RequestError(f"a prompt must be text or token ids, got {type(prompt).__name__}", "prompt")


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """One prompt or several → several. A flat list or array of numbers is one prompt. Raises RequestError."""
    if isinstance(prompts, str) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | memoryview | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__
        raise RequestError(f"prompts must be text, token ids, or a list of these, got {kind}", "prompts")
    if isinstance(prompts, np.ndarray) and prompts.ndim == 0:
        raise RequestError("prompts must be text, token ids, or a list of these, got a number", "prompts")
    several = list(prompts)
    if several and all(isinstance(item, int | np.integer) for item in several):
        return [several]
    return several


def is_list(prompt: object) -> bool:
    """Whether ``prompt`` may be a list of token ids: a sequence, but not one of characters or bytes."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray | memoryview)


def checked(params: SamplingParams | None) -> SamplingParams:
    """``params``, or the defaults. Raises RequestError for what is no SamplingParams."""
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {type(params).__name__}", "params")
    return params or SamplingParams()


def raise_failure(reason: str, error: str | None) -> None:
    """Raises EngineError when a request ended with an error."""
    if reason in ("error", "cancelled"):
        raise EngineError(error or f"the request ended with {reason}")
