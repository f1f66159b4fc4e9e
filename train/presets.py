"""Presets: the sizes that ``crucible-train`` knows, and how the five axes of the study become a ModelConfig.

Imports no torch, so that the command line can list presets at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from crucible.checkpoint import EMBEDDING, HEAD, expected_tensors, parameter_count
from crucible.config.model import Alibi, Biases, Learned, ModelConfig, NoPosition, Norm, Rope
from crucible_train.errors import TrainingError

GPT2_VOCABULARY = 50304
"""GPT-2's 50257 ids, padded to a multiple of 128."""

POSITION_TABLE = "model.embed_positions.weight"
NORM_EPS = 1e-5
ROPE_THETA = 10000.0
FEED_FORWARD_MULTIPLE = 64

AXES: dict[str, tuple[str, ...]] = {
    "attention": ("gqa", "mha", "mqa"),
    "position": ("rope", "alibi", "learned", "none"),
    "activation": ("swiglu", "gelu"),
    "norm": ("rmsnorm", "layernorm"),
    "placement": ("pre", "post"),
}
"""The choices of each axis, the control first. The control is a plain Llama, which every exporter takes."""


@dataclass(frozen=True)
class Preset:
    """A model size. ``context_length`` and ``vocab_size`` are what is meant when nothing else is asked for."""

    num_layers: int
    hidden_size: int
    num_heads: int
    context_length: int
    vocab_size: int = GPT2_VOCABULARY


PRESETS: dict[str, Preset] = {
    "tiny": Preset(num_layers=2, hidden_size=64, num_heads=4, context_length=64, vocab_size=512),
    "nano": Preset(num_layers=12, hidden_size=256, num_heads=4, context_length=512, vocab_size=8192),
    "30m": Preset(num_layers=6, hidden_size=384, num_heads=6, context_length=1024),
    "120m": Preset(num_layers=12, hidden_size=768, num_heads=12, context_length=1024),
    "350m": Preset(num_layers=24, hidden_size=1024, num_heads=16, context_length=1024),
}
"""``tiny`` is for tests: seconds on a CPU."""


@dataclass(frozen=True)
class Counts:
    """Parameters of a model. ``embedding`` is the token and position tables and an untied head."""

    total: int
    embedding: int

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding


def model_config(
    preset: str | Preset,
    *,
    vocab_size: int | None = None,
    token_count: int | None = None,
    eos_token_id: int | None = None,
    context_length: int | None = None,
    attention: str = "gqa",
    position: str = "rope",
    activation: str = "swiglu",
    norm: str = "rmsnorm",
    placement: str = "pre",
    tied: bool = True,
) -> ModelConfig:
    """The ModelConfig of a preset and a choice on each axis of AXES.

    vocab_size: rows of the embedding, default the preset's; token_count: ids that mean something, default all.
    Raises TrainingError for an unknown preset or choice, and where gqa would be mha or mqa; CheckpointError for sizes
    that no model can have.
    """
    size = find_preset(preset) if isinstance(preset, str) else preset
    chosen = {
        "attention": attention,
        "position": position,
        "activation": activation,
        "norm": norm,
        "placement": placement,
    }
    for axis, value in chosen.items():
        _check_choice(axis, value, AXES[axis])
    if size.hidden_size % size.num_heads:
        raise TrainingError(f"hidden_size {size.hidden_size} must be a multiple of num_heads {size.num_heads}")
    vocab_size = size.vocab_size if vocab_size is None else vocab_size
    positions: dict[str, Any] = {
        "rope": Rope(theta=ROPE_THETA, pairing="half", scaling=None),
        "alibi": Alibi(),
        "learned": Learned(),
        "none": NoPosition(),
    }
    norm_type: Any = norm
    return ModelConfig(
        crucible_format=1,
        vocab_size=vocab_size,
        token_count=vocab_size if token_count is None else token_count,
        context_length=size.context_length if context_length is None else context_length,
        hidden_size=size.hidden_size,
        intermediate_size=feed_forward_size(size.hidden_size, activation),
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        num_kv_heads=kv_heads(size.num_heads, attention),
        head_dim=size.hidden_size // size.num_heads,
        norm=Norm(
            type=norm_type, placement="pre" if placement == "pre" else "post", eps=NORM_EPS, bias=norm == "layernorm"
        ),
        position=positions[position],
        activation="swiglu" if activation == "swiglu" else "gelu",
        biases=Biases(qkv=False, attention_output=False, mlp=False),
        tied_embeddings=tied,
        bos_token_id=None,
        eos_token_ids=[] if eos_token_id is None else [eos_token_id],
    )


def find_preset(name: str) -> Preset:
    """The preset called ``name``. Raises TrainingError naming those there are."""
    _check_choice("preset", name, PRESETS)
    return PRESETS[name]


def kv_heads(num_heads: int, attention: str) -> int:
    """KV heads of mha (all), mqa (one), or gqa: the least divisor of ``num_heads`` from a quarter of them up, ≥ 2.

    Raises TrainingError where gqa would be mqa or mha: a comparison of the two would compare a model with itself.
    """
    _check_choice("attention", attention, AXES["attention"])
    if attention != "gqa":
        return num_heads if attention == "mha" else 1
    least = max(2, num_heads // 4)
    heads = next((n for n in range(least, num_heads) if num_heads % n == 0), num_heads)
    if heads >= num_heads:
        raise TrainingError(
            f"gqa with {num_heads} heads would degenerate to mha or mqa; use a head count with a divisor between, or "
            "attention mha or mqa"
        )
    return heads


def feed_forward_size(hidden_size: int, activation: str) -> int:
    """Inner width: 4d for gelu; for swiglu two thirds of it, up to a multiple of 64 (three matrices for gelu's two)."""
    _check_choice("activation", activation, AXES["activation"])
    if activation == "gelu":
        return 4 * hidden_size
    multiple = FEED_FORWARD_MULTIPLE
    return -(-8 * hidden_size // (3 * multiple)) * multiple


def parameter_counts(config: ModelConfig) -> Counts:
    """Parameters of a model of ``config``, from its tensors' shapes."""
    shapes = expected_tensors(config)
    tables = {name: shape for name, shape in shapes.items() if name in (EMBEDDING, HEAD, POSITION_TABLE)}
    return Counts(total=parameter_count(shapes), embedding=parameter_count(tables))


def _check_choice(what: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise TrainingError(f"{what} must be one of {', '.join(choices)}, got {value!r}")
