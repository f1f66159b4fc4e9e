"""Request: one prompt being answered, from submission to its last token. It knows no scheduler, batch or text."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from crucible.config.sampling import SamplingParams
from crucible.engine.messages import FinishReason
from crucible.errors import RequestError
from crucible.native.batch import RequestRow


class RequestState(Enum):
    """WAITING and FINISHED hold no pages; PREFILLING has prompt tokens left to compute; RUNNING decodes."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class Request(RequestRow):
    """A request and its progress. The arrays that a step reads (tokens, pages, counts) live in RequestRow.

    prompt: int32 [prompt_tokens], validated (``prompt_array``). max_tokens: tokens it may generate.
    choice: index among the answers to one prompt; part of the RNG key. arrival: the submitter's clock, in seconds.
    cache_salt: cached KV is shared between requests of the same salt only. error: why it ended, if for its own fault.
    """

    __slots__ = ("arrival", "cache_salt", "cancelled", "error", "finish_reason", "params", "state")

    def __init__(
        self,
        request_id: str,
        prompt: NDArray[np.int32],
        max_tokens: int,
        params: SamplingParams,
        *,
        choice: int = 0,
        arrival: float = 0.0,
        cache_salt: str | None = None,
    ) -> None:
        super().__init__(
            request_id,
            prompt,
            max_tokens,
            temperature=0.0 if params.greedy else float(params.temperature or 0.0),
            top_k=min(params.effective_top_k, 2**31),  # any number of candidates above the vocabulary means all
            seed=params.effective_seed,
            choice=choice,
            ignore_eos=params.ignore_eos,
        )
        self.params = params
        self.arrival = arrival
        self.cache_salt = cache_salt
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.cancelled = False

    @property
    def prompt(self) -> NDArray[np.int32]:
        """The prompt's ids, int32 [prompt_tokens]; a view."""
        return self.tokens[: self.prompt_tokens]

    @property
    def output(self) -> list[int]:
        """The generated ids so far, an end-of-sequence id included."""
        ids: list[int] = self.tokens[self.prompt_tokens : self.length].tolist()
        return ids


def prompt_array(token_ids: Sequence[int] | NDArray[np.integer], token_count: int) -> NDArray[np.int32]:
    """The ids as int32 [n]. Raises RequestError (param ``prompt``) unless they are 1 or more below ``token_count``."""
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError, TypeError):
        raise RequestError("the prompt must be a flat list of token ids", "prompt") from None
    if ids.size == 0 and ids.ndim == 1:
        raise RequestError("the prompt is empty; give at least one token", "prompt")
    if ids.ndim != 1 or ids.dtype.kind not in "iuO" or (ids.dtype.kind == "O" and not all(type(i) is int for i in ids)):
        raise RequestError("the prompt must be a flat list of token ids", "prompt")
    outside = (ids < 0) | (ids >= token_count)
    if outside.any():
        place = int(outside.argmax())
        raise RequestError(f"token id {ids[place]} at index {place} is not in 0 … {token_count - 1}", "prompt")
    return ids.astype(np.int32)
