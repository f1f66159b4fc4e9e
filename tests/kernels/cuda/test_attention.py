"""The attention kernels against the oracle and each other, over shuffled pages and poisoned slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from crucible.reference.attention import attention as oracle
from tests.kernels.cuda.places import kernels, place

__all__ = ["place"]  # the fixture

PAGE, PIECE = 16, 128
LAYERS, LAYER = 2, 1


@dataclass
class Problem:
    """A ragged batch over a paged cache whose unwritten slots, other layers and unused pages hold NaN.

    q [rows, heads, head_dim] float16; k, v: a list of [positions, kv_heads, head_dim] float16, one a sequence.
    """

    q: NDArray[np.float16]
    k: list[NDArray[np.float16]]
    v: list[NDArray[np.float16]]
    positions: NDArray[np.int32]
    row_sequence: NDArray[np.int32]
    slopes: NDArray[np.float32] | None
    page_tables: NDArray[np.int32]
    k_cache: NDArray[np.float16]
    v_cache: NDArray[np.float16]

    @property
    def geometry(self) -> tuple[int, int, int]:
        return self.q.shape[1], self.k[0].shape[1], self.q.shape[2]

    def rows(self, wanted: list[int]) -> tuple[NDArray[np.float16], NDArray[np.int32], NDArray[np.int32]]:
        """q as [rows, padded stride], positions and sequences of some rows."""
        q = self.q[wanted].reshape(len(wanted), -1)
        padded = np.full((len(wanted), q.shape[1] + 64), np.nan, np.float16)
        padded[:, : q.shape[1]] = q
        return padded, self.positions[wanted], self.row_sequence[wanted]


def problem(
    lengths: list[int], starts: list[int], heads: int, kv_heads: int, head_dim: int, *, alibi: bool = False,
    seed: int = 1, size: float = 1.0,
) -> Problem:  # fmt: skip
    """``lengths[i]`` rows of sequence i at positions ``starts[i]`` …; all earlier positions are in the cache."""
    rng = np.random.default_rng(seed)
    ends = [s + n for s, n in zip(starts, lengths, strict=True)]
    pages = [-(-end // PAGE) for end in ends]
    k, v = (
        [(rng.standard_normal((end, kv_heads, head_dim)) * size).astype(np.float16) for end in ends] for _ in range(2)
    )
    total = sum(pages) + 3
    order = rng.permutation(total)
    tables = np.full((len(ends), max(pages) + 1), 10**6, np.int32)  # an entry past the used ones must not be read
    caches = [np.full((total, LAYERS, kv_heads, PAGE * head_dim), np.nan, np.float16) for _ in range(2)]
    taken = 0
    for i, count in enumerate(pages):
        tables[i, :count] = order[taken : taken + count]
        taken += count
        for p in range(ends[i]):
            page = tables[i, p // PAGE]
            caches[0][page, LAYER].reshape(kv_heads, PAGE, head_dim)[:, p % PAGE] = k[i][p]
            caches[1][page, LAYER].reshape(kv_heads, head_dim, PAGE)[:, :, p % PAGE] = v[i][p]
    positions = np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)]).astype(np.int32)
    return Problem(
        q=(rng.standard_normal((len(positions), heads, head_dim)) * size).astype(np.float16),
        k=k,
        v=v,
        positions=positions,
        row_sequence=np.repeat(np.arange(len(ends)), lengths).astype(np.int32),
        slopes=(rng.random(heads) * 0.1 + 0.001).astype(np.float32) if alibi else None,
        page_tables=tables,
        k_cache=caches[0],
        v_cache=caches[1],
    )


def expected(p: Problem) -> NDArray[np.float64]:
    """float64 [rows, heads · head_dim] by the oracle."""
    heads, _, _ = p.geometry
    slopes = np.zeros(heads) if p.slopes is None else p.slopes.astype(np.float64)
    out = []
    for row, position in enumerate(p.positions):
        s = p.row_sequence[row]
        k, v = (x[s][: position + 1].astype(np.float64) for x in (p.k, p.v))
        out.append(oracle(p.q[row : row + 1].astype(np.float64), k, v, int(position), slopes)[0].reshape(-1))
    return np.array(out)


def common(p: Problem, wanted: list[int]) -> tuple[list[object], NDArray[np.float16]]:
    """The arguments that all attention kernels begin with, and the output they write: 64 halves a row are padding."""
    heads, kv_heads, head_dim = p.geometry
    q, positions, sequences = p.rows(wanted)
    out = np.full((len(wanted), heads * head_dim + 64), 7, np.float16)
    arguments = [
        q, q.shape[1], p.k_cache, p.v_cache, positions, sequences, p.page_tables, p.page_tables.shape[1], heads,
        kv_heads, LAYERS, LAYER, p.slopes, out, out.shape[1],
    ]  # fmt: skip
    return arguments, out


def finished(p: Problem, out: NDArray[np.float16]) -> NDArray[np.float16]:
    width = p.geometry[0] * p.geometry[2]
    assert (out[:, width:] == 7).all(), "the padding of the output was written"
    return out[:, :width].copy()


def decode(p: Problem, wanted: list[int] | None = None, splits: int = 1, order: str = "forward") -> NDArray[np.float16]:
    wanted = list(range(len(p.positions))) if wanted is None else wanted
    heads, kv_heads, head_dim = p.geometry
    arguments, out = common(p, wanted)
    tiles = -(-(heads // kv_heads) // 16)
    pieces = -(-p.page_tables.shape[1] * PAGE // PIECE)
    partials = np.full((len(wanted), heads, pieces, head_dim + 4), np.nan, np.float32) if splits > 1 else None
    counters = np.zeros((len(wanted), kv_heads * tiles), np.uint32) if splits > 1 else None
    kernel = f"crucible_attention_decode_{head_dim}"
    kernels("attention_decode.cu").launch(
        kernel, (len(wanted), kv_heads * tiles, splits), 256, 0, *arguments, partials, counters, pieces, order=order
    )
    if counters is not None:
        assert not counters.any(), "the counters are not ready for the next launch"
    return finished(p, out)


def prefill(p: Problem, wanted: list[int] | None = None, tile: int = 64, order: str = "forward") -> NDArray[np.float16]:
    """``wanted``: rows, successive within each sequence."""
    wanted = list(range(len(p.positions))) if wanted is None else wanted
    heads, _, head_dim = p.geometry
    arguments, out = common(p, wanted)
    sequences = p.row_sequence[wanted]
    firsts, counts = [], []
    for s in np.unique(sequences):
        rows = np.flatnonzero(sequences == s)
        for first in range(rows[0], rows[-1] + 1, tile):
            firsts.append(first)
            counts.append(min(tile, rows[-1] + 1 - first))
    kernels("attention_prefill.cu").launch(
        f"crucible_attention_prefill_{head_dim}", (len(firsts), heads), 128, 0, *arguments,
        np.array(firsts, np.int32), np.array(counts, np.int32), order=order,
    )  # fmt: skip
    return finished(p, out)


def reference(p: Problem) -> NDArray[np.float16]:
    arguments, out = common(p, list(range(len(p.positions))))
    heads, _, head_dim = p.geometry
    kernels("attention_reference.cu").launch(
        "crucible_attention_reference_f16_f16", (len(p.positions), heads), 128, 0, *arguments, head_dim
    )
    return finished(p, out)


# P and the output are rounded to halves: each weight by 2⁻¹¹ of itself, and the result by 2⁻¹¹.
TOLERANCE = 2 * 2.0**-11

GEOMETRIES = [(1, 1, 64), (2, 1, 64), (9, 3, 64), (4, 1, 64), (8, 1, 128), (3, 3, 128), (18, 1, 64)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("alibi", [False, True])
def test_decode_agrees_with_the_oracle(geometry: tuple[int, int, int], alibi: bool) -> None:
    p = problem([1] * 5, [0, 15, 16, 127, 128], *geometry, alibi=alibi)
    want = expected(p)
    assert np.abs(decode(p) - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("alibi", [False, True])
def test_prefill_agrees_with_the_oracle(geometry: tuple[int, int, int], alibi: bool) -> None:
    p = problem([1, 17, 3, 20], [0, 0, 126, 40], *geometry, alibi=alibi)
    want = expected(p)
    assert np.abs(prefill(p) - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("geometry", [(4, 2, 64), (3, 1, 128)], ids=str)
@pytest.mark.parametrize("alibi", [False, True])
def test_the_reference_kernel_agrees_with_the_oracle(geometry: tuple[int, int, int], alibi: bool) -> None:
    p = problem([1, 1, 2], [0, 131, 16], *geometry, alibi=alibi)
    want = expected(p)
    assert np.abs(reference(p) - want).max() <= 2.0**-11 * np.abs(want).max() + 1e-6


@pytest.mark.parametrize(("act", "kv"), [("f32", "f32"), ("f32", "f16"), ("f16", "f32")])
def test_the_reference_kernel_takes_float32(act: str, kv: str) -> None:
    types = {"f16": np.float16, "f32": np.float32}
    p = problem([1, 2], [130, 3], 4, 2, 40)
    want = expected(p)
    arguments, out = common(p, [0, 1, 2])
    out = out.astype(types[act])
    arguments[0], arguments[13] = p.rows([0, 1, 2])[0].astype(types[act]), out
    arguments[2], arguments[3] = p.k_cache.astype(types[kv]), p.v_cache.astype(types[kv])
    kernels("attention_reference.cu").launch(f"crucible_attention_reference_{act}_{kv}", (3, 4), 128, 0, *arguments, 40)
    bound = 2e-6 if act == "f32" else 2.0**-11
    assert np.abs(out[:, :160] - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize("geometry", [(9, 3, 64), (8, 1, 128), (17, 1, 64)], ids=str)
@pytest.mark.parametrize("position", [0, 1, 15, 16, 126, 127, 128, 129, 255, 256, 300])
def test_a_row_has_the_same_bits_in_decode_and_prefill(geometry: tuple[int, int, int], position: int) -> None:
    first = max(0, position - 20)
    p = problem([position - first + 1], [first], *geometry, alibi=position % 2 == 1)
    row = position - first
    whole = prefill(p)
    assert np.array_equal(whole[row], decode(p, [row])[0])
    assert np.array_equal(whole[row], decode(p, [row], splits=2)[0])
    assert np.array_equal(whole[row], decode(p, [row], splits=5)[0])
    assert np.array_equal(whole, prefill(p, tile=7))
    assert np.array_equal(whole[row], prefill(p, [row])[0])


def test_pieces_are_merged_in_one_order() -> None:
    """Another order changes the last bits of float32, which few of the rounded results show: 14,000 are compared."""
    p = problem([24], [620], 9, 3, 64)
    whole = prefill(p)
    assert np.array_equal(whole, decode(p))
    assert np.array_equal(whole, decode(p, splits=3))


def test_only_the_last_block_of_a_row_merges() -> None:
    p = problem([1], [200], 2, 1, 64)
    arguments, out = common(p, [0])
    partials, counters = np.zeros((1, 2, 2, 68), np.float32), np.full((1, 1), 5, np.uint32)
    kernels("attention_decode.cu").launch(
        "crucible_attention_decode_64", (1, 1, 2), 256, 0, *arguments, partials, counters, 2
    )
    assert counters[0, 0] == 7
    assert (out == 7).all()


def test_neighbours_do_not_change_a_row() -> None:
    p = problem([1] * 6, [200, 3, 0, 129, 270, 64], 6, 2, 64)
    together = decode(p, splits=3)
    for row in range(6):
        assert np.array_equal(together[row], decode(p, [row])[0])
    assert np.array_equal(together, prefill(p))


def test_later_chunks_do_not_change_earlier_rows() -> None:
    """A prompt at once, and in chunks when the positions behind the chunk are not in the cache yet."""
    p = problem([150], [0], 3, 1, 64)
    whole = prefill(p)
    behind = problem([150], [0], 3, 1, 64)
    for i in range(100, 150):
        page, slot = behind.page_tables[0, i // PAGE], i % PAGE
        behind.k_cache[page, LAYER].reshape(1, PAGE, 64)[:, slot] = np.nan
        behind.v_cache[page, LAYER].reshape(1, 64, PAGE)[:, :, slot] = np.nan
    assert np.array_equal(whole[90:100], prefill(behind, list(range(90, 100))))
    assert np.array_equal(whole[99], decode(behind, [99])[0])


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_the_order_of_threads_and_blocks_does_not_matter(order: str) -> None:
    p = problem([1, 1, 1], [300, 140, 17], 6, 2, 64)
    assert np.array_equal(decode(p, splits=3), decode(p, splits=3, order=order))
    q = problem([40], [100], 3, 1, 64)
    assert np.array_equal(prefill(q), prefill(q, order=order))


def test_large_scores_leave_only_the_maximum() -> None:
    """Scores of ±10⁴: what is far below the maximum weighs nothing, in whichever piece it lies."""
    p = problem([1], [299], 2, 1, 64, size=30.0)
    want = expected(p)
    assert np.abs(decode(p) - want).max() <= TOLERANCE * np.abs(want).max()
    assert np.array_equal(decode(p), prefill(p))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_query_stays_in_its_row(bad: float) -> None:
    """NaN must come out, so that the guard on the logits sees it, and must not reach other rows."""
    p = problem([20], [120], 2, 1, 64)
    good = prefill(p)
    p.q[7, 0, 3] = bad
    got = prefill(p)
    assert np.isnan(got[7, :64].astype(np.float32)).any()
    assert np.array_equal(np.delete(got, 7, 0), np.delete(good, 7, 0))
    assert np.array_equal(got[7, 64:], good[7, 64:])
    assert np.array_equal(decode(p, [7], splits=2)[0], got[7], equal_nan=True)
