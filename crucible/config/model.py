"""ModelConfig: every architectural choice of a checkpoint, named. Nothing is inferred and nothing has a default.

The native ``config.json`` is this structure as JSON. Head counts, norm placement or the RoPE pairing change the
compute graph, and a wrong guess still produces fluent text, so an absent or unknown value is an error naming it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from crucible.errors import CheckpointError
from crucible.json_file import one_line, parse_json

FORMAT = 1
MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1
"""Bounds that no model comes near; beyond them a corrupt file would cost minutes or all memory before it is refused."""

FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
"""The smallest and largest normal numbers of the type that models compute in."""


class LinearScaling(
    msgspec.Struct, tag="linear", tag_field="type", frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """RoPE position interpolation: every frequency divided by ``factor`` (arXiv:2306.15595)."""

    factor: float


class Llama3Scaling(
    msgspec.Struct, tag="llama3", tag_field="type", frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """The Llama 3.1 frequency scaling: low frequencies divided by ``factor``, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


class YarnScaling(msgspec.Struct, tag="yarn", tag_field="type", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """YaRN (arXiv:2309.00071): a ramp over dimensions between interpolated and kept frequencies.

    ``attention_factor`` multiplies cos and sin.
    """

    factor: float
    original_context_length: int
    beta_fast: float
    beta_slow: float
    attention_factor: float


class Rope(msgspec.Struct, tag="rope", tag_field="type", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rotary position embedding (arXiv:2104.09864).

    ``pairing``: ``half`` rotates (i, i + head_dim/2), ``interleaved`` rotates (2i, 2i + 1).
    """

    theta: float
    pairing: Literal["half", "interleaved"]
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None


class Alibi(msgspec.Struct, tag="alibi", tag_field="type", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Linear attention biases (arXiv:2108.12409)."""


class Learned(msgspec.Struct, tag="learned", tag_field="type", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One learned vector a position, added to the token embedding (``model.embed_positions.weight``)."""


class NoPosition(msgspec.Struct, tag="none", tag_field="type", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """No positional encoding."""


class Norm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``pre``: x + f(norm(x)); ``post``: norm(x + f(x)). A final norm precedes the head in both."""

    type: Literal["rmsnorm", "layernorm"]
    placement: Literal["pre", "post"]
    eps: float
    bias: bool


class Biases(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which projections carry a bias vector."""

    qkv: bool
    attention_output: bool
    mlp: bool


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder-only transformer. Sizes are element counts; ``context_length`` is in tokens.

    ``token_count`` counts the ids that mean something (50257 of GPT-2's 50304 padded rows); ids from there to
    ``vocab_size`` are padding: refused as input and never sampled.
    """

    crucible_format: Literal[1]
    vocab_size: int
    token_count: int
    context_length: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: Norm
    position: Rope | Alibi | Learned | NoPosition
    activation: Literal["swiglu", "gelu", "gelu_tanh"]
    biases: Biases
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: list[int]

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "token_count",
            "context_length",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            value, limit = getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE
            if not 1 <= value <= limit:
                raise CheckpointError(f"{name} must lie in 1 … {limit}, got {value}")
        if self.num_heads % self.num_kv_heads:
            heads = f"num_heads ({self.num_heads})"
            raise CheckpointError(f"{heads} must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.token_count > self.vocab_size:
            raise CheckpointError(f"token_count ({self.token_count}) is above vocab_size ({self.vocab_size})")
        if not FLOAT32_MIN <= self.norm.eps < 1:
            raise CheckpointError(f"norm.eps must lie between 0 and 1 (in float32), got {self.norm.eps}")
        if self.norm.bias and self.norm.type == "rmsnorm":
            raise CheckpointError("norm.bias needs norm.type layernorm, got rmsnorm")
        if isinstance(self.position, Rope):
            _check_rope(self.position, self.head_dim)
        for token in self.eos_token_ids:
            _check_token("eos_token_ids", token, self.vocab_size)
        if self.bos_token_id is not None:
            _check_token("bos_token_id", self.bos_token_id, self.vocab_size)

    @property
    def n_rep(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_dim(self) -> int:
        """Elements of K (or V) a token and layer."""
        return self.num_kv_heads * self.head_dim


def _check_token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise CheckpointError(f"{name}: token id {token} lies outside the vocabulary of {vocab_size}")


def _check_rope(rope: Rope, head_dim: int) -> None:
    if head_dim % 2:
        raise CheckpointError(f"head_dim must be even for RoPE, got {head_dim}")
    if not 1 < rope.theta <= FLOAT32_MAX:  # NaN fails too
        raise CheckpointError(f"position.theta must be a number above 1 that float32 holds, got {rope.theta}")
    if rope.scaling is None:
        return
    for name in rope.scaling.__struct_fields__:
        value = getattr(rope.scaling, name)
        if not 0 < value <= MAX_SIZE:  # NaN fails too
            raise CheckpointError(f"position.scaling.{name} must be a positive number, got {value}")
    if rope.scaling.factor < 1:
        raise CheckpointError(f"position.scaling.factor must be at least 1, got {rope.scaling.factor}")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if hasattr(rope.scaling, low) and not getattr(rope.scaling, low) < getattr(rope.scaling, high):
            raise CheckpointError(f"position.scaling.{low} must be below {high}, got {getattr(rope.scaling, low)}")


def parse_model_config(data: bytes | dict[str, Any], where: str | Path) -> ModelConfig:
    """The native ``config.json`` (bytes, or already parsed) as a ModelConfig.

    Raises CheckpointError ``<where>: <field>: <fault>`` for absent, unknown, mistyped or impossible values.
    """
    values = data if isinstance(data, dict) else parse_json(data, where)
    version = values.get("crucible_format")
    if type(version) is not int or version != FORMAT:
        raise CheckpointError(f"{where}: crucible_format must be {FORMAT}, got {version!r}; try a newer Crucible")
    try:
        return msgspec.convert(values, ModelConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: {_field_first(one_line(str(error)))}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


def serialise_model_config(config: ModelConfig) -> bytes:
    """``config`` as the bytes of a native ``config.json`` (what parse_model_config reads)."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def _field_first(message: str) -> str:
    """msgspec's ``Expected `int`, got `str` - at `$.norm.eps` `` as ``norm.eps: expected int, got str``."""
    text, _, path = message.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    missing = re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", text)
    if missing:
        prefix = f"{field}." if field else ""
        return f"{prefix}{missing[2]}: " + ("missing" if missing[1].startswith("missing") else "unknown field")
    text = text[:1].lower() + text[1:].replace("`", "")
    return f"{field}: {text}" if field else text
