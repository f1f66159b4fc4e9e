"""RoPE frequencies against transformers', ALiBi slopes against the published ones."""

from __future__ import annotations

import numpy as np
import pytest

from crucible.config.model import LinearScaling, Llama3Scaling, Rope, YarnScaling
from crucible.model.positions import alibi_slopes, rope_frequencies, rope_tables

CASES = {
    "default": (None, {"rope_type": "default"}),
    "linear": (LinearScaling(factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        YarnScaling(factor=4.0, original_context_length=2048, beta_fast=32.0, beta_slow=1.0, attention_factor=1.138629),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 1.138629,
        },
    ),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 128), (100000.0, 64)])
def test_frequencies_equal_those_of_transformers(kind: str, theta: float, head_dim: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, parameters = CASES[kind]
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    theirs = LlamaRotaryEmbedding(config)
    ours, factor = rope_frequencies(Rope(theta=theta, pairing="half", scaling=scaling), head_dim)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1e-6)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_tables_hold_the_angle_of_each_position() -> None:
    cos, sin = rope_tables(Rope(theta=100.0, pairing="half", scaling=None), 4, 3)
    assert cos.shape == sin.shape == (3, 2)
    np.testing.assert_allclose(cos[2], np.cos([2.0, 0.2]), rtol=1e-6)
    np.testing.assert_allclose(sin[2], np.sin([2.0, 0.2]), rtol=1e-6)


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    # 12 heads: those of 8, then every other of 16 (arXiv:2108.12409, the authors' code).
    np.testing.assert_allclose(alibi_slopes(12)[8:], [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rtol=1e-6)
