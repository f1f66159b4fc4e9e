"""Argmax and top-k on the device against the host's selection on the same logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from crucible.native.sampling import candidates, draw, order_key, select
from tests.kernels.cuda.places import kernels, place

__all__ = ["place"]  # the fixture

INF, NAN = math.inf, math.nan
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def argmax(
    logits: Floats, token_count: int, blocks: int = 3, *, guard: int = 0, order: str = "forward"
) -> tuple[Ints, Ints]:
    rows, width = logits.shape
    partials, counters = np.zeros((rows, blocks), np.uint64), np.zeros(rows, np.uint32)
    tokens, flags = np.full(rows, -7, np.int32), np.full(rows, -7, np.int32)
    kernels("select.cu").launch(
        "crucible_argmax", (blocks, rows), 512, 0, logits, width, token_count, partials, counters, guard, tokens, flags,
        order=order,
    )  # fmt: skip
    assert not counters.any(), "the counters are not ready for the next launch"
    return tokens, flags


def top_k(
    logits: Floats, token_count: int, ks: list[int], blocks: int = 3, max_k: int | None = None, order: str = "forward"
) -> tuple[Ints, Floats, Ints]:
    rows, width = logits.shape
    wide = max_k or max(ks)
    partials, counters = np.zeros((rows, blocks, wide), np.uint64), np.zeros(rows, np.uint32)
    ids, values = np.full((rows, wide), -7, np.int32), np.full((rows, wide), 77, np.float32)
    flags = np.full(rows, -7, np.int32)
    kernels("select.cu").launch(
        "crucible_top_k", (blocks, rows), 512, 0, logits, width, token_count, np.array(ks, np.int32), wide, partials,
        counters, ids, values, flags, order=order,
    )  # fmt: skip
    assert not counters.any(), "the counters are not ready for the next launch"
    return ids, values, flags


def in_order(row: Floats, token_count: int) -> list[int]:
    return sorted(range(token_count), key=lambda i: -order_key(float(row[i]), i))


def check_row(row: Floats, token_count: int, k: int, ids: Ints, values: Floats) -> None:
    """All of what the device chose, and that the host would have drawn from it what it draws from the row."""
    count = min(k, token_count)
    want = in_order(row, token_count)[:count]
    assert ids[:count].tolist() == want
    assert (ids[count:] == -7).all()
    expected = row[want] + np.float32(0.0)  # −0 as +0
    assert np.array_equal(values[:count], expected, equal_nan=True)
    assert not np.signbit(values[:count][values[:count] == 0]).any()
    host, _ = candidates(row, 1.0, k, token_count)
    assert host.tolist() == ids[: len(host)].tolist()
    for seed in range(3):
        arguments = (0.7, seed, 0, 11)
        chosen = draw(ids[:count].copy(), values[:count].copy(), *arguments)
        assert chosen == select(row, 0.7, k, seed, 0, 11, token_count)


def tie_rows(width: int = 40) -> list[Floats]:
    """The first at 0, in the middle, last; ties; NaN first, in the middle, everywhere; both zeros; nothing but -inf."""
    base = np.linspace(-3, -1, width).astype(np.float32)

    def with_values(values: dict[int, float]) -> Floats:
        row = base.copy()
        for token, value in values.items():
            row[token] = value
        return row

    return [
        with_values({0: 5}),
        with_values({17: 5}),
        with_values({width - 1: 5}),
        with_values({3: 5, 20: 5, 39: 5}),
        with_values({0: NAN, 9: 5}),
        with_values({21: NAN, 20: 5, 22: 5}),
        np.full(width, NAN, np.float32),
        with_values({5: 0.0, 4: -0.0}),
        with_values({4: 0.0, 5: -0.0}),
        np.full(width, -INF, np.float32),
        with_values({0: NAN, **dict.fromkeys(range(1, width), -INF)}),
        with_values({8: INF, 7: 3e38}),
        np.full(width, 1.5, np.float32),
        with_values({1: 1e-45, 2: 0.0, 3: -1e-45}),
    ]


@pytest.mark.parametrize("blocks", [1, 3, 7])
@pytest.mark.parametrize("guard", [0, 1])
def test_argmax_of_ties_and_nan(blocks: int, guard: int) -> None:
    logits = np.array(tie_rows())
    tokens, flags = argmax(logits, 40, blocks, guard=guard)
    for row, token, flag in zip(logits, tokens, flags, strict=True):
        bad = bool((np.isnan(row) | (row == INF)).any())
        assert flag == bad
        assert token == (-1 if guard and bad else select(row, 0.0, 1, 0, 0, 0, 40))


def test_padding_never_wins_and_is_no_fault() -> None:
    logits = np.array([[1, 2, 0, 9, NAN, INF]], np.float32)
    tokens, flags = argmax(logits, 3)
    assert (tokens.tolist(), flags.tolist()) == ([1], [0])
    ids, _, flags = top_k(logits, 3, [5])
    assert ids[0].tolist() == [1, 0, 2, -7, -7]
    assert flags.tolist() == [0]


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
@pytest.mark.parametrize("blocks", [1, 4, 9])
def test_argmax_of_long_rows(blocks: int, order: str) -> None:
    rng = np.random.default_rng(blocks)
    logits = np.round(rng.standard_normal((3, 5003)) * 4).astype(np.float32)  # ties
    tokens, flags = argmax(logits, 4999, blocks, order=order)
    assert tokens.tolist() == [select(row, 0.0, 1, 0, 0, 0, 4999) for row in logits]
    assert not flags.any()


@pytest.mark.parametrize("blocks", [1, 3, 50])
@pytest.mark.parametrize("k", [1, 2, 7, 39, 40, 41])
def test_top_k_of_ties_and_nan(blocks: int, k: int) -> None:
    logits = np.array(tie_rows())
    ids, values, flags = top_k(logits, 40, [k] * len(logits), blocks)
    for i, row in enumerate(logits):
        check_row(row, 40, k, ids[i], values[i])
        assert flags[i] == bool((np.isnan(row) | (row == INF)).any())


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("kind", ["normal", "rounded", "equal", "exponents"])
def test_top_k_of_long_rows(kind: str, blocks: int, order: str) -> None:
    """A row of each width of top_k: greedy, small, wide, all that fits; distinct logits and many ties."""
    rng = np.random.default_rng(3)
    ks, width, count = [1, 50, 500, 1024], 6100, 6007
    logits = {
        "normal": rng.standard_normal((4, width)) * 3,
        "rounded": np.round(rng.standard_normal((4, width)) * 2),
        "equal": np.full((4, width), -2.5),
        "exponents": np.exp(rng.uniform(-80, 80, (4, width))) * rng.choice([-1, 1], (4, width)),
    }[kind].astype(np.float32)
    ids, values, flags = top_k(logits, count, ks, blocks, order=order)
    for i, k in enumerate(ks):
        check_row(logits[i], count, k, ids[i], values[i])
    assert not flags.any()


def test_keys_that_differ_in_their_last_bits_only() -> None:
    """Successive floats, in falling and rising order of ids: every digit of the logit decides somewhere."""
    start = np.float32(1.0).view(np.int32)
    rising = (start + np.arange(3000, dtype=np.int32)).view(np.float32)
    logits = np.array([rising, rising[::-1], np.repeat(rising[:30], 100)])
    ids, values, _ = top_k(logits, 3000, [777, 777, 777], 4)
    for i in range(3):
        check_row(logits[i], 3000, 777, ids[i], values[i])


def test_ids_up_to_the_limit_decide_ties() -> None:
    logits = np.zeros((1, 1 << 18), np.float32)
    logits[0, ::2] = -1
    ids, values, _ = top_k(logits, 1 << 18, [20], 8)
    check_row(logits[0], 1 << 18, 20, ids[0], values[0])


def test_rows_without_a_selection_are_left_alone() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 100)).astype(np.float32)
    ids, values, flags = top_k(logits, 100, [0, 5, 17], 2, max_k=16)
    assert (ids[[0, 2]] == -7).all()
    assert (values[[0, 2]] == 77).all()
    assert flags.tolist() == [-7, 0, -7]
    assert ids[1, :5].tolist() == in_order(logits[1], 100)[:5]
