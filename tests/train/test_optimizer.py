"""AdamW and Muon as one optimizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from crucible_train.distributed import Workers
from crucible_train.muon import Muon, orthogonalise
from crucible_train.optimizer import Optimizer
from crucible_train.presets import model_config
from crucible_train.tensors import matrix_rows, named_views
from crucible_train.transformer import Transformer

ONE = Workers(0, 1, torch.device("cpu"))


def tiny() -> Transformer:
    torch.manual_seed(0)
    return Transformer(model_config("tiny", norm="layernorm"))


def optimizer(model: nn.Module, *, muon: bool = False, decay: float = 0.1) -> Optimizer:
    chosen = matrix_rows(model) if muon else {}
    return Optimizer(model.named_parameters(), workers=ONE, muon=chosen, betas=(0.9, 0.95), weight_decay=decay)


def train(model: Transformer, part: Optimizer, steps: int) -> None:
    for step in range(steps):
        tokens = torch.arange(step, step + 40).view(2, 20)
        model.loss(tokens, tokens + 1).backward()
        part.step(1e-2)
        part.zero_grad()


@pytest.mark.parametrize("muon", [False, True])
def test_decay_touches_matrices_only(muon: bool) -> None:
    model = tiny()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    part = optimizer(model, muon=muon, decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    part.step(0.1)
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_muon_takes_every_projection_and_nothing_else() -> None:
    model = tiny()
    shapes = {tuple(view.shape) for name, view in named_views(model).items() if "_proj" in name}
    rows = matrix_rows(model)
    parameters = dict(model.named_parameters())
    assert all(sum(parts) == parameters[name].shape[0] for name, parts in rows.items())
    assert {(part, parameters[name].shape[1]) for name, parts in rows.items() for part in parts} == shapes
    taken = sum(parameters[name].numel() for name in rows)
    assert taken == sum(view.numel() for name, view in named_views(model).items() if "_proj.weight" in name)


@pytest.mark.parametrize("muon", [False, True])
def test_state_goes_on_where_it_was(muon: bool) -> None:
    whole, halved = tiny(), tiny()
    train(whole, optimizer(whole, muon=muon), 6)
    first = optimizer(halved, muon=muon)
    train(halved, first, 3)
    saved = first.state()
    assert saved is not None
    second = optimizer(halved, muon=muon)
    second.load(saved)
    reference = tiny()
    part = optimizer(reference, muon=muon)
    train(reference, part, 3)
    train(reference, part, 3)
    train(halved, second, 3)
    for ours, theirs in zip(halved.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_of_another_model_is_refused() -> None:
    model = tiny()
    with pytest.raises(KeyError):
        optimizer(model).load({})


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 48), (2, 48, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    updates = torch.randn(shape)
    result = orthogonalise(updates).float()
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(updates, full_matrices=False)
    nearest = left @ right
    for ours, exact in zip(result, nearest, strict=True):
        assert torch.nn.functional.cosine_similarity(ours.flatten(), exact.flatten(), dim=0) > 0.95


def test_fused_matrices_are_orthogonalised_one_by_one() -> None:
    torch.manual_seed(2)
    gradient, start = torch.randn(24, 16), torch.randn(24, 16)
    fused = nn.Parameter(start.clone())
    parts = [nn.Parameter(part.clone()) for part in start.split([16, 8])]
    fused.grad = gradient
    for part, piece in zip(parts, gradient.split([16, 8]), strict=True):
        part.grad = piece
    Muon([fused], lr=0.1, splits={id(fused): (16, 8)}).step()
    Muon(parts, lr=0.1).step()
    assert np.allclose(fused.detach(), torch.cat(parts).detach(), atol=1e-6)
    whole = nn.Parameter(start.clone())
    whole.grad = gradient
    Muon([whole], lr=0.1).step()
    assert not torch.allclose(whole, fused, atol=1e-3)
