"""Which graphs are captured, kept, dropped and given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from crucible.engine import graphs as module
from crucible.engine.graphs import Graphs


class Device:
    """A graph is what its work said; ``unfit`` cannot be captured."""

    def __init__(self) -> None:
        self.unfit: set[str] = set()
        self.captured: list[str] = []

    def capture(self, work: Callable[[], str]) -> str | None:
        self.captured.append(work())
        return None if work() in self.unfit else work()


@pytest.fixture
def device() -> Device:
    return Device()


def get(graphs: Graphs, key: str) -> object:
    return graphs.get(key, lambda: key)  # type: ignore[arg-type, return-value]


def test_a_key_is_captured_when_it_comes_again_and_once(device: Device) -> None:
    graphs = Graphs(device.capture, limit=4, sightings=2)
    assert [get(graphs, "a") for _ in range(4)] == [None, "a", "a", "a"]
    assert device.captured == ["a"]
    assert get(graphs, "b") is None
    assert len(graphs) == 1


def test_or_at_once(device: Device) -> None:
    assert get(Graphs(device.capture, limit=4), "a") == "a"


def test_a_failed_capture_is_not_tried_again(device: Device) -> None:
    device.unfit.add("a")
    graphs = Graphs(device.capture, limit=4, sightings=2)
    assert [get(graphs, "a") for _ in range(5)] == [None] * 5
    assert device.captured == ["a"]
    assert len(graphs) == 0


def test_the_least_recently_used_makes_room_and_starts_afresh(device: Device) -> None:
    graphs = Graphs(device.capture, limit=2, sightings=2)
    for key in "aabb":
        get(graphs, key)
    assert get(graphs, "a") == "a"
    get(graphs, "c")
    assert get(graphs, "c") == "c"
    assert len(graphs) == 2
    assert get(graphs, "a") == "a"
    assert [get(graphs, "b"), get(graphs, "b")] == [None, "b"]
    assert device.captured == ["a", "b", "c", "b"]


def test_what_is_remembered_is_bounded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIGHTINGS", 3)
    graphs = Graphs(device.capture, limit=2, sightings=2)
    for key in "abcd":
        get(graphs, key)
    assert get(graphs, "a") is None  # forgotten
    assert get(graphs, "d") == "d"
