"""A Transformer's parameters as the tensors of a checkpoint, and back. Nothing is renumbered or rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crucible.checkpoint import EMBEDDING, HEAD, expected_tensors
from crucible_train.linear import Linear, Projections
from crucible_train.presets import POSITION_TABLE

if TYPE_CHECKING:
    from crucible_train.decoder import Block
    from crucible_train.transformer import Transformer

INIT_STD = 0.02


def named_views(model: Transformer) -> dict[str, Tensor]:
    """Every tensor of expected_tensors(model.config), in its order, as a view of the parameter that holds it.

    A view shares memory with its parameter: writing into it (under no_grad) sets the weights.
    """
    decoder = model.model
    views: dict[str, Tensor] = {EMBEDDING: decoder.embed_tokens.weight}
    if decoder.embed_positions is not None:
        views[POSITION_TABLE] = decoder.embed_positions.weight
    for index, layer in enumerate(decoder.layers):
        views.update(_layer(layer, f"model.layers.{index}."))
    views.update(_norm(decoder.norm, "model.norm"))
    if model.lm_head is not None:
        views[HEAD] = model.lm_head.weight
    detached = {name: view.detach() for name, view in views.items()}
    return {name: detached[name] for name in expected_tensors(model.config)}


def to_checkpoint_tensors(model: Transformer) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name and float32 array of every tensor, in file order; one at a time, for save_checkpoint."""
    for name, view in named_views(model).items():
        yield name, view.to("cpu", torch.float32).contiguous().numpy()


def load_checkpoint_tensors(model: Transformer, read: Callable[[str], NDArray[Any]]) -> None:
    """Sets every weight to ``read(name)``, such as Checkpoint.read of a checkpoint of the same ModelConfig.

    Raises ValueError for an array of another shape.
    """
    with torch.no_grad():
        for name, view in named_views(model).items():
            values = torch.from_numpy(np.array(read(name), dtype=np.float32))
            if values.shape != view.shape:
                raise ValueError(f"{name} has shape {list(values.shape)}, the model wants {list(view.shape)}")
            view.copy_(values)


@torch.no_grad()
def initialise(model: Transformer) -> None:
    """Matrices and tables normal(0, 0.02), the two that write to the residual divided by sqrt(2 · layers) (GPT-2's).

    Drawn tensor by tensor in checkpoint order from torch's generator: the same seed gives the same weights whether
    projections are fused or not. Norms stay 1, biases 0.
    """
    residual = INIT_STD / (2 * model.config.num_layers) ** 0.5
    for name, view in named_views(model).items():
        if view.ndim == 2:
            view.normal_(0.0, residual if name.endswith(("o_proj.weight", "down_proj.weight")) else INIT_STD)
        elif name.endswith("_proj.bias"):
            view.zero_()


def matrix_rows(model: Transformer) -> dict[str, tuple[int, ...]]:
    """Parameter name (that of named_parameters) → row counts of the matrices stacked in it, for every projection.

    What works on a matrix as a whole, as Muon does, takes these one by one.
    """
    sizes: dict[int, tuple[int, ...]] = {}
    for module in model.modules():
        if isinstance(module, Projections) and module.fused:
            sizes[id(module.parts[0].weight)] = module.outputs
        elif isinstance(module, Linear):
            sizes.setdefault(id(module.weight), (len(module.weight),))
    return {name: sizes[id(value)] for name, value in model.named_parameters() if id(value) in sizes}


def _layer(layer: Block, prefix: str) -> Iterator[tuple[str, Tensor]]:
    yield from _norm(layer.attention_norm, prefix + "input_layernorm")
    for name, (part, rows) in zip("qkv", layer.attention.qkv.slices(), strict=True):
        yield from _linear(part, rows, f"{prefix}self_attn.{name}_proj")
    yield from _linear(layer.attention.output, slice(None), prefix + "self_attn.o_proj")
    yield from _norm(layer.mlp_norm, prefix + "post_attention_layernorm")
    slices = layer.mlp.inputs.slices()
    for name, (part, rows) in zip(("gate", "up")[-len(slices) :], slices, strict=True):
        yield from _linear(part, rows, f"{prefix}mlp.{name}_proj")
    yield from _linear(layer.mlp.down, slice(None), prefix + "mlp.down_proj")


def _linear(part: Linear, rows: slice, name: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", part.weight[rows]
    if part.bias is not None:
        yield f"{name}.bias", part.bias[rows]


def _norm(norm: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    for kind, parameter in norm.named_parameters():
        yield f"{name}.{kind}", parameter
