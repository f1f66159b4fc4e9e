"""Tiny checkpoints for tests: two layers, seeded weights, any architecture axis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.checkpoint import expected_tensors, save_checkpoint
from crucible.config.model import (
    Alibi,
    Biases,
    Learned,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoPosition,
    Norm,
    Rope,
    YarnScaling,
)
from crucible.safetensors_file import write_safetensors

__all__ = ["Alibi", "Biases", "Learned", "LinearScaling", "Llama3Scaling", "NoPosition", "Norm", "Rope", "YarnScaling"]


def tiny_config(**changes: Any) -> ModelConfig:
    """A 2-layer Llama of 4/2 heads (its sizes are all different); ``changes`` replace top-level fields."""
    values: dict[str, Any] = {
        "crucible_format": 1,
        "vocab_size": 96,
        "token_count": 96,
        "context_length": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "norm": Norm(type="rmsnorm", placement="pre", eps=1e-5, bias=False),
        "position": Rope(theta=10000.0, pairing="half", scaling=None),
        "activation": "swiglu",
        "biases": Biases(qkv=False, attention_output=False, mlp=False),
        "tied_embeddings": True,
        "bos_token_id": 1,
        "eos_token_ids": [2],
    }
    return ModelConfig(**{**values, **changes})


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Mantissa-dense weights: norms near 1, biases small, matrices scaled so that activations keep their size."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        values = generator.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            values = 1 + values / 8
        elif len(shape) == 1:
            values /= 8
        elif "embed" not in name:
            values *= shape[1] ** -0.5
        tensors[name] = values.astype(np.float32)
    return tensors


def make_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    files: Mapping[str, bytes] | None = None,
    **config_changes: Any,
) -> Path:
    """Writes a native checkpoint of tiny_config(**config_changes) to ``directory``, which must not exist."""
    config = tiny_config(**config_changes)
    save_checkpoint(directory, config, random_tensors(config, seed).items(), dtype=dtype, files=files)
    return directory


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """``config`` as the ``config.json`` of a LlamaForCausalLM; only for what a Llama can be."""
    rope = config.position
    assert isinstance(rope, Rope)
    assert rope.pairing == "half"
    scaling: dict[str, Any] | None = None
    if rope.scaling is not None:
        scaling = {name: getattr(rope.scaling, name) for name in rope.scaling.__struct_fields__}
        scaling["rope_type"] = rope.scaling.__struct_config__.tag
        if "original_context_length" in scaling:
            scaling["original_max_position_embeddings"] = scaling.pop("original_context_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm.eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "attention_bias": config.biases.qkv,
        "mlp_bias": config.biases.mlp,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "float32",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids,
    }


def make_hf_directory(
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    config: ModelConfig | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
    hf_changes: Mapping[str, Any] | None = None,
    **config_changes: Any,
) -> Path:
    """Writes the same model as make_checkpoint as a Hugging Face directory, in ``shards`` files.

    ``hf_changes`` replace keys of its config.json (None as a value writes null; ``...`` removes the key). ``config``
    and ``tensors`` replace the tiny model.
    """
    config = config or tiny_config(**config_changes)
    tensors = random_tensors(config, seed) if tensors is None else tensors
    directory.mkdir(parents=True)
    values = {name: value for name, value in {**hf_config(config), **(hf_changes or {})}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    if shards == 1:
        write_tensors(directory / "model.safetensors", tensors, dtype)
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        write_tensors(directory / file, part, dtype)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]], dtype: str = "float32") -> None:
    """A safetensors file of exactly ``tensors``."""
    shapes = {name: values.shape for name, values in tensors.items()}
    write_safetensors(path, shapes, tensors.items(), dtype=dtype, metadata={"format": "pt"})
