"""Reading a request body that must be JSON."""

from __future__ import annotations

import falcon

from crucible.server.errors import ApiError


def read_json(request: falcon.Request) -> bytes:
    """The body's bytes. No Content-Type counts as JSON; another one is refused with 415.

    Form and text types are what a web page can send across sites without asking, so a local server must not take
    them for JSON. Raises ApiError.
    """
    kind = (request.content_type or "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be JSON, not {kind[:100]}; send the header Content-Type: application/json")
    if (request.get_header("Content-Encoding") or "identity").strip().lower() != "identity":
        raise ApiError(415, "a compressed body is not supported; send it without Content-Encoding")
    data: bytes = request.bounded_stream.read()
    return data
