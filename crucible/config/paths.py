"""Where Crucible keeps what it can make again: pulled models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$CRUCIBLE_CACHE, or crucible in $XDG_CACHE_HOME or ~/.cache. It need not exist."""
    chosen = os.environ.get("CRUCIBLE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    # The XDG specification has relative paths ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (base if base.is_absolute() else Path.home() / ".cache") / "crucible"
