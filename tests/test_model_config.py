"""The native config.json: every field named, nothing guessed, one line for every fault."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from crucible.config.model import parse_model_config, serialise_model_config
from crucible.errors import CheckpointError
from crucible.json_file import parse_json
from tests.any_json import mutants, refusals
from tests.checkpoints import (
    Alibi,
    Biases,
    Learned,
    LinearScaling,
    Llama3Scaling,
    NoPosition,
    Norm,
    Rope,
    YarnScaling,
    tiny_config,
)

LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=64)
YARN = YarnScaling(factor=4.0, original_context_length=64, beta_fast=32.0, beta_slow=1.0, attention_factor=1.1)


def valid() -> dict[str, Any]:
    return json.loads(serialise_model_config(tiny_config()))


def changed(path: str, value: Any) -> bytes:
    """The valid config with the field at ``path`` (dots) replaced; ``...`` removes it."""
    values = valid()
    *parents, last = path.split(".")
    place = values
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(values).encode()


def message(data: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(data, "m/config.json")
    text = str(caught.value)
    assert text.startswith("m/config.json: ")
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": Alibi()},
        {"position": Learned()},
        {"position": NoPosition()},
        {"position": Rope(theta=5e5, pairing="interleaved", scaling=LLAMA3)},
        {"position": Rope(theta=1e4, pairing="half", scaling=YARN)},
        {"position": Rope(theta=1e4, pairing="half", scaling=LinearScaling(factor=2.0))},
        {"norm": Norm(type="layernorm", placement="post", eps=1e-6, bias=True), "activation": "gelu"},
        {"biases": Biases(qkv=True, attention_output=False, mlp=True), "bos_token_id": None, "eos_token_ids": []},
    ],
)
def test_every_axis_survives_the_file(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    assert parse_model_config(serialise_model_config(config), "config.json") == config


@pytest.mark.parametrize("path", [
    "vocab_size", "token_count", "context_length", "num_kv_heads", "head_dim", "norm", "norm.eps", "norm.placement",
    "position", "position.theta", "position.pairing", "position.scaling", "activation", "biases.qkv", "tied_embeddings",
    "bos_token_id", "eos_token_ids",
])  # fmt: skip
def test_an_absent_field_is_named(path: str) -> None:
    assert f"{path}: missing" in message(changed(path, ...))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("vocab_size", "96", "vocab_size: expected int, got str"),
        ("vocab_size", True, "vocab_size: expected int, got bool"),
        ("vocab_size", 96.5, "vocab_size: expected int, got float"),
        ("vocab_size", None, "vocab_size: expected int, got null"),
        ("norm.eps", "x", "norm.eps: expected float, got str"),
        ("norm.eps", 0, "norm.eps must lie between 0 and 1 (in float32), got 0"),
        ("norm.type", "batchnorm", "norm.type: invalid enum value 'batchnorm'"),
        ("norm.bias", True, "norm.bias needs norm.type layernorm"),
        ("position.type", "rotary", "position.type: invalid value 'rotary'"),
        ("norm.eps", 1e-50, "norm.eps must lie between 0 and 1 (in float32), got 1e-50"),
        ("position.theta", 1, "position.theta must be a number above 1"),
        ("position.theta", 1e300, "position.theta must be a number above 1 that float32 holds, got 1e+300"),
        ("activation", "gelu\ud800", "the string 'gelu\\ud800' holds half of a surrogate pair"),
        ("sur\ud800prise", 1, "the string 'sur\\ud800prise' holds half of a surrogate pair"),
        ("position.wavelength", 3, "position.wavelength: unknown field"),
        ("position.scaling", {"type": "linear", "factor": 0.5}, "position.scaling.factor must be at least 1"),
        ("position.scaling", {"type": "dynamic", "factor": 2}, "position.scaling.type: invalid value 'dynamic'"),
        ("surprise", 1, "surprise: unknown field"),
        ("sur\nprise", 1, "sur\\nprise: unknown field"),
        ("activation", "gelu\n", "activation: invalid enum value 'gelu\\n'"),
        ("crucible_format", 2, "crucible_format must be 1, got 2"),
        ("crucible_format", True, "crucible_format must be 1, got True"),
        ("num_layers", 0, "num_layers must lie in 1 … 4096, got 0"),
        ("num_layers", 10**9, "num_layers must lie in 1 … 4096"),
        ("num_kv_heads", 3, "num_heads (4) must be a multiple of num_kv_heads (3)"),
        ("head_dim", 7, "head_dim must be even"),
        ("hidden_size", 10**30, "hidden_size"),
        ("token_count", 97, "token_count (97) is above vocab_size (96)"),
        ("eos_token_ids", [96], "eos_token_ids: token id 96 lies outside"),
        ("eos_token_ids", 2, "eos_token_ids: expected array, got int"),
        ("bos_token_id", -1, "bos_token_id: token id -1 lies outside"),
    ],
)
def test_a_wrong_value_is_named(path: str, value: Any, words: str) -> None:
    assert words in message(changed(path, value))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1, 2]", "a JSON object was expected"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b"{}", "crucible_format must be 1, got None"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"crucible_format": 1, "crucible_format": 1}', "duplicate key 'crucible_format'"),
        (b'{"crucible_format": NaN}', "NaN is not a JSON number"),
        (b'{"crucible_format": 1e999}', "'1e999' is out of range"),
    ],
)
def test_what_is_not_a_config_is_refused(data: bytes, words: str) -> None:
    assert words in message(data)


def test_any_value_anywhere_is_refused_in_one_line() -> None:
    scaled = tiny_config(position=Rope(theta=1e4, pairing="half", scaling=YARN))
    messages = refusals(
        lambda values: parse_model_config(json.dumps(values).encode(), "m/config.json"),
        mutants(json.loads(serialise_model_config(scaled))),
        CheckpointError,
    )
    assert len(messages) > 500
    assert not [message for message in messages if "\n" in message]


def test_a_whole_surrogate_pair_is_text() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}', "x") == {"a": "😀", "b": "\\ud800"}


def test_scalings_must_make_sense() -> None:
    scaling = json.loads(json.dumps({"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1,
                                     "original_context_length": 64}))  # fmt: skip
    assert "low_freq_factor must be below high_freq_factor" in message(changed("position.scaling", scaling))
    ordered = copy.copy(scaling) | {"low_freq_factor": 1, "high_freq_factor": 4, "original_context_length": 0}
    assert "original_context_length must be a positive number" in message(changed("position.scaling", ordered))
