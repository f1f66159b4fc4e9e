from __future__ import annotations

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
