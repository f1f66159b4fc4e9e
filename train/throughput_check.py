"""How far each variant's loss and gradients lie from float32's, on the device that will train.

``python -m crucible_train.throughput --check`` prints a JSON line a variant: relative errors ‖g − g32‖ / ‖g32‖ of each
group of weights' gradients, the reference's bf16 errors being the measure of the others.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crucible.config.model import ModelConfig
from crucible_train.presets import model_config
from crucible_train.tensors import load_checkpoint_tensors, to_checkpoint_tensors
from crucible_train.throughput_step import Plan, learnable_data
from crucible_train.throughput_variants import REFERENCE, Variant, parse_variant
from crucible_train.transformer import Transformer

WARM_STEPS = 8
"""Plain steps before the comparison: at the start gradients are those of noise."""
TOLERANCE, FP8_TOLERANCE = 0.1, 0.4
"""Of a group's gradients. On an H200 bf16 (8 bits) left the 120m's up to 0.036 off, FP8 (e4m3: 4 bits) up to 0.23; a
kernel that is wrong leaves ones that are unlike: errors about 1."""


def check(
    preset: str,
    variants: Sequence[str],
    plan: Plan,
    device: torch.device,
    *,
    vocab_size: int | None = None,
    report: Callable[[dict[str, Any]], None],
) -> bool:
    """Reports a record a variant; whether all ran and lie within their tolerance."""
    config = model_config(preset, vocab_size=vocab_size, context_length=plan.context)
    data = learnable_data(config.vocab_size, plan, device)
    weights = _warm_weights(config, data, plan.seed, device)
    batch = data[-1]
    exact = _gradients(Variant(REFERENCE, "none"), config, weights, batch, device, half=False)
    good = True
    for name in variants:
        variant = parse_variant(name)
        try:
            got = _gradients(variant, config, weights, batch, device, half=True)
        except Exception as error:  # whatever it is, the others go on
            traceback.print_exc()
            report({"variant": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"})
            good = False
            continue
        record = {
            "variant": name,
            "loss": got[0],
            "loss_error": abs(got[0] / exact[0] - 1),
            **_errors(got[1], exact[1]),
        }
        fp8 = "fp8" in variant.compute.matmul + variant.compute.head_matmul
        limit = FP8_TOLERANCE if fp8 else TOLERANCE
        record["ok"] = record["loss_error"] < 0.01 and all(e < limit for k, e in record.items() if k in _GROUPS)
        good = good and bool(record["ok"])
        report({k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()})
    return good


_GROUPS = {
    "embedding": ("embed_tokens", "lm_head"),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_output": ("o_proj",),
    "mlp_inputs": ("gate_proj", "up_proj"),
    "mlp_down": ("down_proj",),
    "norms": ("norm",),
}


def _errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The largest relative error of a tensor in each group."""
    result = {}
    for group, parts in _GROUPS.items():
        names = [name for name in exact if any(part in name for part in parts)]
        errors = [((got[n] - exact[n]).norm() / exact[n].norm().clamp(min=1e-30)).item() for n in names]
        if errors:
            result[group] = max(errors)
    return result


def _warm_weights(config: ModelConfig, data: Any, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Weights by checkpoint name, after a few plain steps."""
    torch.manual_seed(seed)
    model = Transformer(config, REFERENCE).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(WARM_STEPS):
        with torch.autocast(device.type, torch.bfloat16):
            model(*data[step % len(data)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _by_name(model)


def _gradients(
    variant: Variant, config: ModelConfig, weights: dict[str, Tensor], batch: Any, device: torch.device, half: bool
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by checkpoint name, of a compiled step as in training."""
    model = Transformer(config, variant.compute)
    load_checkpoint_tensors(model, lambda name: weights[name].numpy())
    model.to(device)
    run: Callable[..., Tensor] = model
    if variant.mode != "none":
        mode = None if variant.mode == "default" else variant.mode
        run = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        loss = run(*batch)
    loss.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return loss.item(), _by_name(model)


def _by_name(model: Transformer) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: torch.from_numpy(array).clone() for name, array in to_checkpoint_tensors(model)}
