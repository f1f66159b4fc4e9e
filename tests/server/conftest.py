"""One service over the fakes for all tests that only look at answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Running, serving


@pytest.fixture(scope="session")
def service() -> Iterator[Running]:
    """A fast fake core: 8 running, 8 waiting, context 512."""
    with serving(core={"max_batch": 8, "max_queue": 8, "context": 512, "step_s": 0.001}) as running:
        yield running
