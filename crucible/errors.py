"""The errors Crucible raises on purpose, one small tree.

``str(error)`` is one line fit for a user: what was wrong, with which value, and what to do. The command line
prints it and exits with 2; the HTTP surfaces turn it into their own error shape.
"""

from __future__ import annotations


class CrucibleError(Exception):
    """Base of every error that Crucible raises on purpose."""


class ConfigError(CrucibleError):
    """A setting (flag, environment variable, EngineConfig field) has a value that cannot work."""


class CheckpointError(CrucibleError):
    """A model directory or file cannot be used; the message names the file and the fault."""


class TokenizerError(CrucibleError):
    """Text or ids that this vocabulary cannot represent, or a vocabulary file that cannot be used."""


class RequestError(CrucibleError):
    """A request that can never be served as asked.

    ``param`` names the offending request field (``None`` when no single field is at fault).
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(CrucibleError):
    """The bounded queue is full; the same request may be served later."""


class EngineError(CrucibleError):
    """The engine failed while it served a request, or it is not running."""
