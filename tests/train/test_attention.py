"""Fused and materialised grouped-query attention are the same function, gradients included."""

from __future__ import annotations

import math

import pytest
import torch

from crucible_train.attention import Attention
from crucible_train.compute import Compute
from crucible_train.positions import alibi_bias, alibi_slopes, rope_tables
from tests.checkpoints import Alibi, Biases, Rope, tiny_config

N_REP = [2, 4, 12]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("projection_bias", [False, True])
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize("n_rep", N_REP)
def test_fused_equals_materialised(n_rep: int, attention_bias: bool, projection_bias: bool) -> None:
    rope = Rope(theta=1e4, pairing="half", scaling=None)
    config = tiny_config(
        hidden_size=96,
        num_heads=2 * n_rep,
        num_kv_heads=2,
        position=Alibi() if attention_bias else rope,
        biases=Biases(qkv=projection_bias, attention_output=projection_bias, mlp=False),
    )
    torch.manual_seed(n_rep)
    fused, materialised = Attention(config, Compute(gqa="fused")), Attention(config, Compute(gqa="materialised"))
    for parameter in fused.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    materialised.load_state_dict(fused.state_dict())
    tables = None if attention_bias else tuple(t[:33] for t in rope_tables(rope, config.head_dim, 64))
    bias = alibi_bias(alibi_slopes(config.num_heads), 33) if attention_bias else None
    results = []
    for module in (fused, materialised):
        x = torch.randn(2, 33, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = module(x, tables, bias)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6 * theirs.abs().max().item())
    # It is the function of the paper, head by head.
    assert torch.allclose(results[0][0], by_hand(fused, x.detach(), tables, bias), rtol=1e-4, atol=1e-5)


def by_hand(module: Attention, x: torch.Tensor, tables: object, bias: torch.Tensor | None) -> torch.Tensor:
    from crucible_train.positions import rotate

    q, k, v = (part.view(*x.shape[:2], -1, module.head_dim) for part in module.qkv(x))
    if tables is not None:
        q, k = rotate(q, *tables, False), rotate(k, *tables, False)  # type: ignore[misc]
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    heads = []
    for head in range(module.heads):
        own = head // (module.heads // module.kv_heads)
        scores = q[:, :, head] @ k[:, :, own].transpose(1, 2) / math.sqrt(module.head_dim)
        if bias is not None:
            scores = scores + bias[head]
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v[:, :, own])
    return module.output(torch.cat(heads, -1)).detach()


def test_alibi_bias() -> None:
    bias = alibi_bias(torch.tensor([0.5, 0.25]), 3)
    inf = math.inf
    assert bias[0].tolist() == [[0, -inf, -inf], [-0.5, 0, -inf], [-1, -0.5, 0]]
    assert bias[1, 2].tolist() == [-0.5, -0.25, 0]
