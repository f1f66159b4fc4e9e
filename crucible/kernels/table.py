"""The CUDA kernels: for each its source, op, arguments and limits. Launcher, tests and docs/kernels.md read this table.

A row states what the C signature cannot: element types of pointers, which may be null, which integers are allowed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from crucible.kernels.cuda import geometry

ELEMENTS = {
    "f16": "float16", "f32": "float32", "i32": "int32", "u32": "uint32", "u64": "uint64",
    "i8": "int8", "u8": "uint8", "u16": "uint16",
}  # fmt: skip
"""Pointer elements and their numpy names; ``any`` is one that is not checked."""

CTypes = type[ctypes.c_void_p] | type[ctypes.c_int] | type[ctypes.c_float]


@dataclass(frozen=True)
class Argument:
    """A kernel argument. element: of a pointer (a key of ELEMENTS, or ``any``); "" for the numbers i32 and f32."""

    name: str
    ctype: CTypes
    element: str = ""
    nullable: bool = False

    @classmethod
    def parse(cls, text: str) -> Argument:
        """``name:i32``, ``name:f32``, ``name:f16*`` (a pointer) or ``name:f32*?`` (one that may be null)."""
        match = re.fullmatch(r"(\w+):(\w+)(\*\??)?", text)
        if match is not None:
            name, kind, pointer = match.groups()
            if pointer and (kind in ELEMENTS or kind == "any"):
                return cls(name, ctypes.c_void_p, kind, pointer == "*?")
            if not pointer and kind in ("i32", "f32"):
                return cls(name, ctypes.c_int if kind == "i32" else ctypes.c_float)
        raise ValueError(f"a kernel argument is name:i32, name:f32 or name:TYPE*, got {text!r}")


def arguments(text: str) -> tuple[Argument, ...]:
    """The arguments of a kernel in order, separated by blanks."""
    return tuple(Argument.parse(part) for part in text.split())


def no_shared(values: Mapping[str, int]) -> int:
    return 0


@dataclass(frozen=True)
class KernelRow:
    """A kernel, ``extern "C"`` in ``source``.

    op: the row of ops_table that it computes, or ``argmax`` or ``top_k``. threads: its block. weights: the weight type
    it reads, if any. limits: for integer arguments the values that are allowed. shared: dynamic shared memory in bytes
    from the integer arguments and ``grid_x``, the blocks in x. min_arch: compute capability times ten. dependent: it
    calls dependency_wait, so that it may be launched before its predecessor has ended.
    """

    name: str
    source: str
    op: str
    arguments: tuple[Argument, ...]
    threads: int
    weights: str | None = None
    limits: Mapping[str, Collection[int]] = field(default_factory=dict)
    shared: Callable[[Mapping[str, int]], int] = no_shared
    min_arch: int = 80
    dependent: bool = False

    @property
    def ctypes(self) -> tuple[CTypes, ...]:
        return tuple(argument.ctype for argument in self.arguments)


HEADS = range(1, 1025)
VOCABULARY = range(1, (1 << 21) + 1)
"""Ids that select.cu's radix passes tell apart."""

MAX_TOP_K = 1024
"""The widest selection on the device; a wider top_k brings its row to the host."""

_CACHE = "kv_heads:i32 layers:i32 layer:i32"
_BATCH = "positions:i32* row_sequence:i32* page_tables:i32* max_pages:i32"
_ATTENTION = {"heads": HEADS, "kv_heads": HEADS, "layers": range(1, 1 << 16), "max_pages": range(1, 1 << 20)}


def _attention(name: str, source: str, threads: int, extra: str, types: tuple[str, str] = ("f16", "f16"),
               limits: Mapping[str, Collection[int]] | None = None) -> KernelRow:  # fmt: skip
    act, kv = types
    text = (
        f"q:{act}* q_stride:i32 k_cache:{kv}* v_cache:{kv}* {_BATCH} heads:i32 {_CACHE} slopes:f32*? "
        f"out:{act}* out_stride:i32 {extra}"
    )
    return KernelRow(
        name, source, "attention", arguments(text), threads, limits={**_ATTENTION, **(limits or {})}, dependent=True
    )


_PROJECTION = "weights:any* scales:any*? bias:f32*? factor:f32 tiles:i32 inputs:i32 x:any* x_stride:i32 rows:i32"
_EPILOGUES = {
    "store": "out:f32* stride:i32 outputs:i32",
    "add": "out:f32* stride:i32 outputs:i32",
    "swiglu": "out:{act}* stride:i32 outputs:i32",
    "gelu": "out:{act}* stride:i32 outputs:i32 tanh_form:i32",
    **{name: f"q:{{act}}* q_stride:i32 k_cache:{kv}* v_cache:{kv}* {_BATCH} cosines:f32*? sines:f32*? heads:i32 "
             "kv_heads:i32 head_dim:i32 interleaved:i32 layer:i32 layers:i32"
       for name, kv in (("qkv", "f16"), ("qkv32", "f32"))},
}  # fmt: skip
_PROJECTION_LIMITS: Mapping[str, Collection[int]] = {
    "heads": HEADS,
    "kv_heads": HEADS,
    "head_dim": range(16, 257, 16),
    "interleaved": (0, 1),
    "tanh_form": (0, 1),
}
_OPS = {"store": "logits", "add": "project_add", "swiglu": "swiglu", "gelu": "gelu", "qkv": "qkv", "qkv32": "qkv"}


def _linear(form: str, weights: str, shared: Callable[[Mapping[str, int]], int] = no_shared) -> list[KernelRow]:
    """The kernels of one way to compute projections, one for each epilogue."""
    act = "f32" if weights == "f32" else "f16"
    family = form.rstrip("0123456789")
    return [
        KernelRow(
            f"crucible_linear_{form}_{weights}_{name}",
            f"linear_{family}.cu",
            _OPS[name],
            arguments(f"{_PROJECTION} {tail.format(act=act)}"),
            geometry.THREADS,
            weights,
            {name: allowed for name, allowed in _PROJECTION_LIMITS.items() if f"{name}:" in tail},
            shared,
            dependent=True,
        )
        for name, tail in _EPILOGUES.items()
    ]


def _small_shared(tokens: int) -> Callable[[Mapping[str, int]], int]:
    return lambda sizes: geometry.small_shared(sizes["tiles"], sizes["inputs"], tokens, sizes["grid_x"])


def _big_shared(tokens: int) -> Callable[[Mapping[str, int]], int]:
    return lambda sizes: geometry.big(sizes["tiles"], sizes["rows"], tokens).shared


KERNELS: tuple[KernelRow, ...] = (
    *(KernelRow(f"crucible_embed_{weights}", "embed.cu", "embed",
                arguments("weights:any* scales:any*? factor:f32 width:i32 token_ids:i32* learned:f32*? positions:i32*? "
                          "out:f32* out_stride:i32"), 128, weights, dependent=True)
      for weights in ("int8", "f16", "f32")),
    *(KernelRow(f"crucible_{norm}_{act}", "norm.cu", "norm",
                arguments(f"x:f32* x_stride:i32 source_rows:i32*? weight:f32* bias:f32*? eps:f32 width:i32 out:{act}* "
                          "out_stride:i32"), 256, dependent=True)
      for norm in ("rmsnorm", "layernorm") for act in ("f16", "f32")),
    *(row for tokens in geometry.SMALL_TOKENS for weights in ("int8", "f16")
      for row in _linear(f"small{tokens}", weights, _small_shared(tokens))),
    *(row for tokens in geometry.BIG_TOKENS for weights in ("int8", "f16")
      for row in _linear(f"big{tokens}", weights, _big_shared(tokens))),
    *(row for weights in ("int8", "f16", "f32") for row in _linear("scalar", weights)),
    *(_attention(f"crucible_attention_decode_{hd}", "attention_decode.cu", 256,
                 "partials:f32*? counters:u32*? max_pieces:i32") for hd in (64, 128)),
    *(_attention(f"crucible_attention_prefill_{hd}", "attention_prefill.cu", 128,
                 "tile_first:i32* tile_rows:i32*") for hd in (64, 128)),
    *(_attention(f"crucible_attention_reference_{act}_{kv}", "attention_reference.cu", 128,
                 "head_dim:i32", (act, kv), {"head_dim": range(1, 257)})
      for act in ("f16", "f32") for kv in ("f16", "f32")),
    KernelRow("crucible_argmax", "select.cu", "argmax",
              arguments("logits:f32* stride:i32 token_count:i32 partials:u64* counters:u32* guard:i32 tokens:i32* "
                        "flags:i32*?"),
              512, limits={"token_count": VOCABULARY, "guard": (0, 1)}, dependent=True),
    KernelRow("crucible_top_k", "select.cu", "top_k",
              arguments("logits:f32* stride:i32 token_count:i32 top_ks:i32* max_k:i32 partials:u64* counters:u32* "
                        "ids:i32* values:f32* flags:i32*"),
              512, limits={"token_count": VOCABULARY, "max_k": range(1, MAX_TOP_K + 1)}, dependent=True),
)  # fmt: skip


def kernel(name: str) -> KernelRow:
    """The row of a kernel. Raises KeyError."""
    return BY_NAME[name]


BY_NAME: Mapping[str, KernelRow] = {row.name: row for row in KERNELS}
