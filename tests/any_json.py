"""Every way to put a value of the wrong type into a JSON document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

VALUES: list[Any] = [None, True, False, 0, -1, 1, 7, 2**40, 10**400, 0.5, 1e300, "", "x", "NFC", "\ud800", "é\n", [],
                     ["x"], [1], ["ByteLevel"], [[]], [{}], {}, {"type": "NFC"}, {"type": ["x"]}, {"x": 1}]  # fmt: skip


def mutants(document: Any, longest: int = 40) -> Iterator[Any]:
    """Copies of ``document``, each with one node replaced by one of VALUES or left out.

    Of a list or an object with more than ``longest`` members only the first few are changed. Copies share what they
    did not change.
    """
    yield from VALUES
    if isinstance(document, dict):
        for key in list(document)[: None if len(document) <= longest else 3]:
            yield {name: value for name, value in document.items() if name != key}
            for value in mutants(document[key], longest):
                yield {**document, key: value}
        yield {**document, "\ud800": 1}
    elif isinstance(document, list):
        for place in range(len(document) if len(document) <= longest else 3):
            yield document[:place] + document[place + 1 :]
            for value in mutants(document[place], longest):
                yield [*document[:place], value, *document[place + 1 :]]


def refusals(read: Callable[[Any], object], documents: Iterable[Any], kind: type[Exception]) -> list[str]:
    """The messages of those ``documents`` that ``read`` refuses with ``kind``; any other exception is passed on."""
    messages = []
    for document in documents:
        try:
            read(document)
        except kind as error:
            messages.append(str(error))
    return messages
