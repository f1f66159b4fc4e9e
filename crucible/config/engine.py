"""EngineConfig: how a model is served. The one place that reads CRUCIBLE_* environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from crucible.errors import ConfigError

PAGE_TOKENS = 16
"""Tokens of KV a page holds (a power of two, so that translation is a shift and a mask)."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. ``None`` means "chosen from the model and the machine"; see docs/architecture.md.

    Each field can be set by the environment variable CRUCIBLE_<FIELD IN CAPITALS>; an explicit argument wins.

    device: ``auto``, ``cpu`` or ``cuda``. quant: weight type, ``f32`` or ``int8``.
    max_batch: requests resident at once. max_queue: requests waiting beyond them before 429.
    context: most tokens (prompt + generated) a request may hold. kv_pages: pages of 16 tokens in the pool;
    kv_memory: the same as bytes (give one of the two). prefill_budget: prompt tokens computed a step, over all
    requests. prefill_chunk_tokens: most prompt tokens of one request a step. threads: CPU kernel threads.
    batched_prefill: a step may compute prompts of several requests, if it reaches min_packed_prompts of them; a step
    that reaches fewer, or any step without it, computes one. prefix_cache: the KV of full pages is kept after its
    request and shared with requests that begin with the same tokens.
    """

    device: str = "auto"
    quant: str = "int8"
    max_batch: int = 16
    max_queue: int = 64
    context: int | None = None
    kv_pages: int | None = None
    kv_memory: int | None = None
    prefill_budget: int | None = None
    prefill_chunk_tokens: int | None = None
    threads: int | None = None
    batched_prefill: bool = True
    min_packed_prompts: int = 2
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (("device", ("auto", "cpu", "cuda")), ("quant", ("f32", "int8"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        counts = ("max_batch", "context", "kv_pages", "kv_memory", "prefill_budget", "prefill_chunk_tokens", "threads")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.min_packed_prompts < 2:
            raise ConfigError(f"min_packed_prompts must be at least 2, got {self.min_packed_prompts}")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be at least 0, got {self.max_queue}")
        if self.kv_pages is not None and self.kv_memory is not None:
            raise ConfigError("give kv_pages or kv_memory, not both")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> EngineConfig:
        """The defaults, then CRUCIBLE_* variables, then ``overrides`` (those that are not ``None``).

        Raises ConfigError naming the variable whose value cannot be read.
        """
        environ = os.environ if environ is None else environ
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = f"CRUCIBLE_{field.name.upper()}"
            text = environ.get(variable)
            if text is None or overrides.get(field.name) is not None:
                continue
            if field.name == "kv_memory":
                values[field.name] = parse_size(text, variable)
            elif hints[field.name] is bool:
                values[field.name] = parse_switch(text, variable)
            elif int in (hints[field.name], *get_args(hints[field.name])):
                try:
                    values[field.name] = int(text)
                except ValueError:
                    raise ConfigError(f"{variable} must be a whole number, got {text!r}") from None
            else:
                values[field.name] = text
        values.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**values)

    def with_defaults(self, **values: Any) -> EngineConfig:
        """A copy in which each named field that is ``None`` has the given value."""
        return replace(self, **{name: value for name, value in values.items() if getattr(self, name) is None})


def parse_switch(text: str, name: str = "switch") -> bool:
    """``1`` or ``true`` is on, ``0`` or ``false`` is off. Raises ConfigError."""
    switches = {"1": True, "true": True, "0": False, "false": False}
    if (value := switches.get(text.strip().lower())) is None:
        raise ConfigError(f"{name} must be 1, 0, true or false, got {text!r}")
    return value


def parse_size(text: str, name: str = "size") -> int:
    """Bytes from ``512M``, ``1.5G``, ``64KiB`` or a plain number of bytes (powers of 1024). Raises ConfigError."""
    unit = text.strip().upper().removesuffix("B").removesuffix("I")
    scale = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(unit[-1:], 1)
    try:
        size = int(float(unit[:-1] if scale > 1 else unit) * scale)
    except (ValueError, OverflowError):
        raise ConfigError(f"{name} must be a size such as 512M or 2G, got {text!r}") from None
    if size < 1:
        raise ConfigError(f"{name} must be positive, got {text!r}")
    return size
