"""Continuing a text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from crucible_train.errors import TrainingError
from crucible_train.presets import model_config
from crucible_train.sampling import continue_tokens

CONFIG = model_config("tiny", vocab_size=64, token_count=50, eos_token_id=49, context_length=8)
CPU = torch.device("cpu")


def counting(window: torch.Tensor) -> torch.Tensor:
    """The likeliest next token is one higher; padding ids would win if they could."""
    assert window.shape[1] <= 8
    logits = torch.zeros(1, window.shape[1], 64)
    logits[0, -1, (window[0, -1] + 1) % 64] = 5.0
    logits[..., 50:] = 9.0
    return logits


def test_greedy_stops_before_the_end_of_the_document() -> None:
    assert continue_tokens(counting, CONFIG, [45], max_tokens=9, temperature=0, device=CPU) == [46, 47, 48]
    assert continue_tokens(counting, CONFIG, [5], max_tokens=3, temperature=0, device=CPU) == [6, 7, 8]


def test_beyond_the_context_the_oldest_go() -> None:
    assert continue_tokens(counting, CONFIG, [1] * 20, max_tokens=12, temperature=0, device=CPU) == list(range(2, 14))


def test_the_seed_decides_and_padding_is_never_drawn() -> None:
    draws = [
        continue_tokens(counting, CONFIG, [1], max_tokens=30, top_k=0, seed=seed, device=CPU) for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert all(token < 50 for draw in draws for token in draw)


def test_sampling_draws_nothing_from_the_run() -> None:
    before = torch.get_rng_state()
    continue_tokens(counting, CONFIG, [1], max_tokens=5, device=CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_prompt() -> None:
    with pytest.raises(TrainingError, match="no tokens"):
        continue_tokens(counting, CONFIG, [], max_tokens=5, device=CPU)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"seed": 2**70},
        {"seed": -1},
    ],
)
def test_what_no_draw_can_follow_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=next(iter(settings))):
        continue_tokens(counting, CONFIG, [1], max_tokens=1, device=CPU, **settings)
