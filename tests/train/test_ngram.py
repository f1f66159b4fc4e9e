"""The n-gram baselines, against values worked out by hand and against a plain dictionary version."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from crucible_train.errors import TrainingError
from crucible_train.ngram import FALLBACK_DISCOUNTS, KneserNey, _discounts, bigram_cross_entropy, unigram_entropy


def array(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.uint16)


def zipf(count: int, ids: int, seed: int) -> np.ndarray:
    """Ids with a long tail, each depending on the one before."""
    source = np.random.default_rng(seed)
    drawn = np.minimum(source.zipf(1.4, count) - 1, ids - 1)
    drawn[1:] = np.where(source.random(count - 1) < 0.5, (drawn[:-1] * 7 + 3) % ids, drawn[1:])
    return drawn.astype(np.uint16)


def test_unigram_entropy() -> None:
    assert unigram_entropy(array([0, 1, 2, 3])) == pytest.approx(math.log(4))
    assert unigram_entropy(array([5, 5, 5])) == 0
    assert unigram_entropy(array([0, 0, 0, 9])) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_bigram_by_hand() -> None:
    # train 0 1 0 1 0 2, four ids: p(1|0) = 2/3, p(0|1) = 1; unigrams (3+1, 2+1, 1+1, 0+1) / 10
    train, heldout = array([0, 1, 0, 1, 0, 2]), array([0, 1, 0])
    best = min(
        -(math.log(w * 2 / 3 + (1 - w) * 0.3) + math.log(w * 1 + (1 - w) * 0.4)) / 2 for w in np.linspace(0, 1, 10001)
    )
    assert bigram_cross_entropy(train, heldout, 4) == pytest.approx(best, abs=1e-6)
    # where no pair was seen, only the unigrams are left
    assert bigram_cross_entropy(train, array([3, 3, 3]), 4) == pytest.approx(-math.log(0.1), abs=1e-6)


def test_discounts_by_hand() -> None:
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4, 7])
    share = 8 / (8 + 2 * 4)
    assert _discounts(counts) == pytest.approx((1 - 2 * share * 4 / 8, 2 - 3 * share * 2 / 4, 3 - 4 * share * 1 / 2))
    assert _discounts(np.array([1, 1, 2])) == FALLBACK_DISCOUNTS


def test_kneser_ney_bigram_by_hand() -> None:
    """Row 0 1 0 1 0 2 over 4 ids: too little for estimated discounts, so 0.5, 1 and 1.5."""
    model = KneserNey(array([0, 1, 0, 1, 0, 2]), 4, order=2)
    # Different tokens seen before: 0 after {1}, 1 after {0}, 2 after {0}; three in all, each discounted by 0.5.
    uniform = 3 * 0.5 / 3 / 4
    unigram = [0.5 / 3 + uniform] * 3 + [uniform]
    # After 0: 1 twice (discount 1), 2 once (0.5) of three; what is freed, 1.5 / 3, goes to the unigrams.
    after_zero = [0.5 * unigram[0], 1 / 3 + 0.5 * unigram[1], 0.5 / 3 + 0.5 * unigram[2], 0.5 * unigram[3]]
    for token in range(4):
        assert model.probabilities(array([0, token]))[1] == pytest.approx(after_zero[token], rel=1e-6)
        assert model.probabilities(array([token]))[0] == pytest.approx(unigram[token])
        assert model.probabilities(array([3, token]))[1] == pytest.approx(unigram[token])


class Plain:
    """Modified Kneser-Ney with dictionaries, straight from the formulas."""

    def __init__(self, tokens: list[int], ids: int, order: int) -> None:
        self.ids = ids
        self.order = order
        self.counts: list[Counter[tuple[int, ...]]] = []
        for size in range(1, order + 1):
            grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
            if size == order:
                self.counts.append(Counter(grams))
            else:
                longer = {tuple(tokens[i : i + size + 1]) for i in range(len(tokens) - size)}
                self.counts.append(Counter(gram[1:] for gram in longer))
        self.discounts = [(0.0, *_discounts(np.array([*counts.values(), 0]))) for counts in self.counts]
        self.following: list[dict[tuple[int, ...], list[int]]] = []
        for counts in self.counts:
            following: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for gram, count in counts.items():
                following[gram[:-1]].append(count)
            self.following.append(following)

    def probability(self, context: tuple[int, ...], token: int) -> float:
        size = len(context) + 1
        lower = self.probability(context[1:], token) if context else 1 / self.ids
        counts = self.following[size - 1].get(context)
        if not counts:
            return lower
        discount = self.discounts[size - 1]
        total, count = sum(counts), self.counts[size - 1][(*context, token)]
        freed = sum(discount[min(count, 3)] for count in counts)
        return (count - discount[min(count, 3)]) / total + freed / total * lower


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_kneser_ney_equals_the_plain_version(order: int) -> None:
    train, heldout = zipf(3000, 40, seed=1), zipf(300, 40, seed=2)
    plain = Plain(train.tolist(), 40, order)
    row = heldout.tolist()
    expected = [plain.probability(tuple(row[max(0, i - order + 1) : i]), row[i]) for i in range(len(row))]
    assert KneserNey(train, 40, order).probabilities(heldout) == pytest.approx(expected, rel=1e-5)


def test_probabilities_sum_to_one() -> None:
    model = KneserNey(zipf(5000, 50, seed=3), 64)
    contexts = [*zipf(40, 50, seed=4).reshape(10, 4).tolist(), [63, 63, 63, 63], [0, 63, 1, 2]]
    for context in contexts:
        for length in range(5):
            rows = [[*context[4 - length :], token] for token in range(64)]
            last = [model.probabilities(array(row))[-1] for row in rows]
            assert sum(last) == pytest.approx(1, abs=1e-5)
            assert min(last) > 0


def test_a_longer_context_tells_more() -> None:
    train, heldout = zipf(60000, 60, seed=5), zipf(5000, 60, seed=6)
    entropies = [KneserNey(train, 60, order).cross_entropy(heldout) for order in (1, 2)]
    assert unigram_entropy(heldout) <= entropies[0] < unigram_entropy(heldout) + 0.05
    assert entropies[1] < entropies[0] - 0.3
    assert bigram_cross_entropy(train, heldout, 60) == pytest.approx(entropies[1], abs=0.1)


def test_text_seen_before_is_nearly_certain() -> None:
    row = np.random.default_rng(0).integers(0, 1000, 4000).astype(np.uint16)
    model = KneserNey(row, 1000)
    assert model.cross_entropy(row) < 1.5
    assert model.cross_entropy(row[::-1]) > 5


def test_rows_shorter_than_the_order_work() -> None:
    model = KneserNey(array([1, 2, 1]), 4, order=5)
    assert model.probabilities(array([1, 2, 1, 3])).min() > 0
    assert sum(model.probabilities(array([1, 2, token]))[2] for token in range(4)) == pytest.approx(1, abs=1e-6)


def test_bad_rows_are_refused() -> None:
    good = array([1, 2, 3])
    for bad in (array([]), array([1])):
        for call in (
            lambda bad=bad: unigram_entropy(bad),
            lambda bad=bad: bigram_cross_entropy(bad, good, 4),
            lambda bad=bad: bigram_cross_entropy(good, bad, 4),
            lambda bad=bad: KneserNey(bad, 4),
            lambda bad=bad: KneserNey(good, 4).cross_entropy(bad),
        ):
            with pytest.raises(TrainingError, match="at least 2 ids"):
                call()
    with pytest.raises(TrainingError, match="id 3 in the tokens, but the vocabulary has 3 ids"):
        KneserNey(good, 3)
    with pytest.raises(TrainingError, match="outside 0 to 3"):
        KneserNey(good, 4).probabilities(array([4]))
    with pytest.raises(TrainingError, match="order 0"):
        KneserNey(good, 4, order=0)
