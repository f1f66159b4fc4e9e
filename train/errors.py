"""What goes wrong in training and is the caller's to mend."""

from __future__ import annotations

from crucible.errors import CrucibleError


class TrainingError(CrucibleError):
    """Bad data, an impossible configuration or a run that cannot go on; one line: what, which value, what to do."""
