"""What ``crucible validate`` compares: cases for every CUDA kernel, the bound of each error and where it comes from.

The measure is that of ops_table: max |difference| / max |value|. Inputs are what the kernel reads, exactly (halves,
quantised weights), so a bound has only the kernel's own roundings in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crucible.config.model import Alibi, ModelConfig, NoPosition, Norm, Rope
from crucible.kernels.ops_table import OPS, Case, OpRow, batch_of, dense, model
from crucible.kernels.problems import LINEAR, attention_problem, chosen, expected_choice, selection_rows
from crucible.kernels.table import KERNELS, MAX_TOP_K, KernelRow

HALF = 2.0**-11
"""Half a unit in the last place of a half, relative: what rounding to float16 costs."""
SINGLE = 2.0**-24
SEED = 7

Run = Callable[[Any, np.random.Generator], list[Any]]


@dataclass(frozen=True)
class Bound:
    value: float
    why: str


@dataclass(frozen=True)
class Check:
    """A kernel on one case. ``run`` is given either side's ops (crucible/model/validation_ops.py) and a generator.

    half: inputs are halves. pair: instead of ``run``, makes both sides' results from a device. splits: of decode
    attention.
    """

    kernel: KernelRow
    case: Case
    label: str
    bound: Bound
    run: Run
    half: bool = False
    pair: Callable[[Any, np.random.Generator], tuple[list[Any], list[Any]]] | None = None
    splits: int = 0

    @property
    def context(self) -> int:
        return max([self.case.config.context_length, *(s + n for s, n in self.spans)])

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.case.starts, self.case.lengths, strict=True))


# ---- bounds


def tensor_sum(inputs: int) -> float:
    """float32 sums on tensor cores, then of the chunks of 256.

    A step adds 16 products and the sum so far, each of which may be truncated to 2⁻²⁴ of the largest (so do Ampere's;
    Hopper's keep a bit more). Over the 16 steps of a chunk the sum grows evenly: 17 · 8.5 truncations of the final one.
    """
    return (145 + inputs / 256) * SINGLE


def projection_bound(row: KernelRow, case: Case, inputs: int) -> Bound:
    """A projection of ``inputs`` positive products, before its epilogue."""
    if "_scalar_" in row.name:
        return Bound((inputs + 4) * SINGLE, "K · 2⁻²⁴: one float32 multiply-add after the other")
    if row.weights == "f16":
        return Bound(tensor_sum(inputs), "(145 + K / 256) · 2⁻²⁴: tensor cores truncate the sums of exact products")
    weights = 6 * HALF / math.sqrt(3 * inputs)
    return Bound(weights + tensor_sum(inputs), "6 · 2⁻¹¹ / √(3 K): six deviations of K weights rounded to halves")


def linear_bound(row: KernelRow, case: Case) -> Bound:
    c = case.config
    inputs = c.intermediate_size if row.op == "project_add" else c.hidden_size
    sums = projection_bound(row, case, inputs)
    value, why = sums.value, sums.why
    if row.op in ("swiglu", "gelu"):
        # The centred sum (gate, or the only one) is about √K of K terms, so its roundings weigh more. A weight's is a
        # deviation of 2⁻¹¹ / √6; the largest sum is three deviations or more: six of the one are 2⁻¹¹ of the other.
        rounded = row.weights == "int8" and "_scalar_" not in row.name
        value += HALF if rounded else 2 * (inputs + 4) * SINGLE
        why += f"; {'2⁻¹¹ more' if rounded else '2 K · 2⁻²⁴ more'} where the sum cancels"
    if row.op == "qkv":
        value, why = value + 256 * SINGLE, why + "; the angle, up to 256 radians, is float32"
    if row.op in ("swiglu", "gelu") and row.weights != "f32":
        value, why = value + HALF, why + "; 2⁻¹¹ for a result of halves"
    if row.op == "qkv" and not (row.weights == "f32" and row.name.endswith("qkv32")):
        value, why = value + HALF, why + "; 2⁻¹¹ for a result of halves"
    return Bound(value, why)


def norm_bound(row: KernelRow) -> Bound:
    exact = Bound(2e-7, "three roundings of 2⁻²⁴: the factor and two products")
    if "layernorm" in row.name:
        exact = Bound(5 * SINGLE, "five roundings of 2⁻²⁴: the factor, a difference, two products, a sum")
    return exact if row.name.endswith("_f32") else Bound(exact.value + HALF, exact.why + "; 2⁻¹¹ for halves")


def attention_bound(row: KernelRow) -> Bound:
    if row.name.endswith("_f32_f32") or row.name.endswith("_f32_f16"):
        return Bound(2e-6, "sums over head_dim and positions in float32; exp within 2·10⁻⁷")
    if "_reference_" in row.name:
        return Bound(HALF + 2e-6, "2⁻¹¹ for a result of halves; the rest in float32")
    return Bound(2 * HALF, "2⁻¹¹ for each weight p, which is a half, and 2⁻¹¹ for the result")


# ---- cases

GEOMETRIES: dict[str, ModelConfig] = {
    "120m": model(768, 2048, 12, 3, 64),
    "smollm2": model(576, 1536, 9, 3, 64),
    "tinyllama": model(2048, 5632, 32, 4, 64),
    "llama3.2-1b": model(2048, 8192, 32, 8, 64),
    "hd128": model(1024, 2816, 8, 2, 128),
    "odd": model(97, 131, 3, 1, 64),
}
SMALL: dict[str, ModelConfig] = {
    "small": model(290, 272, 3, 1, 64),
    "hd128": model(70, 48, 2, 1, 128),
}
"""For tests. The first has two chunks of K, and more elements than a norm has threads."""
ROWS = {"small8": (1, 7), "small16": (9, 16), "small32": (17, 64), "big64": (64, 65), "big128": (65, 130),
        "scalar": (1, 33)}  # fmt: skip
SMALL_ROWS = {"small8": (3,), "small16": (9,), "small32": (17,), "big64": (65,), "big128": (65,), "scalar": (5,)}
CUT = 272
"""Outputs of the largest matrices that are computed, 17 tiles: the oracle takes its time, and K is what matters."""

OP_ROWS: dict[str, OpRow] = {row.name: row for row in OPS}


def cut(config: ModelConfig, op: str) -> ModelConfig:
    """``config`` with fewer outputs than the op has, where there are many."""
    if config.hidden_size * config.intermediate_size < 1 << 22:
        return config
    if op == "project_add":
        return replace_model(config, hidden_size=CUT)
    return replace_model(config, intermediate_size=CUT) if op in ("swiglu", "gelu") else config


def replace_model(config: ModelConfig, **changes: Any) -> ModelConfig:
    import msgspec

    return msgspec.structs.replace(config, **changes)


def linear_checks(row: KernelRow, small: bool) -> Iterator[Check]:
    match = LINEAR.fullmatch(row.name)
    form = match["form"] if match else ""
    half = row.weights != "f32"
    geometries = SMALL if small else GEOMETRIES
    counts = (SMALL_ROWS if small else ROWS)[form]
    for index, (name, config) in enumerate(geometries.items()):
        config = cut(config, row.op)
        changes: dict[str, Any] = {}
        if row.op == "gelu":
            changes = {"activation": ("gelu", "gelu_tanh")[index % 2]}
        if row.op == "logits":
            changes = {"vocab_size": 1003, "token_count": 1003} if name != "smollm2" else {}
        if row.op == "qkv" and name in ("odd", "small"):
            changes = {"position": Rope(theta=500.0, pairing="interleaved", scaling=None)}
        if row.op == "qkv" and name == "hd128":
            changes = {"position": NoPosition()}
        config = replace_model(config, **changes)
        for number in counts:
            rows = 2 * number if row.op == "logits" else number  # every other row wants logits
            lengths = (rows,) if row.op != "qkv" or rows == 1 else (1, rows - 1)
            case = Case(config, lengths, (0, 15)[: len(lengths)], row.weights or "f32", bias=index % 2 == 0)
            run = (mlp_run if row.op in ("swiglu", "gelu") else table_run)(row.op, case)
            yield Check(row, case, f"{name} {number} rows", linear_bound(row, case), run, half)


def table_run(op: str, case: Case) -> Run:
    """The run of ops_table's row ``op``."""
    return lambda ops, random: OP_ROWS[op].run(ops, case, random)


def mlp_run(op: str, case: Case) -> Run:
    """As ops_table's, but SwiGLU's ``up`` is 2⁻⁶ of that: of 2,048 inputs the product would not be a half any more.

    GELU's weights are so small that most sums lie where its two forms differ: their deviations are 0.5 … 1.1.
    """

    def run(ops: Any, random: np.random.Generator) -> list[Any]:
        shape = (case.config.intermediate_size, case.config.hidden_size)
        x, weights = ops.vector(dense(random, case.rows, shape[1])), dense(random, *shape) - np.float32(1)
        if op == "gelu":
            scale = np.float32(2.0 ** -round(math.log2(0.4 * math.sqrt(shape[1]))))
            return [ops.gelu(x, ops.pack([weights * scale], None, case.quant))]
        up = dense(random, *shape) / np.float32(64)
        biases = [dense(random, shape[0]), dense(random, shape[0])] if case.bias else None
        return [ops.swiglu(x, ops.pack_gated(weights, up, biases, case.quant))]

    return run


def picked_norm(case: Case) -> Run:
    """The norm of some rows of the residual stream, as before the head."""

    def run(ops: Any, random: np.random.Generator) -> list[Any]:
        d = case.config.hidden_size
        x, weight = ops.vector(dense(random, case.rows, d)), ops.vector(dense(random, d))
        batch = batch_of(case, random)
        batch.logit_rows = batch.logit_rows[::3].copy()
        return [ops.norm(ops.take_rows(x, batch), weight, None)]

    return run


def norm_checks(row: KernelRow, small: bool) -> Iterator[Check]:
    layer = "layernorm" in row.name
    norm = Norm(type="layernorm" if layer else "rmsnorm", placement="pre", eps=1e-5, bias=layer)
    for name, config in (SMALL if small else GEOMETRIES).items():
        case = Case(replace_model(config, norm=norm), (5,), (0,), bias=layer)
        yield Check(row, case, f"{name} 5 rows", norm_bound(row), table_run("norm", case))
        yield Check(row, case, f"{name} 2 of 5 rows", norm_bound(row), picked_norm(case))


def embed_checks(row: KernelRow, small: bool) -> Iterator[Check]:
    for index, (name, config) in enumerate((SMALL if small else GEOMETRIES).items()):
        case = Case(config, (9,), (3,), row.weights or "f32", bias=index % 2 == 1)
        bound = Bound(2 * SINGLE, "2 · 2⁻²⁴: one multiplication by the scale, one addition")
        yield Check(row, case, f"{name} 9 rows", bound, table_run("embed", case))


HEADS = ((12, 3), (9, 3), (32, 4), (32, 8), (3, 1), (18, 1), (4, 4))
SPANS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1, 1, 1, 1), (0, 15, 127, 128)),
    ((1, 17, 70), (1000, 120, 0)),
    ((130,), (200,)),
)
SMALL_SPANS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((1, 3), (128, 14)), ((19,), (245,)))


def attention_checks(row: KernelRow, small: bool) -> Iterator[Check]:
    tail = row.name.rsplit("_", 1)[-1]
    widths = (int(tail),) if tail.isdigit() else (64, 128, 40, 200)
    for width in widths if not small else widths[-1:]:
        for index, (heads, kv_heads) in enumerate(HEADS if not small else ((4, 2), (18, 1))):
            config = model(64, 64, heads, kv_heads, width, position=Alibi() if index % 2 else NoPosition())
            for number, (lengths, starts) in enumerate(SMALL_SPANS if small else SPANS):
                case = Case(config, lengths, starts)
                spans = "+".join(f"{n}@{s}" for n, s in zip(lengths, starts, strict=True))
                yield Check(
                    row, case, f"{heads}/{kv_heads}x{width} {spans}", attention_bound(row), attention_run(case),
                    splits=(0, 1, 3)[number] if not small else (2, 1)[number],
                )  # fmt: skip


def attention_run(case: Case) -> Run:
    c = case.config

    def run(ops: Any, random: np.random.Generator) -> list[Any]:
        problem = attention_problem(random, case.lengths, case.starts, c.num_heads, c.num_kv_heads, c.head_dim)
        return [ops.attend(problem)]

    return run


def select_checks(row: KernelRow, small: bool) -> Iterator[Check]:
    """The row's nine kinds of ties, NaN and zeros; equal ids and values, nothing less."""
    why = Bound(0.0, "the same ids, values and flags")
    for width, count in ((100, 97), (5184, 5121)) if small else ((100, 97), (8192, 5003), (49152, 49152)):
        for k in (1,) if row.op == "argmax" else (5, 40) if small else (1, 40, 500, MAX_TOP_K):
            case = Case(model(64, 64, 1, 1, 64), (10,), (0,))
            label = f"{count} ids" + (f", top {k}" if row.op == "top_k" else "")

            def pair(
                device: Any, random: np.random.Generator, width: int = width, count: int = count, k: int = k
            ) -> Any:
                logits = selection_rows(random, width, count)
                got = [device.download(a) for a in chosen(device, row.name, logits, count, k)]
                return got, expected_choice(logits, row.op, count, k)

            yield Check(row, case, label, why, lambda ops, random: [], pair=pair)


MAKERS: dict[str, Callable[[KernelRow, bool], Iterator[Check]]] = {
    **dict.fromkeys(("logits", "project_add", "swiglu", "gelu", "qkv"), linear_checks),
    "norm": norm_checks,
    "embed": embed_checks,
    "attention": attention_checks,
    "argmax": select_checks,
    "top_k": select_checks,
}


def checks(rows: Sequence[KernelRow] = KERNELS, *, small: bool = False) -> list[Check]:
    """All cases of ``rows``; ``small``: few and small ones, for the emulator."""
    return [check for row in rows for check in MAKERS[row.op](row, small)]
