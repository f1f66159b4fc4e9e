"""TensorboardLog: the log's columns once more, as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path

from crucible_train.errors import TrainingError
from crucible_train.run_meter import Row


class TensorboardLog:
    """Writes to ``directory``; what an earlier start wrote after ``step`` is dropped."""

    def __init__(self, directory: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise TrainingError("--tensorboard needs the package tensorboard; pip install tensorboard") from None
        self._writer = SummaryWriter(str(directory), purge_step=step + 1)

    def add(self, row: Row) -> None:
        """A scalar for each column that has a value."""
        step = row["step"]
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
