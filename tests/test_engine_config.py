from __future__ import annotations

from typing import Any

import pytest

from crucible.config import EngineConfig
from crucible.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("True", True), (" 0 ", False), ("FALSE", False)]
)
def test_switches_are_read_from_the_environment(text: str, value: bool) -> None:
    config = EngineConfig.from_environment({"CRUCIBLE_PREFIX_CACHE": text, "CRUCIBLE_BATCHED_PREFILL": text})
    assert config.prefix_cache is value
    assert config.batched_prefill is value
    explicit = EngineConfig.from_environment({"CRUCIBLE_PREFIX_CACHE": text}, prefix_cache=not value)
    assert explicit.prefix_cache is not value


@pytest.mark.parametrize("text", ["", "2", "yes", "on", "none"])
def test_other_words_are_no_switch(text: str) -> None:
    with pytest.raises(ConfigError, match=f"CRUCIBLE_PREFIX_CACHE must be 1, 0, true or false, got '{text}'"):
        EngineConfig.from_environment({"CRUCIBLE_PREFIX_CACHE": text})


def test_defaults_pack_and_share() -> None:
    config = EngineConfig.from_environment({})
    assert (config.batched_prefill, config.min_packed_prompts, config.prefix_cache) == (True, 2, True)
    assert EngineConfig.from_environment({"CRUCIBLE_MIN_PACKED_PROMPTS": "4"}).min_packed_prompts == 4
    with pytest.raises(ConfigError, match="min_packed_prompts must be at least 2, got 1"):
        EngineConfig(min_packed_prompts=1)


COUNTS = (
    "max_batch", "max_queue", "context", "kv_pages", "kv_memory", "prefill_budget", "prefill_chunk_tokens", "threads",
    "min_packed_prompts",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in COUNTS for value in (2.5, "x", "2", True, [2], 2.0, -1)),
        *((name, None) for name in ("max_batch", "max_queue", "min_packed_prompts", "prefix_cache", "quant")),
        *((name, value) for name in ("batched_prefill", "prefix_cache") for value in (1, "yes")),
        *((name, value) for name in ("quant", "device") for value in ("foo", 8, ["cpu"], "")),
        ("context", 0),
        ("min_packed_prompts", 1),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be ") as refusal:
        EngineConfig(**{name: value})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("QUANT", "foo"),
        ("DEVICE", ""),
        ("MAX_BATCH", "x"),
        ("MAX_BATCH", "0"),
        ("MIN_PACKED_PROMPTS", "1"),
        ("KV_MEMORY", "much"),
        ("PREFIX_CACHE", "maybe"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^CRUCIBLE_{variable} must be .*{text}"):
        EngineConfig.from_environment({f"CRUCIBLE_{variable}": text})


def test_an_argument_wins_over_both_variables_of_the_cache_size() -> None:
    environment = {"CRUCIBLE_KV_PAGES": "7", "CRUCIBLE_MAX_BATCH": "3"}
    config = EngineConfig.from_environment(environment, kv_memory=2**20, max_batch=None)
    assert (config.kv_pages, config.kv_memory, config.max_batch) == (None, 2**20, 3)
    config = EngineConfig.from_environment({"CRUCIBLE_KV_MEMORY": "1M"}, kv_pages=7)
    assert (config.kv_pages, config.kv_memory) == (7, None)
    with pytest.raises(ConfigError, match="not both"):
        EngineConfig.from_environment({"CRUCIBLE_KV_MEMORY": "1M", "CRUCIBLE_KV_PAGES": "7"})


def test_a_variable_wins_over_the_callers_default() -> None:
    assert EngineConfig.from_environment({}, defaults={"quant": "f32"}).quant == "f32"
    assert EngineConfig.from_environment({"CRUCIBLE_QUANT": "int8"}, defaults={"quant": "f32"}).quant == "int8"
    assert EngineConfig.from_environment({"CRUCIBLE_QUANT": "f32"}, quant="int8").quant == "int8"


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("ATTN", "single", "attn", "single"),
        ("PREFILL_ATTN", "reference", "prefill_attn", "reference"),
        ("GEMM", "big", "gemm", "big"),
        ("DECODE_GEMM", "small", "decode_gemm", "small"),
        ("BATCH_GRAPH", "0", "batch_graph", False),
        ("PREFILL_GRAPH", "0", "prefill_graph", False),
        ("BATCHED_PREFILL", "0", "batched_prefill", False),
        ("CHUNKED_PREFILL", "0", "chunked_prefill", False),
        ("PREFILL", "serial", "prefill", "serial"),
        ("DEVICE_ARGMAX", "0", "device_argmax", False),
        ("DEVICE_TOPK", "0", "device_topk", False),
        ("ASYNC_STEPS", "0", "async_steps", False),
        ("QUANT", "f16", "quant", "f16"),
    ],
)
def test_a_switch_of_the_gpu_has_a_variable(variable: str, text: str, field: str, value: Any) -> None:
    assert getattr(EngineConfig.from_environment({f"CRUCIBLE_{variable}": text}), field) == value
    assert getattr(EngineConfig(), field) != value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gemm": "scalar", "decode_gemm": "auto"}, "gemm scalar with decode_gemm auto"),
        ({"gemm": "big", "decode_gemm": "scalar"}, "gemm big with decode_gemm scalar"),
        ({"prefill": "serial", "prefill_budget": 4}, "prefill serial decides prefill_budget"),
        ({"chunked_prefill": False, "prefill_chunk_tokens": 4}, "chunked_prefill off decides prefill_budget"),
        ({"chunked_prefill": False, "prefill": "serial"}, "prefill serial spreads a prompt"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        EngineConfig(**values)
    assert "\n" not in str(refusal.value)


def test_scalar_for_all_or_none() -> None:
    for decode_gemm in ("same", "scalar"):
        assert EngineConfig(gemm="scalar", decode_gemm=decode_gemm).gemm == "scalar"
    assert EngineConfig(gemm="small", decode_gemm="big").decode_gemm == "big"
