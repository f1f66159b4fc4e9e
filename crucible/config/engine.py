"""EngineConfig: how a model is served, from arguments and CRUCIBLE_* environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

from crucible.choices import ATTENTIONS, DECODE_GEMMS, DEVICES, GEMMS, PREFILL_ATTENTIONS, PREFILLS, QUANTS
from crucible.errors import ConfigError

PAGE_TOKENS = 16
"""Tokens of KV a page holds (a power of two, so that translation is a shift and a mask)."""

CHOICES = {
    "device": DEVICES,
    "quant": QUANTS,
    "gemm": GEMMS,
    "decode_gemm": DECODE_GEMMS,
    "attn": ATTENTIONS,
    "prefill_attn": PREFILL_ATTENTIONS,
    "prefill": PREFILLS,
}
LEAST = {"max_queue": 0, "min_packed_prompts": 2}
"""The least value of a count that may not be 1, or may be less."""
KV_SIZES = {"kv_pages", "kv_memory"}
"""Two ways to say the same."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. ``None`` means "chosen from the model and the machine"; see docs/architecture.md.

    Each field can be set by the environment variable CRUCIBLE_<FIELD IN CAPITALS>; an explicit argument wins. Raises
    ConfigError naming the field whose value cannot work.

    device: ``auto``, ``cpu`` or ``cuda``. quant: weight type, ``f32``, ``int8`` or, on a GPU,
    ``f16``.
    max_batch: requests resident at once. max_queue: requests waiting beyond them before 429.
    context: most tokens (prompt + generated) a request may hold. kv_pages: pages of 16 tokens in the pool;
    kv_memory: the same as bytes (give one of the two). prefill_budget: prompt tokens computed a step, over all
    requests. prefill_chunk_tokens: most prompt tokens of one request a step. threads: CPU kernel threads.
    batched_prefill: a step may compute prompts of several requests, if it reaches min_packed_prompts of them; a step
    that reaches fewer, or any step without it, computes one. chunked_prefill: a prompt may be spread over steps;
    without, each step computes one whole prompt. prefill: ``auto``, or ``serial``: one prompt token a step.
    prefix_cache: the KV of full pages is kept after its
    request and shared with requests that begin with the same tokens.

    For a GPU, each with its reference setting: gemm: kernels of projections, ``auto``, ``small`` or ``big``, or
    ``scalar``, one multiply-add at a time; decode_gemm: those of steps that only decode, or ``same``. attn: decode
    attention ``split`` over blocks, or ``single``. prefill_attn: of prompts, ``exact`` (as decode computes it) or the
    plain ``reference``. Bits differ by ``scalar`` and ``reference`` only. batch_graph: decode steps replay captured
    graphs; prefill_graph: so do steps with prompts whose shape comes again. async_steps: a greedy decode step is queued
    while the one before it computes. device_argmax, device_topk: tokens and candidates are chosen on the device.
    overlap: a kernel may be launched before the one before it has ended
    (compute capability 9.0 and later).
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
    chunked_prefill: bool = True
    prefill: str = "auto"
    min_packed_prompts: int = 2
    prefix_cache: bool = True
    gemm: str = "auto"
    decode_gemm: str = "same"
    attn: str = "split"
    prefill_attn: str = "exact"
    batch_graph: bool = True
    prefill_graph: bool = True
    async_steps: bool = True
    device_argmax: bool = True
    device_topk: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            check_field(name, hint, getattr(self, name))
        if self.kv_pages is not None and self.kv_memory is not None:
            raise ConfigError("give kv_pages or kv_memory, not both")
        if self.decode_gemm not in ("same", self.gemm) and "scalar" in (self.gemm, self.decode_gemm):
            raise ConfigError(
                f"gemm {self.gemm} with decode_gemm {self.decode_gemm}: the bits of scalar are its own, so a request's "
                "tokens would depend on its neighbours; set both to scalar or neither"
            )
        if self.prefill == "serial" or not self.chunked_prefill:
            what = "prefill serial" if self.prefill == "serial" else "chunked_prefill off"
            if self.prefill_budget is not None or self.prefill_chunk_tokens is not None:
                raise ConfigError(f"{what} decides prefill_budget and prefill_chunk_tokens: leave them open")
            if self.prefill == "serial" and not self.chunked_prefill:
                raise ConfigError("prefill serial spreads a prompt over steps, and chunked_prefill off forbids it")

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, *, defaults: Mapping[str, Any] | None = None, **overrides: Any
    ) -> EngineConfig:
        """The defaults (``defaults`` before the fields' own), then CRUCIBLE_* variables, then ``overrides``.

        Overrides that are ``None`` do not count. One of kv_pages and kv_memory overrides both variables. Raises
        ConfigError naming the variable whose value cannot be used.
        """
        environ = os.environ if environ is None else environ
        given = {name: value for name, value in overrides.items() if value is not None}
        settled = given.keys() | (KV_SIZES if given.keys() & KV_SIZES else set())
        values: dict[str, Any] = dict(defaults or {})
        for name, hint in get_type_hints(cls).items():
            variable = f"CRUCIBLE_{name.upper()}"
            text = environ.get(variable)
            if text is None or name in settled:
                continue
            if name == "kv_memory":
                values[name] = parse_size(text, variable)
            elif hint is bool:
                values[name] = parse_switch(text, variable)
            elif hint is str:
                values[name] = text
            else:
                try:
                    values[name] = int(text)
                except ValueError:
                    raise ConfigError(f"{variable} must be a whole number, got {text!r}") from None
            check_field(name, hint, values[name], variable)
        return cls(**{**values, **given})

    def with_defaults(self, **values: Any) -> EngineConfig:
        """A copy in which each named field that is ``None`` has the given value."""
        return replace(self, **{name: value for name, value in values.items() if getattr(self, name) is None})


def require_quant(quant: str, device: str) -> None:
    """Raises ConfigError where ``device`` has no kernels for that weight type."""
    if quant == "f16" and device == "cpu":
        raise ConfigError("quant f16 needs device cuda; use int8 or f32 on a CPU")


def check_field(name: str, hint: object, value: object, label: str | None = None) -> None:
    """Raises ConfigError unless ``value`` can be that field's; ``label`` is its name in the message."""
    label = label or name
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise ConfigError(f"{label} must be one of {', '.join(CHOICES[name])}, got {value!r}")
    elif hint is bool:
        if type(value) is not bool:
            raise ConfigError(f"{label} must be True or False, got {value!r}")
    elif value is not None or hint is int:
        if type(value) is not int:  # True is an int, and no count
            raise ConfigError(f"{label} must be a whole number, got {value!r}")
        if value < (least := LEAST.get(name, 1)):
            raise ConfigError(f"{label} must be at least {least}, got {value}")


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
