"""Hugging Face Llama directories: their ``config.json`` as a ModelConfig, and which safetensors files hold the weights.

Absent keys get LlamaConfig's documented defaults. Whatever would change the compute graph and is not implemented is
refused by name: a Llama-shaped model with another rope or a scaled residual still writes fluent text.
Knows neither tensors nor tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crucible.config.model import Biases, ModelConfig, Norm
from crucible.errors import CheckpointError
from crucible.importers.hf_fields import Fields
from crucible.importers.hf_rope import parse_rope
from crucible.json_file import read_json, shown

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

_MISTRAL_DIFFERS = ("num_key_value_heads", "intermediate_size", "max_position_embeddings", "sliding_window")
"""Keys whose default in MistralConfig is not LlamaConfig's; a Mistral directory must state them."""

_INERT: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "rope_interleaved": (None, False),
    "qk_layernorm": (None, False),
    "use_qk_norm": (None, False),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "attention_chunk_size": (None,),
}
"""Keys of Llama's relatives that change the graph, with the values at which they do not."""


def parse_hf_config(values: dict[str, Any], directory: Path) -> ModelConfig:
    """The parsed ``config.json`` of ``directory`` as a ModelConfig; RoPE pairing is ``half``.

    ``generation_config.json``'s eos ids replace config.json's, as in transformers. ``token_count`` is 1 + the highest
    id of tokenizer.json when there is one, else ``vocab_size``. Raises CheckpointError naming file and field.
    """
    path = directory / "config.json"
    fields = Fields(values, path)
    _check_family(fields)
    heads = fields.integer("num_attention_heads", 32)
    hidden = fields.integer("hidden_size", 4096)
    vocabulary = fields.integer("vocab_size", 32000)
    context = fields.integer("max_position_embeddings", 2048)
    kv_heads = fields.optional_integer("num_key_value_heads")
    head_dim = fields.optional_integer("head_dim")
    if heads < 1:
        raise CheckpointError(f"{path}: num_attention_heads must be at least 1, got {heads}")
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(f"{path}: head_dim is missing and hidden_size {hidden} no multiple of {heads} heads")
        head_dim = hidden // heads
    _check_inert(fields, context)
    bias = fields.boolean("attention_bias", False)
    eos = _token_ids(fields, "eos_token_id", [2], vocabulary)
    bos = _token_ids(fields, "bos_token_id", [1], vocabulary)
    if len(bos) > 1:
        raise CheckpointError(f"{path}: bos_token_id must be one id, got {bos}")
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = _token_ids(Fields(read_json(generation), generation), "eos_token_id", [], vocabulary) or eos
    try:
        return ModelConfig(
            crucible_format=1,
            vocab_size=vocabulary,
            token_count=_token_count(directory, vocabulary),
            context_length=context,
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", 11008),
            num_layers=fields.integer("num_hidden_layers", 32),
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            norm=Norm(type="rmsnorm", placement="pre", eps=fields.number("rms_norm_eps", 1e-6), bias=False),
            position=parse_rope(fields, context),
            activation="swiglu",
            biases=Biases(qkv=bias, attention_output=bias, mlp=fields.boolean("mlp_bias", False)),
            tied_embeddings=fields.boolean("tie_word_embeddings", False),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=eos,
        )
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(directory)) else f"{path}: {_hf_names(text)}") from None


def _check_family(fields: Fields) -> None:
    kind, architectures = fields.values.get("model_type"), fields.values.get("architectures")
    if kind is None:
        raise CheckpointError(f"{fields.path}: neither model_type nor crucible_format: not the config of a model")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(f"{fields.path}: model_type {shown(kind)} is not supported; use a Llama-family model")
    if architectures is not None and architectures != [ARCHITECTURES[kind]]:
        wanted = [ARCHITECTURES[kind]]
        raise CheckpointError(f"{fields.path}: architectures must be {wanted}, got {shown(architectures)}")
    if kind == "mistral":
        for name in _MISTRAL_DIFFERS:
            if name not in fields.values:
                raise CheckpointError(f"{fields.path}: {name} is missing; a mistral config must state it")


def _check_inert(fields: Fields, context: int) -> None:
    activation = fields.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{fields.path}: hidden_act {shown(activation)} is not supported; Llama uses 'silu'")
    for name, allowed in _INERT.items():
        value = fields.values.get(name)
        if not any(value == inert for inert in allowed):
            raise CheckpointError(f"{fields.path}: {name} {shown(value)} is not supported")
    window = fields.optional_integer("sliding_window")
    if window is not None and window < context and fields.values.get("use_sliding_window") is not False:
        raise CheckpointError(f"{fields.path}: sliding_window {window} below the context of {context} is not supported")
    layers = fields.values.get("layer_types")
    if layers is not None and not (isinstance(layers, list) and all(layer == "full_attention" for layer in layers)):
        raise CheckpointError(f"{fields.path}: layer_types {shown(layers)} is not supported; only full_attention is")
    # Slices the matrix products of tensor-parallel pretraining: same sums, and transformers ignores it since 4.48.
    parallel = fields.optional_integer("pretraining_tp")
    if parallel is not None and parallel < 1:
        raise CheckpointError(f"{fields.path}: pretraining_tp must be at least 1, got {parallel}")


def _token_ids(fields: Fields, name: str, default: list[int], vocabulary: int) -> list[int]:
    """An id, a list of ids or null; without repetitions. Raises CheckpointError for ids outside the vocabulary."""
    value = fields.values.get(name, default)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"{fields.path}: {name} must be a token id or a list of them, got {shown(value)}")
    for token in ids:
        if not 0 <= token < vocabulary:
            fault = f"token id {token} lies outside the vocabulary of {vocabulary}"
            raise CheckpointError(f"{fields.path}: {name}: {fault}")
    return list(dict.fromkeys(ids))


def _token_count(directory: Path, vocabulary: int) -> int:
    """Ids that mean something. A tokenizer.json that cannot be read is the tokenizer's to report, not needed here."""
    try:
        tokenizer = json.loads((directory / "tokenizer.json").read_bytes())
        ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer.get("added_tokens") or [])]
        count = 1 + max(ids)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return vocabulary
    return min(count, vocabulary) if type(count) is int and count > 0 else vocabulary


def _hf_names(message: str) -> str:
    """ModelConfig's complaint in the words of the file that the user sees."""
    for ours, theirs in (("num_layers", "num_hidden_layers"), ("num_kv_heads", "num_key_value_heads"),
                         ("num_heads", "num_attention_heads"), ("context_length", "max_position_embeddings"),
                         ("norm.eps", "rms_norm_eps"), ("position.theta", "rope_theta"),
                         ("position.scaling", "rope_scaling")):
        message = message.replace(ours, theirs)
    return message


def weight_files(directory: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """The safetensors files of ``directory``, and for a sharded one the file that must hold each tensor.

    Files that the index does not name are ignored. Raises CheckpointError for an index that names a file outside.
    """
    index, single = directory / INDEX_NAME, directory / WEIGHTS_NAME
    if not index.exists():
        if single.exists():
            return [single], None
        pickled = (directory / "pytorch_model.bin").exists()
        hint = "; pytorch_model.bin is a pickle, convert it to safetensors first" if pickled else ""
        raise CheckpointError(f"{single}: no such file, and no {INDEX_NAME} either{hint}")
    weight_map = shard_map(index)
    files = {name: _shard(directory, name, index) for name in dict.fromkeys(weight_map.values())}
    return list(files.values()), {tensor: files[name] for tensor, name in weight_map.items()}


def shard_map(index: Path) -> dict[str, str]:
    """The name of the shard of each tensor, as the file ``index`` gives it. Raises CheckpointError."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map tensor names to shard files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{index}: the shard of {shown(tensor)} must be a file name, got {shown(name)}")
    return weight_map


def _shard(directory: Path, name: str, index: Path) -> Path:
    """The shard called ``name``; an index from the internet must not reach other files of this machine."""
    path = directory / name
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(f"{index}: shard path {shown(name)} leads outside the model directory")
    try:
        resolved, roots = path.resolve(strict=True), [directory.resolve()]
    except (OSError, RuntimeError):
        raise CheckpointError(f"{index}: shard {shown(name)} does not exist beside it") from None
    if roots[0].parent.name == "snapshots":  # the hub's cache: snapshots/REVISION/file → ../../blobs/HASH
        roots.append(roots[0].parent.parent / "blobs")
    if not any(resolved.is_relative_to(root) for root in roots):
        raise CheckpointError(f"{index}: shard {shown(name)} is a link that leads outside the model directory")
    return path
