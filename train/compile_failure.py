"""What torch.compile says when it fails, in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from crucible_train.errors import TrainingError


@contextmanager
def readable_compile_failure(without: str) -> Iterator[None]:
    """Turns a failure of torch.compile into a TrainingError; ``without``: what the user does to go without it."""
    try:
        yield
    except RuntimeError as error:
        dynamo = sys.modules.get("torch._dynamo.exc")  # there once something was compiled
        if dynamo is None or not isinstance(error, dynamo.TorchDynamoException):
            raise
        lines = (line.strip() for line in str(error).splitlines())
        reason = next((line for line in lines if line and not line.endswith(" raised:")), type(error).__name__)
        raise TrainingError(f"torch.compile failed: {reason}; it needs a C++ compiler. {without}") from error
