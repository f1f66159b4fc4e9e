"""Graphs: which captured graphs are kept. What a graph holds and how it is replayed, a Device knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

PREFILL_GRAPHS = 64
"""Prefill graphs kept: their keys are as many as there are mixtures of prompt lengths."""
SIGHTINGS = 4096
"""Keys remembered that have no graph."""


class Graphs:
    """Graphs by key, at most ``limit``; the one that was not used for longest makes room.

    capture(work) returns a graph of what ``work`` launches, or None if that cannot be captured, which is remembered. A
    key is captured when it is seen for the ``sightings``th time: until then the caller computes eagerly.
    """

    def __init__(self, capture: Callable[[Callable[[], None]], Any], *, limit: int, sightings: int = 1) -> None:
        self._capture, self._limit, self._sightings = capture, limit, sightings
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._unfit: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Hashable, work: Callable[[], None]) -> Any | None:
        """The graph of ``key``, if there is one, or if now is the time to capture ``work`` and it can be."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph
        if key in self._unfit:
            return None
        count = self._seen.pop(key, 0) + 1
        if count < self._sightings:
            self._remember(self._seen, key, count)
            return None
        graph = self._capture(work)
        if graph is None:
            self._remember(self._unfit, key, None)
            return None
        self._graphs[key] = graph
        if len(self._graphs) > self._limit:
            self._graphs.popitem(last=False)  # it must be seen as often again
        return graph

    @staticmethod
    def _remember(keys: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
        keys[key] = value
        if len(keys) > SIGHTINGS:
            keys.popitem(last=False)
