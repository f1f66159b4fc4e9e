"""What a model is (ModelConfig), how it is served (EngineConfig), how tokens are chosen (SamplingParams)."""

from crucible.config.engine import EngineConfig
from crucible.config.model import ModelConfig
from crucible.config.sampling import SamplingParams

__all__ = ["EngineConfig", "ModelConfig", "SamplingParams"]
