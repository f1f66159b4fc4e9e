"""Baselines that a trained model has to beat: unigram entropy, interpolated bigram, modified Kneser-Ney.

Every figure is in nats a token, over a row of ids in which the separators are tokens like all others and contexts
reach across them, as they do for the model. An n-gram is known by a number: level by level, the number of its first
n − 1 tokens (below the number of tokens) times the vocabulary plus its last token is one int64, and the sorted array
of those is the level's table. So no level needs more than a few words for each n-gram that was seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible_train.errors import TrainingError

Ids = NDArray[np.integer[Any]]
UNSEEN = -1
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
"""Where a level has too few n-grams to estimate them (the values of kenlm's --discount_fallback)."""
EM_ROUNDS = 50


def unigram_entropy(tokens: Ids) -> float:
    """The entropy of the distribution of ``tokens``: the least that any model without context can reach on them."""
    _require(tokens)
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


def bigram_cross_entropy(train: Ids, heldout: Ids, id_count: int) -> float:
    """Held-out nats a token of λ·bigram + (1 − λ)·unigram, relative frequencies of ``train``.

    The unigram counts have one added to each (so nothing is impossible) and λ is fitted on ``heldout`` itself, by
    expectation maximisation: the bigram gets the best weight it can have. The first held-out token has no context and
    is left out.
    """
    _require(train, heldout)
    counts = np.bincount(train, minlength=id_count).astype(np.float64)
    unigram = ((counts + 1) / (len(train) + id_count))[heldout[1:]]
    pairs = _keys(train[:-1].astype(np.int64), train[1:], id_count)
    seen, times = np.unique(pairs, return_counts=True)
    found = _find(seen, _keys(heldout[:-1].astype(np.int64), heldout[1:], id_count))
    contexts = np.bincount(train[:-1], minlength=id_count)[heldout[:-1]]
    bigram = np.where(found == UNSEEN, 0, times[found]) / np.maximum(contexts, 1)
    weight = 0.5
    for _ in range(EM_ROUNDS):
        weight = float((weight * bigram / (weight * bigram + (1 - weight) * unigram)).mean())
    return float(-np.log(weight * bigram + (1 - weight) * unigram).mean())


@dataclass(frozen=True)
class _Level:
    """All n-grams of one order ≥ 2, numbered in the order of their keys.

    ``keys``: int64 [n]; ``discounted``: float32 [n], (count − discount) / total of the context; ``backoff``: float32
    [number of (n − 1)-grams], the weight of the next lower order after each context (1 where nothing followed).
    """

    keys: NDArray[np.int64]
    discounted: NDArray[np.float32]
    backoff: NDArray[np.float32]


class KneserNey:
    """Interpolated modified Kneser-Ney (Chen and Goodman, Harvard TR-10-98, section 4.3) of order ``order``.

    The highest order counts occurrences; each lower one how many different tokens were seen before the n-gram. Each
    level has the discounts D1, D2 and D3+ of its own counts; the unigrams are interpolated with the uniform
    distribution over ``id_count`` ids, so probabilities sum to one and none is zero. Order 5 takes some 120
    bytes a training token while it is made.
    """

    def __init__(self, tokens: Ids, id_count: int, order: int = 5) -> None:
        _require(tokens)
        if order < 1:
            raise TrainingError(f"order {order}: an n-gram model has an order of at least 1")
        if int(tokens.max()) >= id_count:
            raise TrainingError(f"id {tokens.max()} in the tokens, but the vocabulary has {id_count} ids")
        self.order = order
        self.id_count = id_count
        self._levels: list[_Level] = []
        numbers = tokens.astype(np.int64)  # of the n-gram that ends at each position, from the first whole one on
        known = id_count
        # n-grams of the level below: their keys and how often they occur. One id is one unigram, seen or not.
        keys, counts = np.arange(id_count), np.bincount(tokens, minlength=id_count)
        for size in range(2, order + 1):
            if len(numbers) < 2:
                break
            above, inverse, occurrences = np.unique(
                _keys(numbers[:-1], tokens[size - 1 :], id_count), return_inverse=True, return_counts=True
            )
            # Every n-gram of this size once: which (n - 1)-gram it ends with.
            suffixes = np.empty(len(above), np.int64)
            suffixes[inverse] = numbers[1:]
            counts = np.bincount(suffixes, minlength=known)
            del suffixes
            self._add(keys, counts, size - 1)
            keys, counts, numbers, known = above, occurrences, inverse.astype(np.int64, copy=False), len(above)
        self._add(keys, counts, len(self._levels) + 1)

    def _add(self, keys: NDArray[np.int64], counts: NDArray[np.int64], size: int) -> None:
        discounts = np.array([0.0, *_discounts(counts)])
        taken = discounts[np.minimum(counts, 3)]
        if size == 1:
            total = float(counts.sum())
            uniform = float(taken.sum()) / total / self.id_count
            self._unigram = (counts - taken) / total + uniform
            self._levels.append(_Level(keys, np.empty(0, np.float32), np.empty(0, np.float32)))
            return
        contexts = keys // self.id_count
        below = len(self._levels[-1].keys)
        totals = np.bincount(contexts, counts, minlength=below)
        freed = np.bincount(contexts, taken, minlength=below)
        backoff = np.divide(freed, totals, out=np.ones(below), where=totals > 0)
        safe = np.where(totals > 0, totals, 1)[contexts]
        self._levels.append(_Level(keys, ((counts - taken) / safe).astype(np.float32), backoff.astype(np.float32)))

    def probabilities(self, tokens: Ids) -> NDArray[np.float64]:
        """The probability of each token after those before it: float64 [n]."""
        tokens = np.asarray(tokens, np.int64)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.id_count:
            raise TrainingError(f"an id outside 0 to {self.id_count - 1} in the tokens")
        result: NDArray[np.float64] = self._unigram[tokens]
        numbers = tokens
        for level in self._levels[1:]:
            contexts = np.full(len(tokens), UNSEEN, np.int64)  # the number of the (n - 1)-gram before each token
            contexts[1:] = numbers[:-1]
            seen = contexts != UNSEEN
            numbers = np.full(len(tokens), UNSEEN, np.int64)
            numbers[seen] = _find(level.keys, _keys(contexts[seen], tokens[seen], self.id_count))
            result[seen] *= level.backoff[contexts[seen]]
            found = numbers != UNSEEN
            result[found] += level.discounted[numbers[found]]
        return result

    def cross_entropy(self, tokens: Ids) -> float:
        """Nats a token of a held-out row; its first tokens have shorter contexts."""
        _require(tokens)
        return float(-np.log(self.probabilities(tokens)).mean())


def _discounts(counts: NDArray[np.int64]) -> tuple[float, float, float]:
    """D1, D2 and D3+ (Chen and Goodman, equation 26) from how many n-grams have the counts 1 to 4."""
    one, two, three, four = (int(number) for number in np.bincount(np.minimum(counts, 5), minlength=6)[1:5])
    if not (one and two and three and four):
        return FALLBACK_DISCOUNTS
    share = one / (one + 2 * two)
    found = (1 - 2 * share * two / one, 2 - 3 * share * three / two, 3 - 4 * share * four / three)
    usable = all(0 <= discount <= count for count, discount in enumerate(found, start=1))
    return found if usable else FALLBACK_DISCOUNTS


def _keys(contexts: NDArray[np.int64], tokens: Ids, id_count: int) -> NDArray[np.int64]:
    return contexts * np.int64(id_count) + tokens


def _find(keys: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The index of each wanted key in the sorted ``keys``, UNSEEN where it is not there."""
    where = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[where] == wanted, where, UNSEEN)


def _require(*rows: Ids) -> None:
    for row in rows:
        if row.ndim != 1 or len(row) < 2:
            raise TrainingError(f"a row of at least 2 ids is needed, not one of shape {list(row.shape)}")
