"""LLM: a model in this process. No server, no sockets; the same engine core that serves HTTP.

from crucible import LLM, SamplingParams
llm = LLM()
print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from crucible.config import EngineConfig, SamplingParams
from crucible.engine.core import EngineCore
from crucible.errors import EngineError, QueueFullError, RequestError, TokenizerError
from crucible.models import resolve
from crucible.tokenizer import IncrementalDecoder, Tokenizer

if TYPE_CHECKING:
    from crucible.chat_template import ChatTemplate

Prompt: TypeAlias = "str | Sequence[int]"


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
    """A loaded model. Not thread-safe: one caller at a time; serve over HTTP for more.

    model: a directory or pulled name; ``None`` is the default model, pulled on first use. on_progress receives one
    line a loading stage. Other keywords are EngineConfig's (quant, context, max_batch, threads, …). Raises
    CheckpointError and ConfigError.
    """

    def __init__(
        self, model: str | Path | None = None, *, on_progress: Callable[[str], None] | None = None, **settings: Any
    ) -> None:
        self.config = EngineConfig.from_environment(**settings)
        self.path = resolve(None if model is None else str(model))
        self.core = EngineCore.from_checkpoint(self.path, self.config, on_progress)
        info = self.core.engine_info()
        self.context = min(info.context, info.kv_pages * info.page_tokens)
        self._closed = False
        self.tokenizer = find_tokenizer(self.path)
        self._template: ChatTemplate | None = None
        self._numbers = itertools.count()

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
    def template(self) -> ChatTemplate:
        """The model's chat template; the plain transcript where it has none."""
        if self._template is None:
            from crucible.chat_template import ChatTemplate  # brings Jinja: loaded on use

            self._template = ChatTemplate.for_checkpoint(self.path)
        return self._template

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """Ids of ``text``; with ``chat`` and a model that has a chat template, of a user's message holding it."""
        tokenizer = self._text_tokenizer()
        if chat and not self.template.is_plain:
            return self.template.encode([{"role": "user", "content": text}], tokenizer)
        return tokenizer.encode(text)

    def generate(self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Completions in the order of the prompts, computed together in one batch.

        A prompt is text (encoded as it is, no chat template) or token ids. Raises RequestError for a prompt that
        can never be served; the others are then withdrawn.
        """
        return self._complete([self._ids(prompt) for prompt in as_list(prompts)], params or SamplingParams())

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """The assistant's reply to a conversation (a list of {"role", "content"}), or to each of several."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        tokenizer = self._text_tokenizer()
        ids = [self.template.encode(conversation, tokenizer) for conversation in conversations]
        return self._complete(ids, params or SamplingParams())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The completion of one prompt as it is made. Closing the iterator cancels the request."""
        decoder = IncrementalDecoder(self._text_tokenizer())
        request = self._submit(self._ids(prompt), params or SamplingParams())
        done = False
        count = 0
        try:
            while not done:
                output = self.core.step()
                for event in output.tokens:
                    if event.request_id == request:
                        count += 1
                        yield Delta(decoder.push(event.token_id), event.token_id, count)
                for finished in output.finished:
                    if finished.request_id == request:
                        done = True
                        raise_failure(finished.finish_reason, finished.error)
                        yield Delta(decoder.flush(), None, finished.completion_tokens, finished.finish_reason)
        finally:
            if not done:
                self._withdraw([request])

    def _complete(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
        """Runs the engine until every prompt has its completion; the queue is refilled as it empties."""
        waiting = deque(enumerate(prompts))
        numbers: dict[str, int] = {}
        tokens: dict[str, list[int]] = {}
        done: dict[int, Completion] = {}
        try:
            while len(done) < len(prompts):
                while waiting:
                    index, ids = waiting[0]
                    try:
                        request = self._submit(ids, params)
                    except QueueFullError:
                        break
                    waiting.popleft()
                    numbers[request], tokens[request] = index, []
                output = self.core.step()
                for event in output.tokens:
                    tokens[event.request_id].append(event.token_id)
                for finished in output.finished:
                    index = numbers.pop(finished.request_id)
                    raise_failure(finished.finish_reason, finished.error)
                    ids = tokens.pop(finished.request_id)
                    done[index] = Completion(
                        self._text(ids), ids, finished.finish_reason, finished.prompt_tokens, finished.completion_tokens
                    )
        finally:
            self._withdraw(list(numbers))
        return [done[index] for index in range(len(prompts))]

    def _submit(self, ids: list[int], params: SamplingParams) -> str:
        request = f"llm-{next(self._numbers)}"
        self.core.add_request(request, ids, params)
        return request

    def _withdraw(self, requests: list[str]) -> None:
        """Cancels what an interrupted call leaves behind, so that the next call finds an idle engine."""
        for request in requests:
            self.core.cancel(request)
        while requests and self.core.has_work():
            self.core.step()

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._text_tokenizer().encode(prompt)
        return list(prompt)

    def _text(self, ids: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special=True)

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(f"{self.path} has no tokenizer; give token ids instead of text")
        return self.tokenizer


def find_tokenizer(path: Path) -> Tokenizer | None:
    """The model's tokenizer, or ``None`` where the directory has none (ids still work)."""
    if not any((path / name).exists() for name in ("tokenizer.vocab", "tokenizer.json")):
        return None
    return Tokenizer.for_checkpoint(path)


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several → several. A list of whole numbers is one prompt of ids."""
    if isinstance(prompts, str):
        return [prompts]
    several: list[Any] = list(prompts)
    if several and all(isinstance(item, int) for item in several):
        return [several]
    if not all(isinstance(item, str | Sequence) for item in several):
        raise RequestError("prompts must be text, token ids, or a list of these", "prompts")
    return several


def raise_failure(reason: str, error: str | None) -> None:
    """Raises EngineError when a request ended with an error."""
    if reason in ("error", "cancelled"):
        raise EngineError(error or f"the request ended with {reason}")
