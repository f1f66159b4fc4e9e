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
from crucible.server import prometheus
from crucible.server.errors import ApiError, from_crucible

ANSWER_S = 1.0
"""How long /health waits for the engine's own word."""

FORMATS = {"json": "application/json", "prometheus": "text/plain", "openmetrics": "application/openmetrics-text"}


class HealthResource:
    """Ready means: the engine takes requests and its step loop makes progress. Never waits for a step.

    stalled_s: a step that has run longer counts as no progress.
    """

    def __init__(
        self,
        client: EngineClient,
        model_id: str,
        has_template: bool,
        draining: Callable[[], bool],
        stalled_s: float,
    ) -> None:
        self._client, self._model_id, self._has_template = client, model_id, has_template
        self._draining, self._stalled_s = draining, stalled_s

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
            age = float(self._client.metrics(ANSWER_S)["step_age_s"])
        except EngineError as error:
            if not self._client.ready:
                health.status, health.error = "restarting", from_crucible(error).detail
                return health
            age = self._client.silence_s  # slow on a busy machine, or so stuck that nothing in it answers
        health.step_age_s = age
        if age > self._stalled_s:
            message = f"the engine has made no progress for {age:.1f} s"
            health.status, health.error = "stalled", ApiError(503, message).detail
        return health


class MetricsResource:
    """The engine's counters as one flat JSON object, or as Prometheus text for whoever asks for that."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def on_get(self, request: falcon.Request, response: falcon.Response) -> None:
        kind = metrics_format(request)
        report = self._client.report()
        response.set_header("Cache-Control", "no-store")
        response.set_header("Vary", "Accept")
        if kind == "json":
            response.data = msgspec.json.encode(report.values)
            return
        openmetrics = kind == "openmetrics"
        response.content_type = prometheus.OPENMETRICS if openmetrics else prometheus.TEXT
        response.data = prometheus.exposition(report, openmetrics=openmetrics).encode("ascii")

    on_head = on_get


def metrics_format(request: falcon.Request) -> str:
    """A key of FORMATS: ``?format=``, else what Accept prefers, else JSON. Raises ApiError for an unknown one."""
    asked: str | None = request.get_param("format")
    if asked is not None:
        if asked not in FORMATS:
            raise ApiError(400, f"format must be one of {', '.join(FORMATS)}, got {asked[:100]!r}", "format")
        return asked
    preferred = request.client_prefers(tuple(FORMATS.values()))
    return next((kind for kind, media_type in FORMATS.items() if media_type == preferred), "json")
