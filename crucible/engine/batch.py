"""Batch: the metadata of one forward pass over ragged sequences, in preallocated arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from crucible.engine.request import Request
from crucible.native.batch import BatchFiller

IntArray = NDArray[np.int32]


def zeros(count: int) -> IntArray:
    return np.zeros(count, np.int32)


class Batch:
    """Rows of one or several sequences: a decode is one row, a prompt chunk several. Always ragged, never padded.

    After ``fill`` the attributes are views of the buffers, valid until the next ``fill``; int32 unless noted:

    token_ids, positions [rows]; row_sequence [rows]: index of the row's sequence in this batch;
    sequence_starts [sequences + 1]: row offsets; context_lengths [sequences]: tokens visible to the sequence's last
    row, its position + 1; page_tables [sequences, max_pages]: page of each 16 positions, 0 past the used ones and
    never read there; logit_rows [n]: rows whose logits are wanted, in request order.
    For the sampler, all [n] and in the order of logit_rows: temperatures float64 (0 is greedy), top_ks int64, seeds
    uint64, choices, draw_positions (the position of the token to be chosen).

    The KV of a row goes to page_tables[sequence, position // 16], slot position % 16, before attention reads it.
    """

    memory: IntArray
    places: dict[str, int]
    spare: IntArray
    token_ids: IntArray
    positions: IntArray
    row_sequence: IntArray
    sequence_starts: IntArray
    context_lengths: IntArray
    page_tables: IntArray
    logit_rows: IntArray
    choices: IntArray
    draw_positions: IntArray
    temperatures: NDArray[np.float64]
    top_ks: NDArray[np.int64]
    seeds: NDArray[np.uint64]

    def __init__(
        self,
        max_rows: int,
        max_sequences: int,
        max_pages: int,
        *,
        spare: int = 0,
        allocate: Callable[[int], IntArray] = zeros,
    ) -> None:
        """Room for ``max_rows`` rows of ``max_sequences`` requests with ``max_pages`` pages each.

        The int32 arrays lie in one piece of ``memory`` that ``allocate`` makes, so that one copy takes them all to a
        device: ``places`` says where each begins. ``spare`` elements, called so, are the caller's; page tables come
        last.
        """
        self.max_rows, self.max_sequences, self.max_pages = max_rows, max_sequences, max_pages
        sizes = {
            "token_ids": max_rows,
            "positions": max_rows,
            "row_sequence": max_rows,
            "sequence_starts": max_sequences + 1,
            "context_lengths": max_sequences,
            "logit_rows": max_sequences,
            "choices": max_sequences,
            "draw_positions": max_sequences,
            "spare": spare,
            "page_tables": max_sequences * max_pages,
        }
        offsets = [0, *accumulate(sizes.values())]
        self.places = dict(zip(sizes, offsets, strict=False))
        self.memory = allocate(offsets[-1])
        held = {name: self.memory[at : at + sizes[name]] for name, at in self.places.items()}
        self.spare = held["spare"]
        self._token_ids, self._positions = held["token_ids"], held["positions"]
        self._row_sequence, self._sequence_starts = held["row_sequence"], held["sequence_starts"]
        self._context_lengths, self._logit_rows = held["context_lengths"], held["logit_rows"]
        self._choices, self._draw_positions = held["choices"], held["draw_positions"]
        self._page_tables = held["page_tables"].reshape(max_sequences, max_pages)
        self._temperatures = np.zeros(max_sequences, np.float64)
        self._top_ks = np.zeros(max_sequences, np.int64)
        self._seeds = np.zeros(max_sequences, np.uint64)
        self._filler = BatchFiller(
            token_ids=self._token_ids,
            positions=self._positions,
            row_sequence=self._row_sequence,
            sequence_starts=self._sequence_starts,
            context_lengths=self._context_lengths,
            page_tables=self._page_tables,
            logit_rows=self._logit_rows,
            choices=self._choices,
            draw_positions=self._draw_positions,
            temperatures=self._temperatures,
            top_ks=self._top_ks,
            seeds=self._seeds,
        )
        self._slice(0, 0, 0)

    def fill(
        self,
        decode: list[Request],
        prefill: Sequence[Request] = (),
        counts: Sequence[int] = (),
        *,
        ahead: bool = False,
    ) -> None:
        """One row for each request of ``decode``, then ``counts[i]`` rows for ``prefill[i]``.

        ahead: of the step after one that is not recorded yet; what ``token_ids`` then holds means nothing.
        Raises RuntimeError when they do not fit, or reach beyond a request's known tokens or pages.
        """
        filler = self._filler
        filler.fill(decode, list(prefill), list(counts), ahead)
        self._slice(filler.rows, filler.sequences, filler.logits)

    def _slice(self, rows: int, sequences: int, logits: int) -> None:
        self.token_ids = self._token_ids[:rows]
        self.positions = self._positions[:rows]
        self.row_sequence = self._row_sequence[:rows]
        self.sequence_starts = self._sequence_starts[: sequences + 1]
        self.context_lengths = self._context_lengths[:sequences]
        self.page_tables = self._page_tables[:sequences]
        self.logit_rows = self._logit_rows[:logits]
        self.choices = self._choices[:logits]
        self.draw_positions = self._draw_positions[:logits]
        self.temperatures = self._temperatures[:logits]
        self.top_ks = self._top_ks[:logits]
        self.seeds = self._seeds[:logits]
