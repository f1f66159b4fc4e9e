"""HTTP errors: one type, one place that decides status and kind, one shape a surface."""

from __future__ import annotations

from collections.abc import Mapping

import falcon
import msgspec

from crucible.errors import CrucibleError, EngineError, QueueFullError, RequestError
from crucible.protocol import ErrorBody, ErrorDetail

RETRY_AFTER_S = 1

KINDS = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    413: "request_too_large_error",
    415: "unsupported_media_type_error",
    429: "queue_full_error",
    431: "request_too_large_error",
    501: "not_implemented_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})

    @property
    def detail(self) -> ErrorDetail:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorDetail(self.message, kind, self.param)


class ClientGone(Exception):
    """The client hung up while its request was served; nobody is left to answer."""


def body_of(error: ApiError, path: str) -> bytes:
    """The JSON body of an error on ``path``. (Surfaces with their own error shape are told apart by path here.)"""
    return msgspec.json.encode(ErrorBody(error.detail))


def from_crucible(error: CrucibleError) -> ApiError:
    """What a client is told about an error raised on purpose."""
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, RequestError):
        return ApiError(400, str(error), error.param)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), headers=retry)
    if isinstance(error, EngineError):
        return ApiError(503, str(error), headers=retry)
    return ApiError(500, str(error))


def from_falcon(error: falcon.HTTPError, method: str, path: str) -> ApiError:
    """Falcon's own errors (no route, wrong method, broken header) in words."""
    status = error.status_code
    headers = dict(error.headers or {})
    if status == 404:
        message = f"there is no {path[:200]}"
    elif status == 405:
        message = f"{path[:200]} does not take {method}; allowed: {headers.get('Allow', 'nothing')}"
    else:
        message = error.description or error.title or str(error.status)
    return ApiError(status, message, headers=headers)
