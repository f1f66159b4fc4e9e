from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis.extra.numpy import arrays

from crucible.config import SamplingParams
from crucible.engine.sampler import Sampled, sample_once
from crucible.errors import RequestError
from crucible.native import sampling

INF, NAN = math.inf, math.nan
Logits = Any

floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
coarse = st.sampled_from([-INF, -1.0, -0.0, 0.0, 0.5, 0.5, 2.0, INF, NAN])


def row(values: Logits) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.asarray(values, np.float32)


def place(logit: float, token: int) -> tuple[bool, float, int]:
    return math.isnan(logit), 0 if math.isnan(logit) else -logit, token


def expected_order(logits: Logits) -> list[int]:
    """All ids in canonical order, by Python's sort."""
    return sorted(range(len(logits)), key=lambda i: place(logits[i], i))


def expected_candidates(logits: Logits, k: int) -> list[int]:
    return [i for i in expected_order(logits) if logits[i] > -INF][:k]


# -- the key


@given(st.lists(st.tuples(floats, st.integers(0, 2**31 - 1)), min_size=2, max_size=20, unique_by=lambda pair: pair[1]))
@example([(-0.0, 3), (0.0, 4)])
@example([(NAN, 0), (-INF, 9)])
def test_keys_sort_as_the_order_says(pairs: list[tuple[float, int]]) -> None:
    by_key = sorted(pairs, key=lambda pair: sampling.order_key(*pair), reverse=True)
    wanted = sorted(pairs, key=lambda pair: place(*pair))
    assert [i for _, i in by_key] == [i for _, i in wanted]


@given(floats, st.integers(0, 2**32 - 1))
def test_a_key_gives_back_its_parts(logit: float, token: int) -> None:
    value, back = sampling.key_parts(sampling.order_key(logit, token))
    assert back == token
    assert value == logit or (math.isnan(value) and math.isnan(logit))


# -- randomness


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known answers published with Random123 (kat_vectors, philox4x32 10)
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: int, words: Any) -> None:
    assert sampling.philox4x32(counter, key) == words


def test_uniform_depends_on_each_part_of_its_key_and_on_nothing_else() -> None:
    base = sampling.uniform(7, 0, 100)
    assert base == sampling.uniform(7, 0, 100)
    others = ((8, 0, 100), (7, 1, 100), (7, 0, 101), (7 + 2**32, 0, 100), (7, 0, 100 + 2**32))
    assert len({base, *(sampling.uniform(*key) for key in others)}) == 6


def test_uniform_stays_below_one() -> None:
    values = np.array([sampling.uniform(1, 0, i) for i in range(20000)])
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01


# -- greedy


@given(arrays(np.float32, st.integers(1, 200), elements=floats))
@example(row([NAN, -INF, -INF]))
@example(row([NAN] * 40))
@example(row([0.0, -0.0, 0.0]))
@settings(max_examples=300)
def test_greedy_takes_the_first_in_canonical_order(logits: Logits) -> None:
    assert sampling.select(logits, 0.0, 1, 0, 0, 0, len(logits)) == expected_order(logits)[0]


@pytest.mark.parametrize("place", [0, 31, 32, 63, 64, 99])
def test_greedy_finds_the_maximum_everywhere(place: int) -> None:
    logits = np.full(100, -3, np.float32)
    logits[place] = -2
    assert sampling.select(logits, 0.0, 1, 0, 0, 0, 100) == place


def test_padding_is_never_chosen() -> None:
    logits = row([1, 2, 0, 9, 9])
    for temperature in (0.0, 1.0, 1e9):
        picks = {sampling.select(logits, temperature, 5, 0, 0, i, 3) for i in range(200)}
        assert picks <= {0, 1, 2}
    ids, _ = sampling.candidates(logits, 1.0, 5, 3)
    assert ids.tolist() == [1, 0, 2]


# -- candidates


@given(arrays(np.float32, st.integers(1, 400), elements=st.one_of(coarse, floats)), st.integers(1, 420))
@settings(max_examples=300)
def test_candidates_are_the_first_k(logits: Logits, k: int) -> None:
    ids, probabilities = sampling.candidates(logits, 1.0, k, len(logits))
    wanted = expected_candidates(logits, k) or [expected_order(logits)[0]]
    assert ids.tolist() == wanted
    assert probabilities.sum() == pytest.approx(1)


@pytest.mark.parametrize("kind", ["normal", "equal", "ascending", "descending", "few values"])
def test_heap_and_radix_agree_over_a_real_vocabulary(kind: str) -> None:
    random = np.random.default_rng(3)
    logits = {
        "normal": random.normal(0, 4, 50304),
        "equal": np.full(50304, 1.5),
        "ascending": np.linspace(-9, 9, 50304),
        "descending": np.linspace(9, -9, 50304),
        "few values": random.integers(-3, 3, 50304),
    }[kind].astype(np.float32)
    wanted = np.lexsort((np.arange(50304), -logits))
    for k in (1, 40, 128, 129, 1000, 50304):
        ids, _ = sampling.candidates(logits, 0.8, k, 50304)
        assert np.array_equal(ids, wanted[:k]), k


@pytest.mark.parametrize(
    ("logits", "chosen", "ids", "probabilities"),
    [
        ([2.875, 2.9551, 11.0625, -2.4473], {"temperature": 1e-5}, [2, 1, 0, 3], [1, 0, 0, 0]),
        ([2.875, 2.9551, 11.0625, -2.4473], {"temperature": 1e-30}, [2, 1, 0, 3], [1, 0, 0, 0]),
        ([3e38, -3e38], {"temperature": 5e-324}, [0, 1], [1, 0]),
        ([-INF, 1.0, -INF, 0.5], {"temperature": 0.7}, [1, 3], [0.671347453, 0.328652547]),
        ([1.0, 2.0, 2.0, 2.0, 3.0], {"temperature": 1.0, "top_k": 3}, [4, 1, 2], [0.5761169, 0.2119416, 0.2119416]),
        ([0.1, 0.3, 0.2], {"temperature": 1.0, "top_k": 100000}, [1, 2, 0], [0.367165401, 0.332224994, 0.300609605]),
        ([0.5, -0.5], {"temperature": 1.0, "top_k": 2**31}, [0, 1], [0.731058579, 0.268941421]),
        ([0.5, -0.5], {"temperature": 1.0, "top_k": 2**70}, [0, 1], [0.731058579, 0.268941421]),
        ([0.0, 5.0, 5.0, NAN], {"temperature": 0.0}, [1], [1]),
        ([0.0, INF, 7.0, INF, NAN], {"temperature": 0.5}, [1, 3, 2, 0], [0.5, 0.5, 0, 0]),
        ([-INF, -INF], {"temperature": 0.5}, [0], [1]),
        ([NAN, -INF], {"temperature": 0.5}, [1], [1]),
        ([NAN, NAN], {"temperature": 0.5}, [0], [1]),
    ],
)
def test_probabilities(logits: Logits, chosen: dict[str, Any], ids: list[int], probabilities: list[float]) -> None:
    sampled = sample_once(logits, SamplingParams(**chosen), count=3)
    assert [token for token, _ in sampled.candidates] == ids
    assert [p for _, p in sampled.candidates] == pytest.approx(probabilities, abs=1e-6)
    assert all(dict(zip(ids, probabilities, strict=True))[token] > 0 for token in sampled.tokens)


def test_greedy_and_top_1_skip_nan_in_a_long_row() -> None:
    logits = row([(i * 7919) % 1000 / 1000 for i in range(50304)])
    logits[123] = 9
    logits[[0, 7, 50303]] = NAN
    for params in (SamplingParams(), SamplingParams(temperature=0.01, top_k=1)):
        assert sample_once(logits, params) == Sampled([(123, 1.0)], [123])


# -- draws


def test_drawn_frequencies_follow_the_probabilities() -> None:
    """A chi-square test at 99.9 % with 7 degrees of freedom, on fixed seeds."""
    logits = row([0.3, -1.0, 2.0, 0.0, 1.1, -0.4, 0.9, 1.7])
    draws = 40000
    for temperature, seed in ((1.0, 7), (0.6, 2**63 + 5), (3.0, 0)):
        ids, probabilities = sampling.candidates(logits, temperature, 8, 8)
        tokens = sample_once(logits, SamplingParams(temperature=temperature, seed=seed), count=draws).tokens
        counts = np.bincount(tokens, minlength=8)[ids]
        chi_square = ((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum()
        assert chi_square < 24.32


def test_a_draw_repeats_and_differs_by_seed_choice_and_position() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(seed: int = 1, choice: int = 0, first: int = 0) -> list[int]:
        return [sampling.select(logits, 1.0, 1000, seed, choice, first + i, 1000) for i in range(20)]

    assert draw() == draw()
    assert draw(first=5)[:15] == draw()[5:]
    assert len({tuple(draw()), tuple(draw(seed=2)), tuple(draw(choice=1))}) == 3


@pytest.mark.parametrize("k", [1, 5, 40, 128, 129, 300])
def test_a_device_that_chose_the_candidates_draws_the_same(k: int) -> None:
    logits = np.random.default_rng(k).normal(0, 2, 300).astype(np.float32)
    logits[::7] = -INF
    ids = np.array(expected_order(logits)[:k], np.int32)
    for position in range(100):
        wanted = sampling.select(logits, 0.9, k, 11, 2, position, 300)
        assert sampling.draw(ids, logits[ids], 0.9, 11, 2, position) == wanted


def test_rows_are_chosen_as_if_alone() -> None:
    random = np.random.default_rng(5)
    logits = random.normal(0, 3, (6, 200)).astype(np.float32)
    temperatures = np.array([0, 0.5, 1, 0, 2, 1e-30])
    top_ks = np.array([0, 1, 40, 40, 200, 150])
    seeds = np.array([0, 1, 2**64 - 1, 3, 4, 5], np.uint64)
    choices, positions = np.arange(6, dtype=np.int32), np.arange(10, 16, dtype=np.int32)
    out = np.full(6, -1, np.int32)
    sampling.select_rows(logits, temperatures, top_ks, seeds, choices, positions, 180, out)
    alone = [
        sampling.select(logits[i], temperatures[i], int(top_ks[i]), int(seeds[i]), i, 10 + i, 180) for i in range(6)
    ]
    assert out.tolist() == alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("place", [0, 31, 32, 63, 178, 179])
def test_a_row_that_holds_a_fault_has_no_token(place: int, temperature: float) -> None:
    """Its neighbours do, padding may hold anything, and -inf is no fault."""
    logits = np.random.default_rng(5).normal(0, 3, (5, 200)).astype(np.float32)
    logits[1, place], logits[3, place], logits[4, :] = NAN, INF, -INF
    logits[:, 180:] = NAN
    zeros, out = np.zeros(5, np.int32), np.zeros(5, np.int32)
    top_ks = np.full(5, 40)
    sampling.select_rows(logits, np.full(5, temperature), top_ks, np.zeros(5, np.uint64), zeros, zeros, 180, out)
    alone = [sampling.select(row, temperature, 40, 0, 0, 0, 180) for row in logits]
    assert out.tolist() == [alone[0], -1, alone[2], -1, 0]


def test_bad_arguments_are_refused() -> None:
    logits = np.zeros(4, np.float32)
    for temperature in (-1.0, NAN, INF):
        with pytest.raises(ValueError, match="temperature"):
            sampling.select(logits, temperature, 1, 0, 0, 0, 4)
    for token_count in (0, 5):
        with pytest.raises(ValueError, match="token_count"):
            sampling.select(logits, 0.0, 1, 0, 0, 0, token_count)
    with pytest.raises(ValueError, match="top_k"):
        sampling.select(logits, 1.0, 0, 0, 0, 0, 4)
    with pytest.raises(ValueError, match="as many"):
        sampling.draw(np.zeros(2, np.int32), logits, 1.0, 0, 0, 0)
    for bad in ([], [[1.0]], ["x"], None):
        with pytest.raises(RequestError, match="logits"):
            sample_once(bad, SamplingParams())  # type: ignore[arg-type]
