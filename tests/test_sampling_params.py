"""SamplingParams: what it refuses, and by which name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crucible import SamplingParams
from crucible.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("max_tokens", "top_k", "seed") for value in (1.5, True, "3", [1], 3.0)),
        *(("temperature", value) for value in ("x", "1", True, [1.0], -0.5, float("nan"), float("inf"), 10**400)),
        *(("ignore_eos", value) for value in (1, "no", None)),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("top_k", 0),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(name: str, value: Any) -> None:
    others: dict[str, Any] = {"temperature": 0.5} if name in ("top_k", "seed") else {}
    with pytest.raises(RequestError, match=f"^{name} must ") as refusal:
        SamplingParams(**{**others, name: value})
    assert refusal.value.param == name
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["top_k", "seed"])
def test_greedy_has_no_use_for_them(name: str) -> None:
    for temperature in (None, 0, 0.0):
        with pytest.raises(RequestError, match=f"^{name} needs a positive temperature"):
            SamplingParams(temperature=temperature, **{name: 5})


def test_what_is_accepted() -> None:
    whole = SamplingParams(temperature=2, top_k=2**40, seed=2**64 - 1, max_tokens=10**12)
    assert (whole.greedy, whole.effective_top_k, whole.effective_seed) == (False, 2**40, 2**64 - 1)
    assert SamplingParams(temperature=np.float64(0.5)).greedy is False
    plain = SamplingParams()
    assert (plain.greedy, plain.effective_top_k, plain.effective_seed) == (True, 40, 1234)
