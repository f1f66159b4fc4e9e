"""The ops: for each its oracle, cases, tolerance and bit class. Tests, validation and profiling read this table.

A row runs one operation of the Ops protocol on inputs made from a seed. The same ``run`` is given a device's Ops and
the float64 ReferenceOps, whose results are compared. Inputs are mantissa-dense and positive: small integers over a
power of two would hide precision loss, and cancelling sums make a relative error meaningless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.config.engine import PAGE_TOKENS
from crucible.config.model import Biases, ModelConfig, NoPosition, Norm, Rope

EPSILON = 2.0**-24  # half a unit in the last place of float32, relative


@dataclass(frozen=True)
class Case:
    """One input: the model it stands for, the rows of each sequence, and where each sequence starts."""

    config: ModelConfig
    lengths: tuple[int, ...] = (5,)
    starts: tuple[int, ...] = (0,)
    quant: str = "f32"
    bias: bool = False

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    def __str__(self) -> str:
        c = self.config
        rows = "+".join(f"{n}@{s}" for n, s in zip(self.lengths, self.starts, strict=True))
        heads = f"{c.num_heads}/{c.num_kv_heads}x{c.head_dim}"
        bias = "-bias" if self.bias else ""
        return f"d{c.hidden_size}-ffn{c.intermediate_size}-{heads}-rows{rows}-{self.quant}{bias}"


@dataclass(frozen=True)
class OpRow:
    """``run(ops, case, rng)`` returns the arrays an op makes; ``tolerance(case)`` bounds |difference| / max |value|.

    ``bound`` says where the tolerance comes from. ``bits``: ``rows`` means that a row's bits depend on that row
    alone, ``sequence`` that they depend on the row's own sequence alone.
    """

    name: str
    oracle: str
    cases: tuple[Case, ...]
    run: Callable[[Any, Case, np.random.Generator], list[Any]]
    tolerance: Callable[[Case], float]
    bound: str
    bits: str = field(default="rows")


def model(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, **changes: Any) -> ModelConfig:
    """A configuration for op cases; vocabulary 100, context 256."""
    values: dict[str, Any] = {
        "crucible_format": 1,
        "vocab_size": 100,
        "token_count": 100,
        "context_length": 256,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_layers": 2,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "norm": Norm(type="rmsnorm", placement="pre", eps=1e-5, bias=False),
        "position": Rope(theta=10000.0, pairing="half", scaling=None),
        "activation": "swiglu",
        "biases": Biases(qkv=False, attention_output=False, mlp=False),
        "tied_embeddings": True,
        "bos_token_id": None,
        "eos_token_ids": [],
    }
    return ModelConfig(**{**values, **changes})


def dense(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """float32 values of 0.5 … 1.5 with full mantissas."""
    return (rng.random(shape) + 0.5).astype(np.float32)


def batch_of(case: Case, rng: np.random.Generator, shuffled: bool = True) -> SimpleNamespace:
    """A ragged batch whose sequences own random pages; every row wants logits."""
    pages_each = -(-case.config.context_length // PAGE_TOKENS)
    count = len(case.lengths) * pages_each
    pages = rng.permutation(count) if shuffled else np.arange(count)
    positions = [s + i for n, s in zip(case.lengths, case.starts, strict=True) for i in range(n)]
    return SimpleNamespace(
        token_ids=rng.integers(0, case.config.vocab_size, case.rows).astype(np.int32),
        positions=np.array(positions, np.int32),
        row_sequence=np.repeat(np.arange(len(case.lengths)), case.lengths).astype(np.int32),
        page_tables=pages.reshape(len(case.lengths), pages_each).astype(np.int32),
        logit_rows=np.arange(case.rows, dtype=np.int32),
        page_count=count,
    )


def _activations(ops: Any, case: Case, rng: np.random.Generator, columns: int) -> Any:
    """A device array [rows, columns] of dense values."""
    return ops.vector(dense(rng, case.rows, columns))


def _pack(ops: Any, case: Case, rng: np.random.Generator, *shapes: tuple[int, int]) -> Any:
    parts = [dense(rng, *shape) for shape in shapes]
    biases = [dense(rng, shape[0]) for shape in shapes] if case.bias else None
    return ops.pack(parts, biases, case.quant)


def _embed(ops: Any, case: Case, rng: np.random.Generator) -> list[Any]:
    c = case.config
    table = ops.pack([dense(rng, c.vocab_size, c.hidden_size)], None, case.quant)
    learned = ops.vector(dense(rng, c.context_length, c.hidden_size)) if case.bias else None
    return [ops.embed(table, learned, batch_of(case, rng))]


def _norm(ops: Any, case: Case, rng: np.random.Generator) -> list[Any]:
    d = case.config.hidden_size
    x = _activations(ops, case, rng, d)
    return [ops.norm(x, ops.vector(dense(rng, d)), ops.vector(dense(rng, d)) if case.bias else None)]


def _project_add(ops: Any, case: Case, rng: np.random.Generator) -> list[Any]:
    c = case.config
    matrix = _pack(ops, case, rng, (c.hidden_size, c.intermediate_size))
    residual = _activations(ops, case, rng, c.hidden_size)
    ops.project_add(_activations(ops, case, rng, c.intermediate_size), matrix, residual)
    return [residual]


def _swiglu(ops: Any, case: Case, rng: np.random.Generator) -> list[Any]:
    shape = (case.config.intermediate_size, case.config.hidden_size)
    # The gate is centred, so that silu is met on both sides of zero; its sum has few terms left of one sign.
    gate, up = dense(rng, *shape) - np.float32(1.0), dense(rng, *shape)
    biases = [dense(rng, shape[0]), dense(rng, shape[0])] if case.bias else None
    matrix = ops.pack_gated(gate, up, biases, case.quant)
    return [ops.swiglu(_activations(ops, case, rng, case.config.hidden_size), matrix)]


def _gelu(ops: Any, case: Case, rng: np.random.Generator) -> list[Any]:
    c = case.config
    matrix = ops.pack([dense(rng, c.intermediate_size, c.hidden_size) - np.float32(1.0)], None, case.quant)
    return [ops.gelu(_activations(ops, case, rng, c.hidden_size), matrix)]


def _qkv(ops: Any, case: Case, rng: np.random.Generator) -> list[Any]:
    c = case.config
    shapes = [(c.num_heads * c.head_dim, c.hidden_size), (c.kv_dim, c.hidden_size), (c.kv_dim, c.hidden_size)]
    batch = batch_of(case, rng)
    matrix = _pack(ops, case, rng, *shapes)
    qkv = ops.qkv(_activations(ops, case, rng, c.hidden_size), matrix, 1, batch, ops.allocate_cache(batch.page_count))
    return [qkv.reshape(case.rows, -1)]


def _attention(ops: Any, case: Case, rng: np.random.Generator) -> list[Any]:
    """Fills the cache from position 0 by qkv, then attends from the rows of the case."""
    c = case.config
    ends = tuple(s + n for n, s in zip(case.lengths, case.starts, strict=True))
    whole = Case(c, ends, (0,) * len(ends), case.quant, case.bias)
    batch = batch_of(whole, rng)
    cache = ops.allocate_cache(batch.page_count)
    # Small weights keep the scores apart without letting one position take all of the softmax.
    widths = (c.num_heads * c.head_dim, c.kv_dim, c.kv_dim)
    parts = [dense(rng, n, c.hidden_size) / np.float32(c.hidden_size) for n in widths]
    matrix = ops.pack(parts, None, case.quant)
    x = dense(rng, whole.rows, c.hidden_size)
    ops.qkv(ops.vector(x), matrix, 1, batch, cache)
    rows = np.flatnonzero(batch.positions >= np.repeat(case.starts, ends))
    part = SimpleNamespace(**vars(batch))
    for name in ("token_ids", "positions", "row_sequence"):
        setattr(part, name, getattr(batch, name)[rows])
    return [ops.attention(ops.qkv(ops.vector(x[rows]), matrix, 1, part, cache), 1, part, cache)]


def _logits(ops: Any, case: Case, rng: np.random.Generator) -> list[Any]:
    c = case.config
    head = ops.pack([dense(rng, c.vocab_size, c.hidden_size)], None, case.quant)
    batch = batch_of(case, rng)
    batch.logit_rows = batch.logit_rows[::2].copy()
    x = ops.take_rows(_activations(ops, case, rng, c.hidden_size), batch)
    return [ops.logits(x, head, batch)]


SMOL = model(576, 1536, 9, 3, 64)
ODD = model(33, 65, 3, 1, 10)
MHA = model(32, 48, 4, 4, 8, position=Rope(theta=500.0, pairing="interleaved", scaling=None))
PLAIN = model(32, 48, 4, 2, 8, position=NoPosition())
LAYERNORM = model(97, 48, 4, 2, 8, norm=Norm(type="layernorm", placement="pre", eps=1e-5, bias=True))
GELU_TANH = model(40, 70, 4, 2, 10, activation="gelu_tanh")
GELU = model(40, 70, 4, 2, 10, activation="gelu")


def _linear_cases(*rows: int) -> tuple[Case, ...]:
    return tuple(
        Case(config, (n,), (0,), quant, bias)
        for config, bias in ((ODD, True), (SMOL, False))
        for quant in ("f32", "int8")
        for n in rows
    )


def _sum_bound(terms: Callable[[ModelConfig], int]) -> Callable[[Case], float]:
    return lambda case: (terms(case.config) + 4) * EPSILON


HIDDEN_SUM = "a sum of K rounded terms: K · 2⁻²⁴ (Higham 2002, section 3.1)"

OPS: tuple[OpRow, ...] = (
    OpRow("embed", "reference.embed", (Case(ODD), Case(ODD, quant="int8"), Case(SMOL, bias=True)), _embed,
          lambda case: 2 * EPSILON, "one multiplication by the scale, one addition"),
    OpRow("norm", "reference.rmsnorm, reference.layernorm",
          (Case(ODD), Case(SMOL, bias=True), Case(LAYERNORM), Case(LAYERNORM, bias=True)), _norm,
          lambda case: 2e-7, "sums in float64; a few roundings of the quotient and products"),
    OpRow("project_add", "reference.linear", _linear_cases(1, 3, 8, 13, 70), _project_add,
          _sum_bound(lambda c: c.intermediate_size), HIDDEN_SUM),
    OpRow("swiglu", "reference.linear, reference.swiglu", _linear_cases(1, 3, 8, 13), _swiglu,
          _sum_bound(lambda c: 2 * c.hidden_size), HIDDEN_SUM + " for each of gate and up"),
    OpRow("gelu", "reference.linear, reference.gelu", (Case(GELU), Case(GELU_TANH)), _gelu,
          _sum_bound(lambda c: 2 * c.hidden_size), HIDDEN_SUM),
    OpRow("qkv", "reference.linear, reference.rope",
          (Case(SMOL), Case(ODD, quant="int8"), Case(MHA, bias=True), Case(PLAIN), Case(MHA, (3, 1, 20), (100, 7, 15))),
          _qkv, lambda case: (case.config.hidden_size + 4) * EPSILON + 256 * EPSILON,
          HIDDEN_SUM + "; the angle, up to 256 radians, is float32"),
    OpRow("attention", "reference.attention",
          (Case(SMOL, (40,)), Case(SMOL, (1, 1, 17), (200, 15, 16)), Case(MHA, (1, 33), (31, 3)),
           Case(ODD, (2,), (14,))),
          _attention, lambda case: (case.config.hidden_size + 256 + case.config.head_dim) * EPSILON + 4e-7,
          HIDDEN_SUM + " in the projection and over positions; exp within 2·10⁻⁷", bits="sequence"),
    OpRow("logits", "reference.linear", _linear_cases(1, 9), _logits, _sum_bound(lambda c: c.hidden_size), HIDDEN_SUM),
)  # fmt: skip
