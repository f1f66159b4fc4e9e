"""The model in training is the model that the engine serves, on every axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crucible.checkpoint import expected_tensors, open_checkpoint, save_checkpoint
from crucible.config import ModelConfig
from crucible.model.positions import alibi_slopes, rope_tables
from crucible.model.reference_ops import ReferenceOps
from crucible_train import positions
from crucible_train.errors import TrainingError
from crucible_train.presets import AXES, model_config, parameter_counts
from crucible_train.tensors import load_checkpoint_tensors, matrix_rows, named_views, to_checkpoint_tensors
from crucible_train.transformer import Transformer
from tests.checkpoints import (
    Alibi,
    Biases,
    Learned,
    LinearScaling,
    NoPosition,
    Norm,
    Rope,
    make_hf_directory,
    random_tensors,
    tiny_config,
)
from tests.direct_model import Model

IDS = np.random.default_rng(5).integers(0, 96, 48).tolist()
ALL_BIASES = Biases(qkv=True, attention_output=True, mlp=True)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tied_embeddings": False},
    "mha": {"num_kv_heads": 4},
    "mqa": {"num_kv_heads": 1},
    "interleaved": {"position": Rope(theta=500.0, pairing="interleaved", scaling=None)},
    "alibi": {"position": Alibi()},
    "alibi-12-heads": {"position": Alibi(), "num_heads": 12, "num_kv_heads": 3, "head_dim": 4},
    "learned": {"position": Learned()},
    "none": {"position": NoPosition()},
    "gelu": {"activation": "gelu"},
    "gelu-tanh": {"activation": "gelu_tanh"},
    "layernorm": {"norm": Norm(type="layernorm", placement="pre", eps=1e-5, bias=True)},
    "layernorm-no-bias": {"norm": Norm(type="layernorm", placement="pre", eps=1e-5, bias=False)},
    "post": {"norm": Norm(type="rmsnorm", placement="post", eps=1e-5, bias=False)},
    "post-layernorm": {"norm": Norm(type="layernorm", placement="post", eps=1e-5, bias=True)},
    "biases": {"biases": ALL_BIASES},
    "gelu-biases": {"activation": "gelu", "biases": ALL_BIASES, "position": Learned()},
    "odd-sizes": {"hidden_size": 33, "intermediate_size": 65, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def make(config: ModelConfig, seed: int = 0, **switches: Any) -> Transformer:
    model = Transformer(config, **switches)
    load_checkpoint_tensors(model, random_tensors(config, seed).__getitem__)
    return model


def logits_of(model: Transformer, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model.logits(torch.tensor([ids]))[0].numpy()


@pytest.mark.parametrize("fused_projections", [True, False])
@pytest.mark.parametrize("axis", CONFIGS)
def test_logits_equal_the_float64_model_of_the_engine(axis: str, fused_projections: bool, tmp_path: Path) -> None:
    config = tiny_config(**CONFIGS[axis])
    model = make(config, fused_projections=fused_projections)
    save_checkpoint(tmp_path / "model", config, to_checkpoint_tensors(model))
    want = Model(tmp_path / "model", ReferenceOps).run((IDS, 0, [3, 0, 5]), all_rows=True)
    got = logits_of(model, IDS)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    top = lambda rows: np.argsort(-rows, axis=1, kind="stable")[:, :10]  # noqa: E731
    assert np.array_equal(top(got)[-1], top(want)[-1])


def test_logits_equal_the_cpu_engine(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = model_config("tiny", vocab_size=96)
    model = Transformer(config)
    save_checkpoint(tmp_path / "model", config, to_checkpoint_tensors(model))
    want = Model(tmp_path / "model").run((IDS, 0, [3, 0, 5]), all_rows=True)
    assert np.abs(logits_of(model, IDS) - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("axis", ["llama", "untied", "mha"])
def test_logits_equal_transformers(axis: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    config = tiny_config(**CONFIGS[axis])
    directory = make_hf_directory(tmp_path / "hf", config=config)
    llama = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        want = llama(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(logits_of(make(config), IDS) - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16, 20])
def test_alibi_slopes_are_those_of_the_engine(heads: int) -> None:
    assert np.array_equal(positions.alibi_slopes(heads).numpy(), alibi_slopes(heads))


@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 128), (500.0, 10)])
def test_rope_tables_are_those_of_the_engine(theta: float, head_dim: int) -> None:
    rope = Rope(theta=theta, pairing="half", scaling=None)
    for ours, engine in zip(positions.rope_tables(rope, head_dim, 700), rope_tables(rope, head_dim, 700), strict=True):
        assert np.array_equal(ours.numpy(), engine)


@pytest.mark.parametrize("axis", CONFIGS)
def test_checkpoint_tensors_round_trip(axis: str, tmp_path: Path) -> None:
    config = tiny_config(**CONFIGS[axis])
    tensors = random_tensors(config, seed=9)
    fused, separate = Transformer(config), Transformer(config, fused_projections=False)
    load_checkpoint_tensors(fused, tensors.__getitem__)
    load_checkpoint_tensors(separate, dict(to_checkpoint_tensors(fused)).__getitem__)
    stored = dict(to_checkpoint_tensors(separate))
    assert list(stored) == list(expected_tensors(config))
    assert all(np.array_equal(stored[name], tensors[name]) for name in tensors)
    save_checkpoint(tmp_path / "model", config, stored.items())
    with open_checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.config == config


def test_a_tensor_of_another_shape_is_refused() -> None:
    model = Transformer(tiny_config())
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight has shape \[1, 1\], the model wants \[96, 32\]"):
        load_checkpoint_tensors(model, lambda name: np.zeros((1, 1)))


@pytest.mark.parametrize("axis", CONFIGS)
def test_every_parameter_is_counted_and_trained(axis: str) -> None:
    config = tiny_config(**CONFIGS[axis])
    model = make(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_counts(config).total
    tokens = torch.tensor([IDS])
    model.loss(tokens, tokens.roll(-1, 1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_initial_values() -> None:
    torch.manual_seed(7)
    fused = Transformer(model_config("tiny", norm="layernorm", position="learned", tied=False))
    torch.manual_seed(7)
    separate = Transformer(fused.config, fused_projections=False)
    views = named_views(fused)
    for name, view in named_views(separate).items():
        assert torch.equal(view, views[name]), name
        if view.ndim == 1:
            assert torch.equal(view, torch.ones(64) if name.endswith("weight") else torch.zeros(64)), name
        else:
            std = 0.02 / 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert view.std().item() == pytest.approx(std, rel=0.06), name
    with torch.no_grad():
        tokens = torch.randint(512, (4, 64))
        assert fused.loss(tokens, tokens).item() == pytest.approx(np.log(512), abs=0.05)


def test_stacked_matrices_are_listed() -> None:
    model = Transformer(model_config("tiny"))
    rows = matrix_rows(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert all(sum(parts) == shapes[name][0] for name, parts in rows.items())
    assert sorted(rows.values())[-2:] == [(192, 192), (192, 192)]
    assert list(rows.values()).count((64, 32, 32)) == 2
    assert not any("embed" in name or "norm" in name for name in rows)


@pytest.mark.parametrize("position", AXES["position"])
@pytest.mark.parametrize("attention", AXES["attention"])
def test_causality_bit_for_bit(position: str, attention: str) -> None:
    torch.manual_seed(1)
    model = Transformer(model_config("tiny", position=position, attention=attention))
    tokens = torch.randint(512, (2, 64))
    edited = tokens.clone()
    edited[:, 40] = (edited[:, 40] + 1) % 512
    with torch.no_grad():
        before, after = model.logits(tokens), model.logits(edited)
    assert torch.equal(before[:, :40], after[:, :40])
    assert (before[:, 40:] != after[:, 40:]).any(-1).all()


def test_ignored_targets_and_reductions() -> None:
    model = make(tiny_config())
    tokens = torch.tensor([IDS, IDS[::-1]])
    targets = tokens.roll(-1, 1)
    targets[0, 10:] = -1
    with torch.no_grad():
        total, mean = model.loss(tokens, targets, "sum"), model(tokens, targets)
        rows = torch.log_softmax(model.logits(tokens), -1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
        assert total.item() == pytest.approx(-rows[targets >= 0].sum().item(), rel=1e-5)
        assert mean.item() == pytest.approx(total.item() / 58, rel=1e-6)
        assert model.loss(tokens, torch.full_like(tokens, -1)).item() == 0.0
    with pytest.raises(TrainingError, match="reduction must be mean or sum, got 'none'"):
        model.loss(tokens, targets, "none")


@pytest.mark.parametrize(
    "switches", [{}, {"fused_projections": False}, {"loss": "plain"}, {"residual": "float32"}, {"chunk": 7}]
)
def test_autocast_stays_near_float32(switches: dict[str, Any]) -> None:
    torch.manual_seed(2)
    model = Transformer(model_config("tiny"), **switches)
    tokens, targets = torch.randint(512, (2, 2, 64))
    exact = model.loss(tokens, targets)
    exact.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.loss(tokens, targets)
    rounded.backward()
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=1e-3)
    for parameter, want in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert want is not None
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - want).norm() <= 0.03 * want.norm()


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"gqa": "grouped"}, "gqa must be one of fused, materialised, got 'grouped'"),
        ({"matmul": "fp4"}, "matmul must be one of bf16, fp8, fp8-after, fp8-tensor, got 'fp4'"),
        ({"chunk": 0}, "chunk must be at least 1 row, got 0"),
        ({"speed": "high"}, "there is no compute switch 'speed'"),
        ({"matmul": "fp8"}, "fp8 needs multiples of 16, got a matrix of 99 × 33; use matmul bf16"),
        ({"head_matmul": "fp8"}, "an fp8 head needs multiples of 16, got 96 × 33; use matmul bf16"),
    ],
)
def test_impossible_switches_are_refused(switches: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError) as error:
        Transformer(tiny_config(hidden_size=33, num_heads=3, num_kv_heads=3, head_dim=11, position=Alibi()), **switches)
    assert str(error.value) == message


def test_rope_scaling_and_too_many_tokens_are_refused() -> None:
    scaled = Rope(theta=1e4, pairing="half", scaling=LinearScaling(factor=2.0))
    with pytest.raises(TrainingError, match="training does not know RoPE scaling"):
        Transformer(tiny_config(position=scaled))
    with pytest.raises(TrainingError, match="9 tokens are more than the context of 8"):
        Transformer(tiny_config(context_length=8)).logits(torch.zeros(1, 9, dtype=torch.long))
