"""GGUF files of the Llama architecture to native checkpoints.

GGUF stores q and k rows permuted, so that ggml's interleaved RoPE gives what Hugging Face's half-split RoPE gives on
the original order (LlamaModel.permute in llama.cpp's convert_hf_to_gguf.py). They are put back here: the tensors then
equal those of the Hugging Face directory. Without that the text stays fluent and the model is worse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crucible.checkpoint import EMBEDDING, HEAD, expected_tensors, save_checkpoint
from crucible.config.model import Biases, ModelConfig, Norm
from crucible.errors import CheckpointError, TokenizerError
from crucible.foreign_vocabulary import UNUSED
from crucible.gguf_file import GgufFile
from crucible.importers.gguf_rope import ROPE_FACTORS, parse_rope
from crucible.importers.hf_fields import Fields
from crucible.json_file import one_line, shown

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}

_KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.causal", "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor", "expert_count", "expert_used_count",
}  # fmt: skip
"""Keys after ``llama.`` that are understood; any other may change the graph and is refused."""


def import_gguf(source: str | Path, target: str | Path, *, progress: bool = False) -> Path:
    """Converts the GGUF file ``source`` to the native float32 checkpoint ``target``; returns ``target``.

    The vocabulary becomes ``tokenizer.vocab`` and the chat template ``chat_template.jinja``, where the file has them.
    Raises CheckpointError or TokenizerError naming the file and the key or tensor at fault.
    """
    from tqdm import tqdm

    file, directory = GgufFile(source), Path(target)
    try:
        config = parse_gguf_config(file)
        total = len(expected_tensors(config))
        tensors = tqdm(gguf_tensors(file, config), "converting", total, unit="tensor", disable=not progress)
        save_checkpoint(directory, config, tensors, files=_side_files(file))
    finally:
        file.close()
    return directory


def parse_gguf_config(file: GgufFile) -> ModelConfig:
    """The metadata as a ModelConfig (RoPE pairing ``half``: gguf_tensors restores that order)."""
    architecture = file.fields.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file.path}: general.architecture {shown(architecture)} is not supported; 'llama' is")
    prefix = "llama."
    values = {key.removeprefix(prefix): value for key, value in file.fields.items() if key.startswith(prefix)}
    fields = Fields(values, file.path, prefix)
    for key in values:
        if key not in _KNOWN_KEYS:
            raise CheckpointError(f"{file.path}: {one_line(prefix + key)} {shown(values[key])} is not supported")
    if values.get("expert_count"):
        raise CheckpointError(f"{file.path}: {prefix}expert_count {shown(values['expert_count'])} is not supported")
    if values.get("attention.causal") not in (None, True):
        raise CheckpointError(f"{file.path}: {prefix}attention.causal must be true")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    if heads < 1 or ("attention.key_length" not in values and hidden % heads):
        raise CheckpointError(f"{file.path}: {prefix}attention.head_count {heads} does not divide {hidden}")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: {prefix}{key} {shown(values[key])} differs from head_dim {head_dim}")
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if tokens is not None and not isinstance(tokens, list):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens must be a list of strings")
    vocabulary = fields.integer("vocab_size", len(tokens) if tokens else None)
    factors = file.read(ROPE_FACTORS).reshape(-1) if ROPE_FACTORS in file.tensors else None
    layers = [name for name in file.tensors if name.startswith("blk.0.")]
    try:
        return ModelConfig(
            crucible_format=1,
            vocab_size=vocabulary,
            token_count=_token_count(file, tokens, vocabulary) if tokens else vocabulary,
            context_length=fields.integer("context_length"),
            hidden_size=hidden,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=fields.integer("block_count"),
            num_heads=heads,
            num_kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            norm=Norm(type="rmsnorm", placement="pre", bias=False,
                      eps=shortest(fields.number("attention.layer_norm_rms_epsilon"))),
            position=parse_rope(fields, head_dim, factors),
            activation="swiglu",
            # GGUF has no flag for biases: as in llama.cpp, a bias is used when the file has it.
            biases=Biases(qkv="blk.0.attn_q.bias" in layers, attention_output="blk.0.attn_output.bias" in layers,
                          mlp="blk.0.ffn_down.bias" in layers),
            tied_embeddings="output.weight" not in file.tensors,
            bos_token_id=_token_id(file, "bos"),
            eos_token_ids=_eos_ids(file),
        )
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(file.path)) else f"{file.path}: {text}") from None


def shortest(value: float) -> float:
    """The shortest decimal that is this float32: GGUF's 9.99999974e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _token_count(file: GgufFile, tokens: list[Any], vocabulary: int) -> int:
    """1 + the highest id that is a token: entries of type UNUSED pad the table."""
    types = file.fields.get("tokenizer.ggml.token_type")
    count = len(tokens)
    if isinstance(types, list) and len(types) == count:
        while count > 1 and types[count - 1] == UNUSED:
            count -= 1
    return min(count, vocabulary)


def _token_id(file: GgufFile, name: str) -> int | None:
    """``tokenizer.ggml.NAME_token_id``; CheckpointError when the file has a token table and no such token in it."""
    fields = Fields(file.fields, file.path)
    key = f"tokenizer.ggml.{name}_token_id"
    token = fields.optional_integer(key)
    tokens, types = (file.fields.get(f"tokenizer.ggml.{part}") for part in ("tokens", "token_type"))
    if token is None or not isinstance(tokens, list):
        return token
    if not 0 <= token < len(tokens) or (isinstance(types, list) and types[token : token + 1] == [UNUSED]):
        raise CheckpointError(f"{file.path}: {key} is {token}, which is none of the {len(tokens)} tokens")
    return token


def _eos_ids(file: GgufFile) -> list[int]:
    """End of sequence, and end of turn or message where a chat model has its own."""
    ids = (_token_id(file, name) for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in ids if token is not None))


def gguf_tensors(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor under its Hugging Face name, float32, q and k rows un-permuted. Raises CheckpointError."""
    shapes = expected_tensors(config)
    sources = {_hf_name(name): name for name in file.tensors if name != ROPE_FACTORS}
    for name, source in sources.items():
        if name not in shapes:
            fault = f"is unexpected in a Llama of {config.num_layers} layers"
            raise CheckpointError(f"{file.path}: tensor {shown(source)} {fault}")
        if file.tensors[source].shape != shapes[name]:
            have, wanted = list(file.tensors[source].shape), list(shapes[name])
            raise CheckpointError(f"{file.path}: tensor {shown(source)} has shape {have}, metadata ask for {wanted}")
    for name in shapes:
        if name not in sources:
            raise CheckpointError(f"{file.path}: tensor {shown(_gguf_name(name))} is missing")
    for name in shapes:
        values = file.read(sources[name])
        if not np.isfinite(values).all():
            place = int(np.argmin(np.isfinite(values)))
            raise CheckpointError(
                f"{file.path}: tensor {shown(sources[name])} holds {values.flat[place]} at element {place}"
            )
        if ".q_proj." in name:
            values = unpermute(values, config.num_heads)
        elif ".k_proj." in name:
            values = unpermute(values, config.num_kv_heads)
        yield name, values


def unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows (or bias elements) of q or k, in each head from the order 0, d/2, 1, d/2 + 1, … back to 0, 1, 2, …"""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _hf_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    return _NAMES.get(name, name)


def _gguf_name(name: str) -> str:
    for gguf, hf in _NAMES.items():
        if name == hf:
            return gguf
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{next(key for key, value in _LAYER_NAMES.items() if value == module)}.{kind}"


def _side_files(file: GgufFile) -> dict[str, bytes]:
    """The vocabulary, the chat template and the texts of bos and eos that a template may use."""
    files: dict[str, bytes] = {}
    template = file.fields.get("tokenizer.chat_template")
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode()
    elif template is not None:
        raise CheckpointError(f"{file.path}: tokenizer.chat_template must be text, got {shown(template)}")
    elif named := [one_line(name) for name in file.fields if name.startswith("tokenizer.chat_template.")]:
        fault = f"tokenizer.chat_template is missing beside {', '.join(named)}; write one of them as the default"
        raise CheckpointError(f"{file.path}: {fault} with gguf-new-metadata --chat-template")
    if tokens is None:
        return files
    model = file.fields.get("tokenizer.ggml.model")
    if model != "gpt2":
        fault = f"tokenizer.ggml.model {shown(model)} is not supported; byte-level BPE 'gpt2' is"
        raise CheckpointError(f"{file.path}: {fault}")
    files["tokenizer.vocab"] = _vocabulary(file)
    names = {f"{name}_token": tokens[token] for name in ("bos", "eos") if (token := _token_id(file, name)) is not None}
    files["tokenizer_config.json"] = json.dumps(names, indent=2).encode() + b"\n"
    return files


def _vocabulary(file: GgufFile) -> bytes:
    from crucible.vocabulary import Vocabulary

    tokens, types, merges = (_list(file, name) for name in ("tokens", "token_type", "merges"))
    pre = file.fields.get("tokenizer.ggml.pre", "default")
    try:
        return Vocabulary.from_gguf_fields(tokens, types, merges, pre, _prefix_ids(file, pre)).to_bytes()
    except TokenizerError as error:
        raise TokenizerError(f"{file.path}: {error}") from None


def _prefix_ids(file: GgufFile, pre: Any) -> list[int]:
    """The bos that goes before raw text; where the file does not say, llama.cpp adds it for Llama 3 only."""
    fields = Fields(file.fields, file.path)
    if fields.boolean("tokenizer.ggml.add_eos_token", False):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.add_eos_token true is not supported")
    if not fields.boolean("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        return []
    bos = _token_id(file, "bos")
    if bos is None:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.bos_token_id is missing, which goes before every text")
    return [bos]


def _list(file: GgufFile, name: str) -> list[Any]:
    value = file.fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} is missing")
    return value
