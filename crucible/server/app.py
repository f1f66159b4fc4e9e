"""The WSGI application: routes over injected parts, and JSON for everything that goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import falcon

from crucible.engine.client import EngineClient
from crucible.errors import CrucibleError
from crucible.server.errors import ApiError, ClientGone, body_of, from_crucible, from_falcon
from crucible.server.native_api import GenerateResource, GenerateStreamResource, NativeApi
from crucible.server.status_api import HealthResource, MetricsResource
from crucible.server.text import Text

log = logging.getLogger(__name__)

STALLED_S = 60.0
"""Default bound of a step's age. A step is bounded by the prefill budget: seconds on the slowest machine."""


class RefuseWhileDraining:
    """A server that is shutting down finishes what it has and takes nothing new on old connections."""

    def __init__(self, draining: Callable[[], bool]) -> None:
        self._draining = draining

    def process_request(self, request: falcon.Request, response: falcon.Response) -> None:
        if request.method == "POST" and self._draining():
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "1"})


def create_app(
    client: EngineClient,
    text: Text,
    model_id: str,
    draining: Callable[[], bool] = lambda: False,
    stalled_s: float = STALLED_S,
) -> falcon.App[Any, Any]:
    """The application over one engine. ``draining`` tells whether new work is to be refused; ``stalled_s``: seconds
    a step may take before the service counts as stuck."""
    app = falcon.App(middleware=[RefuseWhileDraining(draining)])
    app.add_error_handler(Exception, _on_bug)
    app.add_error_handler(falcon.HTTPError, _on_falcon)
    app.add_error_handler(CrucibleError, _on_crucible)
    app.add_error_handler(ApiError, _on_api)
    app.add_error_handler(ClientGone, _on_gone)
    api = NativeApi(client, text, model_id)
    app.add_route("/health", HealthResource(client, model_id, text.has_template, draining, stalled_s))
    app.add_route("/metrics", MetricsResource(client))
    app.add_route("/v1/generate", GenerateResource(api))
    app.add_route("/v1/generate/stream", GenerateStreamResource(api))
    return app


def _send(error: ApiError, request: falcon.Request, response: falcon.Response) -> None:
    response.status = falcon.code_to_http_status(error.status)
    response.content_type = falcon.MEDIA_JSON
    response.set_headers(error.headers)
    response.stream = None
    response.data = body_of(error, request.path)


def _on_api(request: falcon.Request, response: falcon.Response, error: ApiError, params: dict[str, Any]) -> None:
    _send(error, request, response)


def _on_crucible(
    request: falcon.Request, response: falcon.Response, error: CrucibleError, params: dict[str, Any]
) -> None:
    _send(from_crucible(error), request, response)


def _on_falcon(
    request: falcon.Request, response: falcon.Response, error: falcon.HTTPError, params: dict[str, Any]
) -> None:
    _send(from_falcon(error, request.method, request.path), request, response)


def _on_gone(request: falcon.Request, response: falcon.Response, error: ClientGone, params: dict[str, Any]) -> None:
    response.status = "499 Client Closed Request"


def _on_bug(request: falcon.Request, response: falcon.Response, error: Exception, params: dict[str, Any]) -> None:
    log.exception("%s %s failed", request.method, request.path)
    _send(ApiError(500, "internal error; the server's log has the details"), request, response)
