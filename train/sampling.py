"""Text from a model while it trains: slow and simple, the engine is for serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from crucible.config.model import ModelConfig
from crucible_train.errors import TrainingError
from crucible_train.run_config import MAX_SEED

Logits = Callable[[torch.Tensor], torch.Tensor]
"""tokens [1, n] → logits [1, n, vocab_size]."""


@torch.no_grad()
def continue_tokens(
    logits: Logits,
    config: ModelConfig,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    device: torch.device,
) -> list[int]:
    """Up to ``max_tokens`` ids after ``prompt``, ending before an eos; temperature 0 takes the likeliest.

    The whole context is computed anew for each token; beyond ``context_length`` the oldest tokens are dropped. Draws
    come from a generator of their own, so sampling changes nothing in the run. top_k 0: all. Raises TrainingError for
    an empty prompt and for settings that no draw can follow.
    """
    if not prompt:
        raise TrainingError("the prompt has no tokens; give some text")
    if not 0 <= temperature < float("inf"):  # NaN fails too
        raise TrainingError(f"temperature must be 0 or a positive number, got {temperature}")
    if top_k < 0:
        raise TrainingError(f"top_k must not be negative, got {top_k}")
    if not 0 <= seed <= MAX_SEED:
        raise TrainingError(f"seed must lie in 0 … {MAX_SEED}, got {seed}")
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    eos = set(config.eos_token_ids)
    for _ in range(max_tokens):
        window = torch.tensor([ids[-config.context_length :]], device=device)
        last = logits(window)[0, -1, : config.token_count].float().cpu()
        if temperature == 0:
            choice = int(last.argmax())
        else:
            best = last.topk(min(top_k or last.numel(), last.numel()))
            weights = torch.softmax((best.values - best.values[0]) / temperature, dim=0)
            choice = int(best.indices[torch.multinomial(weights, 1, generator=generator)])
        if choice in eos:
            break
        ids.append(choice)
    return ids[len(prompt) :]
