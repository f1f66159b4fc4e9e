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
