"""GET /health and GET /metrics."""

from __future__ import annotations

from collections.abc import Callable

import falcon
import msgspec

from crucible import __version__
from crucible.config.sampling import DEFAULT_SEED, DEFAULT_TOP_K
from crucible.engine.client import EngineClient
from crucible.errors import EngineError
from crucible.protocol import DEFAULT_MAX_TOKENS, HealthResponse, SamplingDefaults
from crucible.server.errors import ApiError, from_crucible

STALLED_S = 120.0
"""A step that has run this long counts as no progress."""


class HealthResource:
    """Ready means: the engine takes requests and its step loop makes progress. Never waits for a step."""

    def __init__(
        self, client: EngineClient, model_id: str, has_template: bool, draining: Callable[[], bool]
    ) -> None:
        self._client, self._model_id, self._has_template, self._draining = client, model_id, has_template, draining

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        health = self.check()
        if health.error is not None:
            response.status = falcon.HTTP_503
            response.set_header("Retry-After", "1")
        response.set_header("Cache-Control", "no-store")
        response.data = msgspec.json.encode(health)

    on_head = on_get

    def check(self) -> HealthResponse:
        """What /health says now."""
        health = HealthResponse(
            status="ok",
            version=__version__,
            model=self._model_id,
            chat_template=self._has_template,
            sampling=SamplingDefaults(0.0, DEFAULT_TOP_K, DEFAULT_SEED, DEFAULT_MAX_TOKENS),
        )
        try:
            info = self._client.info()
        except EngineError as error:
            health.status, health.error = "loading", from_crucible(error).detail
            return health
        health.device, health.dtype, health.quant = info.device, info.dtype, info.quant
        health.max_batch, health.max_queue, health.context = info.max_batch, info.max_queue, info.context
        health.vocab_size, health.parameters = info.vocab_size, info.parameters
        if self._draining():
            health.status, health.error = "draining", ApiError(503, "the server is shutting down").detail
            return health
        try:
            age = self._client.metrics().get("step_age_s", 0.0)
        except EngineError as error:
            health.status, health.error = "restarting", from_crucible(error).detail
            return health
        if age > STALLED_S:
            message = f"the engine has made no progress for {age:.0f} s"
            health.status, health.error = "stalled", ApiError(503, message).detail
        return health


class MetricsResource:
    """The engine's counters as one flat JSON object."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        response.set_header("Cache-Control", "no-store")
        response.data = msgspec.json.encode(self._client.metrics())

    on_head = on_get
