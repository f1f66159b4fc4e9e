"""GGUF: the container reader against PyPI gguf and against damage; the importer against a Hugging Face directory."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from crucible.checkpoint import open_checkpoint
from crucible.config.model import ModelConfig
from crucible.errors import CheckpointError, CrucibleError, TokenizerError
from crucible.gguf_file import GgufFile
from crucible.importers import import_model
from crucible.importers.gguf import gguf_tensors, parse_gguf_config
from crucible.importers.gguf_rope import llama3_divisors
from crucible.tokenizer import Tokenizer
from tests.checkpoints import (
    Biases,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    make_hf_directory,
    random_tensors,
    tiny_config,
)

PARTS = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip
WORDS = [*map(chr, range(33, 126)), "ab", "<|im_start|>", "<|im_end|>"]


def permute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to q and k, so that ggml's interleaved RoPE equals Hugging Face's."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, NDArray[np.float32]] | None = None,
    *,
    quant: gguf.GGMLQuantizationType | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    architecture: str = "llama",
) -> Path:
    """``config`` as llama.cpp's converter writes it. ``metadata`` adds or replaces keys; ``...`` leaves one out."""
    assert isinstance(config.position, Rope)
    tensors = random_tensors(config) if tensors is None else tensors
    fields: dict[str, Any] = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.context_length,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.norm.eps,
        "llama.rope.freq_base": config.position.theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0],
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
    for name, values in tensors.items():
        if ".q_proj." in name:
            values = permute(values, config.num_heads)
        elif ".k_proj." in name:
            values = permute(values, config.num_kv_heads)
        if quant is not None and values.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, quant), raw_dtype=quant)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(path: Path) -> ModelConfig:
    return parse_gguf_config(GgufFile(path))


def refusal(path: Path, target: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        import_model(path, target)
    message = str(caught.value)
    assert str(path) in message or str(target) in message
    assert "\n" not in message
    assert not target.exists()
    return message


@pytest.mark.parametrize("quant", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1,
                                   gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16])  # fmt: skip
def test_reads_what_pypi_gguf_reads(tmp_path: Path, quant: gguf.GGMLQuantizationType | None) -> None:
    config = tiny_config(intermediate_size=64)
    path = write_gguf(tmp_path / "m.gguf", config, quant=quant, metadata={"tokenizer.ggml.tokens": WORDS,
                      "tokenizer.ggml.scores": [0.5, -1.0], "note": "é", "flag": True})  # fmt: skip
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert ours.fields == {
        name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")
    }
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(ours.tensors[tensor.name].shape)
        np.testing.assert_array_equal(ours.read(tensor.name), expected)


def test_unpermuted_q_and_k_score_alike_under_half_split_rope(tmp_path: Path) -> None:
    """GGUF's own rows under interleaved RoPE give the attention scores of the imported rows under half-split RoPE."""
    config = tiny_config()
    file = GgufFile(write_gguf(tmp_path / "m.gguf", config))
    imported = dict(gguf_tensors(file, config))
    x = np.random.default_rng(1).standard_normal((2, config.hidden_size))
    half = config.head_dim // 2
    angles = np.array([3.0, 11.0])[:, None] * 10000.0 ** (-np.arange(half) / half)
    turn = np.exp(1j * angles)

    def rotated(rows: NDArray[np.float32], heads: int, interleaved: bool) -> NDArray[np.complex128]:
        vectors = (x @ rows.T.astype(np.float64)).reshape(2, heads, config.head_dim)
        real, imaginary = (
            (vectors[..., 0::2], vectors[..., 1::2]) if interleaved else (vectors[..., :half], vectors[..., half:])
        )
        return (real + 1j * imaginary) * turn[:, None]

    def scores(q: NDArray[np.float32], k: NDArray[np.float32], interleaved: bool) -> NDArray[np.float64]:
        queries, keys = rotated(q, 4, interleaved)[1], rotated(k, 2, interleaved)[0].repeat(2, axis=0)
        return (queries * keys.conj()).sum(-1).real

    prefix = "model.layers.1.self_attn."
    ours = scores(imported[prefix + "q_proj.weight"], imported[prefix + "k_proj.weight"], interleaved=False)
    stored = scores(file.read("blk.1.attn_q.weight"), file.read("blk.1.attn_k.weight"), interleaved=True)
    np.testing.assert_allclose(ours, stored, rtol=1e-10)


@pytest.mark.parametrize("quant", [None, gguf.GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": False, "num_kv_heads": 4, "position": Rope(theta=5e5, pairing="half", scaling=None)},
        {"head_dim": 16, "biases": Biases(qkv=True, attention_output=True, mlp=False)},
    ],
)
def test_import_equals_the_hugging_face_directory(
    tmp_path: Path, changes: dict[str, Any], quant: gguf.GGMLQuantizationType | None
) -> None:
    config = tiny_config(intermediate_size=64, **changes)
    wide = {"llama.attention.key_length": config.head_dim, "llama.attention.value_length": config.head_dim}
    path = write_gguf(tmp_path / "m.gguf", config, quant=quant, metadata=wide)
    file = GgufFile(path)
    dequantised = dict(gguf_tensors(file, parse_gguf_config(file)))
    directory = make_hf_directory(tmp_path / "hf", config=config, tensors=dequantised, hf_changes={"mlp_bias": False})
    with open_checkpoint(import_model(path, tmp_path / "m")) as native, open_checkpoint(directory) as hf:
        assert native.config == hf.config == config
        assert native.dtype == "float32"
        for name, original in random_tensors(config).items():
            np.testing.assert_array_equal(native.read(name), hf.read(name))
            if quant is None:
                np.testing.assert_array_equal(native.read(name), original)
            else:
                assert np.abs(native.read(name) - original).max() <= np.abs(original).max() / 127


def test_vocabulary_and_template_are_carried_over(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": WORDS,
                "tokenizer.ggml.token_type": [1] * 94 + [3, 3], "tokenizer.ggml.merges": ["a b"],
                "tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.bos_token_id": 94,
                "tokenizer.ggml.eos_token_id": 95, "tokenizer.ggml.eot_token_id": 1}  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", tiny_config(), metadata=metadata)
    target = import_model(path, tmp_path / "m")
    tokenizer = Tokenizer.for_checkpoint(target)
    assert tokenizer.encode("abb") == [93, WORDS.index("b")]
    assert tokenizer.special_tokens == {"<|im_start|>": 94, "<|im_end|>": 95}
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((target / "tokenizer_config.json").read_text()) == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.config.eos_token_ids == [95, 1]


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LinearScaling(factor=4.0)),
        ({"llama.rope.scale_linear": 2.0}, LinearScaling(factor=2.0)),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
             "llama.rope.scaling.original_context_length": 64},
            YarnScaling(factor=4.0, original_context_length=64, beta_fast=32.0, beta_slow=1.0,
                        attention_factor=0.1 * np.log(4.0) + 1.0),
        ),
    ],
)  # fmt: skip
def test_rope_scaling_metadata(tmp_path: Path, metadata: dict[str, Any], scaling: Any) -> None:
    position = config_of(write_gguf(tmp_path / "m.gguf", tiny_config(), metadata=metadata)).position
    assert position == Rope(theta=10000.0, pairing="half", scaling=scaling)


def test_llama3_scaling_is_recognised_from_its_divisors(tmp_path: Path) -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192)
    config = tiny_config(head_dim=64, position=Rope(theta=500000.0, pairing="half", scaling=scaling))
    divisors = llama3_divisors(500000.0, 64, scaling).astype(np.float32)
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0
    wide = {"llama.attention.key_length": 64}
    path = write_gguf(tmp_path / "m.gguf", config, extra={"rope_freqs.weight": divisors}, metadata=wide)
    assert config_of(path) == config
    plain = write_gguf(tmp_path / "p.gguf", config, extra={"rope_freqs.weight": np.ones(32, np.float32)}, metadata=wide)
    assert config_of(plain).position == Rope(theta=500000.0, pairing="half", scaling=None)
    divisors[12] *= 1.01
    path = write_gguf(tmp_path / "n.gguf", config, extra={"rope_freqs.weight": divisors}, metadata=wide)
    assert "rope_freqs.weight is not Llama 3's scaling" in refusal(path, tmp_path / "n")


def test_the_divisors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    theirs = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    scaling = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=8192)
    ours = 500000.0 ** (-np.arange(0, 64, 2) / 64) / llama3_divisors(500000.0, 64, scaling)
    np.testing.assert_allclose(ours, frequencies.double().numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": ...}, "llama.block_count is missing"),
        ({"llama.context_length": ...}, "llama.context_length is missing"),
        ({"llama.embedding_length": "x"}, "llama.embedding_length must be an integer, got 'x'"),
        ({"llama.feed_forward_length": ...}, "llama.feed_forward_length is missing"),
        ({"llama.attention.head_count": ...}, "llama.attention.head_count is missing"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count 0"),
        ({"llama.attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv must be an integer, got [2, 2]"),
        ({"llama.attention.layer_norm_rms_epsilon": ...}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.vocab_size": ...}, "llama.vocab_size is missing"),
        ({"llama.vocab_size": 97}, "'token_embd.weight' has shape [96, 32], metadata ask for [97, 32]"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count 4 differs from head_dim 8"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length 4 differs"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale 2.0 is not supported"),
        ({"llama.attention.causal": False}, "llama.attention.causal must be true"),
        ({"llama.block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"llama.block_count": 1}, "tensor 'blk.1.attn_norm.weight' is unexpected in a Llama of 1 layers"),
        ({"tokenizer.ggml.eos_token_id": 96}, "eos_token_ids: token id 96 lies outside"),
        ({"tokenizer.ggml.tokens": WORDS, "tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model 'llama'"),
        ({"tokenizer.ggml.tokens": WORDS, "tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.token_type is missing"),
    ],
)
def test_refused_by_name(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_config(), metadata=metadata)
    assert words in refusal(path, tmp_path / "target")


def test_other_architectures_and_wrong_tensors_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_gguf(tmp_path / "q.gguf", config, architecture="qwen2")
    assert "general.architecture 'qwen2' is not supported" in refusal(path, tmp_path / "t")
    tensors = random_tensors(config)
    del tensors["model.norm.weight"]
    path = write_gguf(tmp_path / "a.gguf", config, tensors)
    assert "tensor 'output_norm.weight' is missing" in refusal(path, tmp_path / "t")
    path = write_gguf(tmp_path / "b.gguf", config, extra={"blk.0.attn_q_norm.weight": np.ones(8, np.float32)})
    assert "tensor 'blk.0.attn_q_norm.weight' is unexpected" in refusal(path, tmp_path / "t")
    tensors = random_tensors(config)
    tensors["model.norm.weight"][7] = np.nan
    path = write_gguf(tmp_path / "c.gguf", config, tensors)
    assert "tensor 'output_norm.weight' holds nan at element 7" in refusal(path, tmp_path / "t")


def header(version: int = 3, tensors: int = 0, fields: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def field(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be opened"),
        (b"GGML....", "not a GGUF file (it starts with b'GGML')"),
        (b"GGUF", "truncated: the GGUF header does not end"),
        (header(version=1), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "(a big-endian file) is not supported"),
        (header(tensors=2**60), "1152921504606846976 tensors, but only 0 bytes are left"),
        (header(fields=2**60), "1152921504606846976 metadata fields"),
        (header(fields=1, rest=struct.pack("<Q", 2**63) + bytes(64)), "9223372036854775808 bytes in a string"),
        (header(fields=1, rest=field("k", 99, bytes(16))), "metadata field 'k' has unknown type 99"),
        (header(fields=1, rest=field("k", 9, struct.pack("<IQ", 4, 2**61) + bytes(8))), "values in 'k'"),
        (header(fields=1, rest=field("k", 9, struct.pack("<IQ", 8, 2**40) + bytes(8))), "values in 'k'"),
        (header(fields=1, rest=field("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "metadata string is not UTF-8"),
        (header(fields=2, rest=2 * field("k", 4, bytes(4))), "duplicate metadata field 'k'"),
        (header(fields=1, rest=field("general.alignment", 4, struct.pack("<I", 7))), "general.alignment must be"),
        (header(tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 0, 0)), "truncated: tensor 't' ends at"),
        (header(tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 77, 0)), "tensor 't' has type 77"),
        (header(tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 2, 0)), "Q4_0 rows hold multiples of 32"),
        (header(tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 0, 4)), "is not aligned to 32"),
        (header(tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 9, 8, 0, 0)), "has 9 dimensions"),
        (header(tensors=1, rest=struct.pack("<Q1sIQIQ", 1, b"t", 1, 0, 0, 0)), "tensor 't' is empty"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert words in refusal(path, tmp_path / "target")


def with_words(path: Path, **changes: Any) -> Path:
    """A GGUF with a token table of 94 ordinary and 2 special tokens; ``changes`` replace tokenizer.ggml keys."""
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": WORDS, "token_type": [1] * 94 + [3, 3], "merges": ["a b"],
              "bos_token_id": 94, "eos_token_id": 95, **changes}  # fmt: skip
    return write_gguf(path, tiny_config(), metadata={f"tokenizer.ggml.{name}": fields[name] for name in fields})


@pytest.mark.parametrize("name", ["bos", "eos", "eot"])
def test_a_special_id_without_a_token_is_refused(tmp_path: Path, name: str) -> None:
    """The matrix may have more rows than the token table."""
    short = {"tokens": WORDS[:94], "token_type": [1] * 94, "bos_token_id": 0, "eos_token_id": 1}
    path = with_words(tmp_path / "m.gguf", **{**short, f"{name}_token_id": 94})
    assert f"tokenizer.ggml.{name}_token_id is 94, which is none of the 94 tokens" in refusal(path, tmp_path / "t")
    unused = {**short, "tokens": WORDS, "token_type": [1] * 94 + [5, 3]}
    path = with_words(tmp_path / "n.gguf", **{**unused, f"{name}_token_id": 94})
    assert f"tokenizer.ggml.{name}_token_id is 94, which is none" in refusal(path, tmp_path / "t")


def test_unused_ids_at_the_end_are_not_tokens(tmp_path: Path) -> None:
    path = with_words(tmp_path / "m.gguf", token_type=[1] * 90 + [5, 1, 5, 1, 5, 5], eos_token_id=1, bos_token_id=0)
    target = import_model(path, tmp_path / "m")
    with open_checkpoint(target) as checkpoint:
        assert (checkpoint.config.token_count, checkpoint.config.vocab_size) == (94, 96)
    tokenizer = Tokenizer.for_checkpoint(target)
    assert tokenizer.token_count == 94
    with pytest.raises(TokenizerError, match="token id 92 has no token"):
        tokenizer.token_bytes(92)


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [
        ({}, ()),
        ({"pre": "llama-bpe"}, (94,)),
        ({"pre": "llama-bpe", "add_bos_token": False}, ()),
        ({"add_bos_token": True}, (94,)),
    ],
)
def test_bos_goes_before_raw_text_where_the_file_says_so(
    tmp_path: Path, changes: dict[str, Any], prefix: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.for_checkpoint(import_model(with_words(tmp_path / "m.gguf", **changes), tmp_path / "m"))
    assert tokenizer.prefix_ids == prefix
    assert tokenizer.encode_prompt("ab") == [*prefix, 93]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": ["gpt-2"]}, "tokenizer.ggml.pre is ['gpt-2']"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token true is not supported"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token must be true or false"),
        ({"add_bos_token": True, "bos_token_id": ...}, "tokenizer.ggml.bos_token_id is missing"),
    ],
)
def test_tokenizer_fields_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = with_words(tmp_path / "m.gguf", **changes)
    with pytest.raises((CheckpointError, TokenizerError)) as caught:
        import_model(path, tmp_path / "t")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template must be text, got 5"),
        ({"tokenizer.chat_template.rag": "{{ 1 }}"}, "is missing beside tokenizer.chat_template.rag; write one"),
    ],
)
def test_a_template_is_not_lost(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    assert words in refusal(write_gguf(tmp_path / "m.gguf", tiny_config(), metadata=metadata), tmp_path / "t")


@pytest.mark.parametrize("name", ["rope_freqs.weight", "output_norm.weight"])
def test_a_type_that_cannot_be_dequantised_is_refused(tmp_path: Path, name: str) -> None:
    """Whichever tensor it is: the divisors are read before the others."""
    path = write_gguf(tmp_path / "m.gguf", tiny_config(), extra={"rope_freqs.weight": np.ones(4, np.float32)})
    data = path.read_bytes()
    row = name.encode() + struct.pack("<IQI", 1, 4 if name.startswith("rope") else 32, 0)
    at = data.index(row) + len(row) - 4
    path.write_bytes(data[:at] + struct.pack("<I", gguf.GGMLQuantizationType.I32) + data[at + 4 :])
    assert f"tensor '{name}': I32 cannot be dequantised" in refusal(path, tmp_path / "t")


def test_truncated_and_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_config())
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    assert "truncated: tensor" in refusal(path, tmp_path / "target")
    row = b"blk.0.attn_k.weight" + struct.pack("<IQQI", 2, 32, 16, 0)
    at = data.index(row) + len(row)
    path.write_bytes(data[:at] + bytes(8) + data[at + 8 :])
    assert "overlaps another at offset" in refusal(path, tmp_path / "target")


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 2500), replacement=st.binary(min_size=1, max_size=9))
def test_any_damage_is_refused_in_one_line_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, replacement: bytes
) -> None:
    base = tmp_path_factory.getbasetemp()
    good = base / "good.gguf"
    if not good.exists():
        write_gguf(good, tiny_config())
    data = good.read_bytes()
    damaged = base / "damaged.gguf"
    damaged.write_bytes(data[:position] + replacement + data[position + len(replacement) :])
    try:
        file = GgufFile(damaged)
        for _ in gguf_tensors(file, parse_gguf_config(file)):
            pass
    except CrucibleError as error:
        lines = str(error).splitlines()
        assert len(lines) == 1


@pytest.mark.slow
def test_smollm2_equals_its_hugging_face_directory(tmp_path: Path) -> None:
    from crucible.pull import pull

    with open_checkpoint(pull("smollm2-135m-instruct")) as native:
        tensors = {name: native.read(name) for name in native.names()}
        directory = make_hf_directory(tmp_path / "hf", config=native.config, tensors=tensors)
        with open_checkpoint(directory) as hf:
            assert hf.config == native.config
            for name, values in tensors.items():
                np.testing.assert_array_equal(hf.read(name), values)
