"""Export to GGUF, the file that llama.cpp loads (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

ggml rotates neighbouring pairs, the model halves of a head: rows of q and k are permuted, so that both give the same
(LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py). crucible.importers.gguf is the reading side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crucible.checkpoint import expected_tensors
from crucible.config.model import ModelConfig
from crucible.foreign_vocabulary import CONTROL, GGUF_PATTERNS, NORMAL, UNUSED, USER_DEFINED
from crucible.vocabulary import Vocabulary
from crucible_train.errors import TrainingError
from crucible_train.export_source import ExportSource, open_source
from crucible_train.export_target import export_file
from crucible_train.export_tokenizer import merges, spelled, unreachable
from crucible_train.plain_llama import require_plain_llama

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

OUTTYPES = ("f32", "f16", "q8_0")

_MODULES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def export_gguf(source: str | Path, target: str | Path, *, outtype: str = "f32", which: str | None = None) -> Path:
    """Writes the GGUF file ``target``, in place of an older one; returns ``target``.

    source, which: as ``export_native``; the model must have a vocabulary. outtype: f32, f16 or q8_0 for the matrices
    (f16 where a row is no multiple of q8_0's 32); vectors are float32. Raises CrucibleError, one line.
    """
    if outtype not in OUTTYPES:
        raise TrainingError(f"outtype must be one of {', '.join(OUTTYPES)}, got {outtype!r}")
    target = Path(target)
    with open_source(source, which) as opened:
        require_plain_llama(opened.config, "GGUF")
        tokens = token_fields(opened.needed_vocabulary(), opened.config)
        with export_file(target) as partial:
            write_gguf(partial, opened, outtype, tokens, name=target.stem)
    return target


def write_gguf(path: Path, opened: ExportSource, outtype: str, tokens: Mapping[str, Any], name: str) -> None:
    """The file itself, a tensor in memory at a time."""
    from gguf import GGML_QUANT_SIZES, GGUFWriter

    writer = GGUFWriter(path, "llama")
    try:
        _add_model(writer, opened.config, outtype, name)
        _add_tokenizer(writer, tokens)
        if opened.chat_template is not None:
            writer.add_chat_template(opened.chat_template)
        kinds = {}
        for tensor, shape in expected_tensors(opened.config).items():
            kinds[tensor] = kind = _kind(shape, outtype)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            size = math.prod(shape) // block * block_bytes
            writer.add_tensor_info(gguf_name(tensor), shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, kind in kinds.items():
            values = gguf_rows(tensor, opened.checkpoint.read(tensor), opened.config)
            writer.write_tensor_data(_converted(tensor, values, kind))
            opened.checkpoint.release(tensor)
    finally:
        writer.close()


def gguf_name(name: str) -> str:
    """llama.cpp's name of the tensor that Hugging Face calls ``name``."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    return f"blk.{layer[1]}.{_MODULES[layer[2]]}.{layer[3]}" if layer else _NAMES[name]


def gguf_rows(name: str, values: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    """``values`` in the order that ggml wants: q and k permuted, all else as it is."""
    if ".q_proj." in name:
        return permute(values, config.num_heads)
    return permute(values, config.num_kv_heads) if ".k_proj." in name else values


def permute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows (or bias elements) in each head from the order 0, 1, 2, … to 0, d/2, 1, d/2 + 1, …"""
    half = values.shape[0] // heads // 2
    return np.ascontiguousarray(values.reshape(heads, 2, half, -1).swapaxes(1, 2)).reshape(values.shape)


def token_fields(vocabulary: Vocabulary, config: ModelConfig) -> dict[str, Any]:
    """``tokenizer.ggml.*`` by short name: a token a row of the embedding, those without meaning typed UNUSED.

    Raises TrainingError for a vocabulary that llama.cpp would read otherwise than we do.
    """
    pre = next((name for name, pattern in GGUF_PATTERNS.items() if pattern == vocabulary.pattern), None)
    if pre is None:
        raise TrainingError(f"the pre-tokenizer {vocabulary.pattern!r} has no name in GGUF")
    pairs = merges(vocabulary)
    if not pairs:
        raise TrainingError("a vocabulary without merges cannot be said in GGUF: llama.cpp refuses it")
    _check_whole_pieces(vocabulary, pairs)
    tokens: list[str] = []
    types: list[int] = []
    for number, token in enumerate(vocabulary.tokens):
        if number in vocabulary.special or number in vocabulary.added:
            tokens.append(token.decode())
            types.append(CONTROL if number in vocabulary.special else USER_DEFINED)
        else:
            tokens.append(spelled(token))
            types.append(NORMAL if token else UNUSED)
    tokens += [""] * (config.vocab_size - len(tokens))
    types += [UNUSED] * (config.vocab_size - len(types))
    _name_unused(tokens)
    bos, prefix = config.bos_token_id, vocabulary.prefix_ids
    if prefix and (len(prefix) > 1 or bos not in (None, prefix[0])):
        raise TrainingError(f"token ids {list(prefix)} go before every text; GGUF has room for bos only ({bos})")
    return {
        "pre": pre, "tokens": tokens, "token_type": types,
        "merges": [f"{spelled(left)} {spelled(right)}" for left, right in pairs],
        "bos": prefix[0] if prefix else bos, "add_bos": bool(prefix), "eos": config.eos_token_ids,
    }  # fmt: skip


def _check_whole_pieces(vocabulary: Vocabulary, pairs: list[tuple[bytes, bytes]]) -> None:
    """llama.cpp takes a piece that is a token whole for llama-bpe only (GGUF has no field for it)."""
    if vocabulary.pattern == "llama3":
        if not vocabulary.whole_pieces:
            raise TrainingError("a llama3 vocabulary without whole pieces cannot be said in GGUF")
    elif vocabulary.whole_pieces and (vocabulary.merges is not None or (count := unreachable(vocabulary, pairs))):
        what = "its own merges" if vocabulary.merges is not None else f"{count} tokens that no merge makes"
        raise TrainingError(f"a {vocabulary.pattern} vocabulary with whole pieces and {what} cannot be said in GGUF")


def _name_unused(tokens: list[str]) -> None:
    """Fills empty entries with names that no token has: llama.cpp wants every name once."""
    taken = set(tokens)
    for number, text in enumerate(tokens):
        if not text:
            name = f"[PAD{number}]"
            while name in taken:
                name = f"[{name}]"
            tokens[number] = name
            taken.add(name)


def _add_model(writer: GGUFWriter, config: ModelConfig, outtype: str, name: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    rope = require_plain_llama(config, "GGUF")
    file_types = {
        "f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16, "q8_0": LlamaFileType.MOSTLY_Q8_0
    }  # fmt: skip
    writer.add_name(name)
    writer.add_file_type(file_types[outtype])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope.theta)


def _add_tokenizer(writer: GGUFWriter, fields: Mapping[str, Any]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(fields["tokens"])
    writer.add_token_types(fields["token_type"])
    writer.add_token_merges(fields["merges"])
    writer.add_add_bos_token(fields["add_bos"])
    if fields["bos"] is not None:
        writer.add_bos_token_id(fields["bos"])
    ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    if len(fields["eos"]) > len(ends):
        raise TrainingError(f"GGUF has room for {len(ends)} ids that end a text; the model has {fields['eos']}")
    for add, number in zip(ends, fields["eos"], strict=False):
        add(number)


def _kind(shape: tuple[int, ...], outtype: str) -> GGMLQuantizationType:
    from gguf import GGML_QUANT_SIZES
    from gguf import GGMLQuantizationType as Kind

    if len(shape) == 1 or outtype == "f32":
        return Kind.F32
    return Kind.Q8_0 if outtype == "q8_0" and shape[-1] % GGML_QUANT_SIZES[Kind.Q8_0][0] == 0 else Kind.F16


def _converted(name: str, values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[Any]:
    from gguf import quantize

    with np.errstate(over="ignore"):
        stored: NDArray[Any] = quantize(values, kind)
    if kind.name == "F16" and np.isinf(stored).any():
        raise TrainingError(f"tensor {name!r} holds {np.abs(values).max():g}, too large for f16; use f32")
    return stored
