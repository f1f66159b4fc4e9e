from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from crucible.native.pages import PagePool

PAGE_TOKENS: int
RUNS_ON: int
STOPPED: int
FULL: int
BROKEN: int
NO_TOKEN: int

_Row = TypeVar("_Row", bound=RequestRow)

class RequestRow:
    request_id: str
    tokens: NDArray[np.int32]
    page_row: NDArray[np.int32]
    prompt_tokens: int
    limit: int
    length: int
    computed: int
    page_count: int
    published: int
    chain: int
    cached_tokens: int
    finish_code: int
    choice: int
    ignore_eos: bool
    temperature: float
    top_k: int
    seed: int
    def __init__(
        self,
        request_id: str,
        prompt: NDArray[np.int32],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        choice: int = 0,
        ignore_eos: bool = False,
    ) -> None: ...
    @property
    def pages_needed(self) -> int: ...
    @property
    def remaining(self) -> int: ...
    @property
    def generated(self) -> int: ...
    def assign_pages(self, pages: list[int], computed: int = 0, chain: int = 0) -> None: ...
    def take_pages(self) -> list[int]: ...

def publish(pool: PagePool, decode: list[_Row], prefill: list[_Row]) -> None: ...
def wasted_slots(requests: list[_Row]) -> int: ...
def pages_for(tokens: int) -> int: ...

class BatchFiller:
    rows: int
    sequences: int
    logits: int
    def __init__(self, **buffers: NDArray[Any]) -> None: ...
    def fill(self, decode: list[_Row], prefill: list[_Row], counts: list[int], ahead: bool = False) -> None: ...

def advance(
    decode: list[_Row],
    prefill: list[_Row],
    counts: list[int],
    token_ids: NDArray[np.int32],
    eos_ids: NDArray[np.int32],
) -> tuple[list[_Row], list[_Row]]: ...
