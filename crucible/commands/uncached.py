"""UncachedModel: ``generate --no-cache``, the reference path of generation."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from types import TracebackType

from crucible.checkpoint import open_checkpoint
from crucible.commands.options import gpu_settings
from crucible.commands.session import Session
from crucible.config import EngineConfig
from crucible.config.engine import PAGE_TOKENS
from crucible.config.sampling import SamplingParams
from crucible.engine.settings import choose_device, resolve_config, sizes
from crucible.errors import RequestError
from crucible.llm import Delta
from crucible.model_text import ModelText
from crucible.models import resolve
from crucible.native.sampling import select
from crucible.tokenizer import IncrementalDecoder


class UncachedModel:
    """What ``generate`` needs of an LLM, without an engine: every token recomputes the whole prefix.

    Nothing is kept between steps. ``context`` is that of an engine with the same ``config``. Weights are loaded by
    ``stream``.
    """

    def __init__(self, model: str | None, config: EngineConfig) -> None:
        self._path = resolve(model)
        with open_checkpoint(self._path) as checkpoint:
            self._config = resolve_config(replace(config, device=choose_device(config.device)), checkpoint.config)
            self._text = ModelText(self._path, checkpoint.config)
        context, kv_pages, _ = sizes(self._config)
        self.context = min(context, kv_pages * PAGE_TOKENS)

    def __enter__(self) -> UncachedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def encode(self, text: str, *, chat: bool = False) -> list[int]:
        """As LLM.encode."""
        return self._text.encode(text, chat=chat)

    def stream(self, ids: list[int], params: SamplingParams) -> Generator[Delta]:
        """As LLM.stream, of token ids."""
        count = self.context - len(ids) if params.max_tokens is None else params.max_tokens
        if len(ids) + count > self.context:
            raise RequestError(
                f"prompt ({len(ids)} tokens) and max_tokens ({count}) exceed the context of {self.context}",
                "max_tokens",
            )
        decoder = IncrementalDecoder(self._text.required())
        config = self._config
        session = Session(
            self._path,
            quant=config.quant,
            context=len(ids) + count,
            threads=config.threads,
            device=config.device,
            **gpu_settings(config),
        )
        tokens = list(ids)
        for number in range(1, count + 1):
            token = select(
                session.logits(tokens),
                params.temperature or 0.0,
                params.effective_top_k,
                params.effective_seed,
                0,
                len(tokens),
                session.config.token_count,
            )
            if token in session.config.eos_token_ids and not params.ignore_eos:
                yield Delta(decoder.flush(), None, number, "stop")
                return
            tokens.append(token)
            yield Delta(decoder.push(token), token, number)
        yield Delta(decoder.flush(), None, count, "length")
