"""SamplingParams: how a request's tokens are chosen and when it ends."""

from __future__ import annotations

import math

import msgspec

from crucible.errors import RequestError

DEFAULT_TOP_K = 40
DEFAULT_SEED = 1234


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Greedy unless ``temperature`` is positive.

    max_tokens: tokens to generate; ``None`` means up to the model's context.
    temperature: ``None`` or 0 is greedy; a positive number divides the logits.
    top_k: candidates kept; ``None`` means 40, above the vocabulary means all. Needs a positive temperature.
    seed: 0 … 2**64 − 1; ``None`` means 1234, so a sampled reply is always reproducible. Needs a positive temperature.
    ignore_eos: go on after an end-of-sequence id.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:  # True is an int, and no count
                raise RequestError(f"{name} must be a whole number, got {value!r}", name)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        if self.temperature is not None and not is_temperature(self.temperature):
            got = self.temperature
            raise RequestError(f"temperature must be a finite number of at least 0, got {got!r}", "temperature")
        if self.top_k is not None and self.top_k < 1:
            raise RequestError(f"top_k must be at least 1, got {self.top_k}", "top_k")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise RequestError(f"seed must lie in 0 … 2**64 - 1, got {self.seed}", "seed")
        if type(self.ignore_eos) is not bool:
            raise RequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}", "ignore_eos")
        if self.greedy:
            for name in ("top_k", "seed"):
                if getattr(self, name) is not None:
                    raise RequestError(f"{name} needs a positive temperature; set temperature or drop {name}", name)

    @property
    def greedy(self) -> bool:
        return not self.temperature

    @property
    def effective_top_k(self) -> int:
        return DEFAULT_TOP_K if self.top_k is None else self.top_k

    @property
    def effective_seed(self) -> int:
        return DEFAULT_SEED if self.seed is None else self.seed


def is_temperature(value: object) -> bool:
    """Whether ``value`` is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value >= 0
    except OverflowError:  # a whole number beyond every double
        return False
