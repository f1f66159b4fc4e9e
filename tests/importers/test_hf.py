"""Hugging Face configs: LlamaConfig's defaults, RoPE's spellings, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible.checkpoint import open_checkpoint
from crucible.config.model import ModelConfig
from crucible.errors import CheckpointError
from crucible.importers import import_model
from crucible.importers.hf import parse_hf_config
from crucible.json_file import parse_json
from crucible.safetensors_file import write_safetensors
from tests.any_json import mutants, refusals
from tests.checkpoints import (
    Biases,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    hf_config,
    make_hf_directory,
    random_tensors,
    tiny_config,
)


def parse(tmp_path: Path, **changes: Any) -> ModelConfig:
    values = {**hf_config(tiny_config()), **changes}
    return parse_hf_config({name: value for name, value in values.items() if value is not ...}, tmp_path)


def refusal(tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse(tmp_path, **changes)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/")
    assert message.count(str(tmp_path)) == 1
    assert "\n" not in message
    return message


def scaling(config: ModelConfig) -> Any:
    assert isinstance(config.position, Rope)
    return config.position.scaling


def test_absent_keys_get_llama_config_defaults(tmp_path: Path) -> None:
    config = parse_hf_config({"model_type": "llama"}, tmp_path)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32000, 4096, 11008)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 32, 128)
    assert (config.context_length, config.norm.eps, config.tied_embeddings) == (2048, 1e-6, False)
    assert config.position == Rope(theta=10000.0, pairing="half", scaling=None)
    assert config.biases == Biases(qkv=False, attention_output=False, mlp=False)
    assert (config.bos_token_id, config.eos_token_ids) == (1, [2])
    assert parse_hf_config({"model_type": "llama", "num_attention_heads": 16}, tmp_path).num_kv_heads == 16


def test_the_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    theirs = json.loads(LlamaConfig().to_json_string(use_diff=False))
    assert parse_hf_config({"model_type": "llama"}, tmp_path) == parse_hf_config(theirs, tmp_path)


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "rope_scaling"])
def test_null_means_absent_where_llama_config_allows_it(tmp_path: Path, name: str) -> None:
    assert parse(tmp_path, **{name: None}) == parse(tmp_path, **{name: ...})


def test_what_the_file_says_is_taken(tmp_path: Path) -> None:
    config = parse(tmp_path, head_dim=16, attention_bias=True, mlp_bias=True, rope_theta=500000, pretraining_tp=2)
    assert config.head_dim == 16
    assert config.biases == Biases(qkv=True, attention_output=True, mlp=True)
    assert config.position == Rope(theta=500000.0, pairing="half", scaling=None)


@pytest.mark.parametrize(
    ("value", "ids"), [(7, [7]), ([7, 9, 7], [7, 9]), ([], []), (None, []), (..., [2])]
)
def test_eos_may_be_an_id_a_list_or_null(tmp_path: Path, value: Any, ids: list[int]) -> None:
    assert parse(tmp_path, eos_token_id=value).eos_token_ids == ids


def test_generation_config_replaces_eos(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert parse(tmp_path).eos_token_ids == [5, 6]
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert parse(tmp_path, eos_token_id=4).eos_token_ids == [4]
    for text, words in (("{", "not valid JSON"), ('{"eos_token_id": "</s>"}', "eos_token_id must be a token id"),
                        ('{"eos_token_id": 96}', "generation_config.json: eos_token_id: token id 96")):  # fmt: skip
        (tmp_path / "generation_config.json").write_text(text)
        assert words in refusal(tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "count"),
    [
        ({"model": {"vocab": {"a": 0, "b": 40}}, "added_tokens": [{"id": 50, "content": "x"}]}, 51),
        ({"model": {"vocab": {"a": 0, "b": 40}}}, 41),
        ({"model": {"vocab": {"a": 200}}}, 96),
        ({"model": {"vocab": [["a", 0.5]]}}, 96),
        ([], 96),
    ],
)
def test_rows_beyond_the_tokenizer_are_padding(tmp_path: Path, tokenizer: Any, count: int) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert parse(tmp_path).token_count == count


class TestRope:
    @pytest.mark.parametrize("value", [None, {}, {"rope_type": "default"}, {"type": "default"}])
    def test_none(self, tmp_path: Path, value: Any) -> None:
        assert scaling(parse(tmp_path, rope_scaling=value)) is None

    @pytest.mark.parametrize("key", ["type", "rope_type"])
    def test_linear(self, tmp_path: Path, key: str) -> None:
        assert scaling(parse(tmp_path, rope_scaling={key: "linear", "factor": 2})) == LinearScaling(factor=2.0)

    def test_llama3(self, tmp_path: Path) -> None:
        value = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16}  # fmt: skip
        expected = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=16)
        assert scaling(parse(tmp_path, rope_scaling=value)) == expected
        del value["low_freq_factor"]
        assert "rope_scaling.low_freq_factor is missing" in refusal(tmp_path, rope_scaling=value)

    def test_rope_parameters_of_transformers_5(self, tmp_path: Path) -> None:
        parameters = {"rope_type": "linear", "type": "linear", "factor": 4.0, "rope_theta": 77.0}
        config = parse(tmp_path, rope_scaling=..., rope_theta=..., rope_parameters=parameters)
        assert config.position == Rope(theta=77.0, pairing="half", scaling=LinearScaling(factor=4.0))
        bare = parse(tmp_path, rope_scaling=..., rope_parameters={"rope_type": "default"}, rope_theta=99.0)
        assert bare.position == Rope(theta=99.0, pairing="half", scaling=None)

    @pytest.mark.parametrize(
        "parameters",
        [
            {"factor": 4.0},
            {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0},
            {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8},
            {"factor": 4.0, "attention_factor": 1.25, "original_max_position_embeddings": 64},
        ],
    )
    def test_yarn_gives_the_attention_factor_of_transformers(self, tmp_path: Path, parameters: dict[str, Any]) -> None:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope = {"rope_type": "yarn", "rope_theta": 10000.0, **parameters}
        sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 256}
        theirs = LlamaConfig(**sizes, rope_parameters=dict(rope))
        _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        ours = scaling(parse(tmp_path, rope_scaling=rope))
        assert isinstance(ours, YarnScaling)
        assert math.isclose(ours.attention_factor, factor, rel_tol=1e-12)
        assert ours.original_context_length == parameters.get("original_max_position_embeddings", 256)
        assert (ours.beta_fast, ours.beta_slow) == (parameters.get("beta_fast", 32.0), parameters.get("beta_slow", 1.0))

    def test_yarn_without_a_factor_takes_the_ratio(self, tmp_path: Path) -> None:
        value = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
        assert scaling(parse(tmp_path, rope_scaling=value)).factor == 4.0

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling: rope_type 'dynamic' is not supported"),
            ({"rope_type": "longrope", "short_factor": [1]}, "rope_scaling: rope_type 'longrope'"),
            ({"rope_type": None}, "rope_scaling: rope_type None"),
            ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "type 'yarn' and rope_type 'linear' disagree"),
            ({"rope_type": "linear"}, "rope_scaling.factor is missing"),
            ({"rope_type": "linear", "factor": "2"}, "rope_scaling.factor must be a finite number, got '2'"),
            ({"rope_type": "linear", "factor": True}, "rope_scaling.factor must be a finite number, got True"),
            ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor must be at least 1"),
            ({"rope_type": "linear", "factor": 2.0, "short_factor": [1]}, "rope_scaling: unknown field 'short_factor'"),
            ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "rope_scaling.truncate false"),
            ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
            ({"rope_type": "default", "rope_theta": "x"}, "rope_scaling.rope_theta must be a finite number"),
            ("linear", "rope_scaling must be an object or null"),
            ([1], "rope_scaling must be an object or null"),
        ],
    )
    def test_refused_by_name(self, tmp_path: Path, value: Any, words: str) -> None:
        assert words in refusal(tmp_path, rope_scaling=value)

    def test_two_different_descriptions_are_refused(self, tmp_path: Path) -> None:
        both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}
        assert "rope_scaling and rope_parameters disagree" in refusal(tmp_path, **both)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": ...}, "neither model_type nor crucible_format"),
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures must be ['LlamaForCausalLM']"),
        ({"vocab_size": "96"}, "vocab_size must be an integer, got '96'"),
        ({"vocab_size": None}, "vocab_size must be an integer, got None"),
        ({"vocab_size": 96.0}, "vocab_size must be an integer, got 96.0"),
        ({"hidden_size": True}, "hidden_size must be an integer, got True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must lie in 1 … 4096, got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"num_attention_heads": 5, "head_dim": None}, "head_dim is missing and hidden_size 32"),
        ({"num_key_value_heads": 3}, "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must lie in"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a finite number, got 'x'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must lie between 0 and 1"),
        ({"rms_norm_eps": 1e-50}, "rms_norm_eps must lie between 0 and 1"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings must be an integer, got 1000"),
        ({"rope_theta": 1e300}, "rope_theta must be a number above 1 that float32 holds, got 1e+300"),
        ({"rope_theta": 0}, "rope_theta must be a number above 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"attention_bias": None}, "attention_bias must be true or false, got None"),
        ({"eos_token_id": "2"}, "eos_token_id must be a token id"),
        ({"eos_token_id": 96}, "eos_token_id: token id 96 lies outside the vocabulary of 96"),
        ({"bos_token_id": [1, 2]}, "bos_token_id must be one id"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 128}, "sliding_window 128 below the context of 256"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"residual_multiplier": 0.2}, "residual_multiplier 0.2"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"pretraining_tp": 0}, "pretraining_tp must be at least 1"),
        ({"model_type": "mistral", "architectures": None}, "sliding_window is missing; a mistral config must state it"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, **changes)


def test_any_value_anywhere_is_refused_in_one_line_or_harmless(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": math.e, "original_max_position_embeddings": 64, "mscale": 1.0,
            "mscale_all_dim": -10.0}  # fmt: skip
    base = {**hf_config(tiny_config()), "sliding_window": 256, "layer_types": ["full_attention"], "rope_scaling": yarn}
    default = {**base, "rope_scaling": {**yarn, "factor": None, "mscale": 0}}
    messages = refusals(
        lambda values: parse_hf_config(parse_json(json.dumps(values).encode(), "config.json"), tmp_path),
        (base, *mutants(base), *mutants(default)),
        CheckpointError,
    )
    assert len(messages) > 500
    assert not [message for message in messages if "\n" in message]


def test_values_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    inert = {"sliding_window": 256, "layer_types": ["full_attention"] * 2, "quantization_config": None,
             "partial_rotary_factor": 1.0, "attention_dropout": 0.1, "use_cache": 0, "pad_token_id": -1}  # fmt: skip
    assert parse(tmp_path, **inert) == parse(tmp_path)
    assert parse(tmp_path, sliding_window=8, use_sliding_window=False) == parse(tmp_path)
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert parse(tmp_path, **mistral) == parse(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_import_keeps_every_bit(tmp_path: Path, dtype: str, shards: int) -> None:
    rope = Rope(theta=5e5, pairing="half", scaling=LinearScaling(factor=2.0))
    source = make_hf_directory(tmp_path / "hf", dtype=dtype, shards=shards, tied_embeddings=False, position=rope)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    target = import_model(source, tmp_path / "native")
    with open_checkpoint(source) as before, open_checkpoint(target) as after:
        assert after.native
        assert after.config == before.config == tiny_config(tied_embeddings=False, position=rope)
        assert after.dtype == dtype
        for name in before.names():
            np.testing.assert_array_equal(after.raw(name), before.raw(name))
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (target / "tokenizer_config.json").read_text() == '{"bos_token": "<s>"}'


@pytest.mark.parametrize(("matrix", "vector"), [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_import_keeps_every_bit_of_mixed_types(tmp_path: Path, matrix: str, vector: str) -> None:
    source = make_hf_directory(tmp_path / "hf")
    tensors = random_tensors(tiny_config())
    shapes = {name: values.shape for name, values in tensors.items()}
    dtypes = {name: matrix if len(shape) == 2 else vector for name, shape in shapes.items()}
    write_safetensors(source / "model.safetensors", shapes, tensors.items(), dtype=dtypes)
    target = import_model(source, tmp_path / "native")
    with open_checkpoint(source) as before, open_checkpoint(target) as after:
        assert after.dtypes() == dtypes
        for name in before.names():
            np.testing.assert_array_equal(after.raw(name), before.raw(name))


def test_import_refuses_what_it_cannot_carry(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such Hugging Face directory or GGUF file"):
        import_model(tmp_path / "absent", tmp_path / "target")
    tensors = random_tensors(tiny_config())
    tensors["model.norm.weight"][3] = np.nan
    source = make_hf_directory(tmp_path / "hf", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' holds nan at index \[3\]"):
        import_model(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    with pytest.raises(CheckpointError, match="already exists"):
        import_model(make_hf_directory(tmp_path / "good"), source)


def test_transformers_reads_the_same_config(tmp_path: Path) -> None:
    """What transformers writes for its own tiny Llama is understood, and means the same."""
    from transformers import LlamaConfig

    theirs = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5,
                         eos_token_id=[2], tie_word_embeddings=True, architectures=["LlamaForCausalLM"])  # fmt: skip
    assert parse_hf_config(json.loads(theirs.to_json_string()), tmp_path) == tiny_config()
