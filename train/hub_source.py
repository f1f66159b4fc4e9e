"""A dataset of the Hugging Face Hub, streamed through PyPI ``datasets``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from crucible_train.errors import TrainingError
from crucible_train.sources import Block, text_blocks


class HubSource:
    """One split of a Hub dataset. Its sha256 is over the texts that were read: each one's length, then its bytes."""

    format = "hub"
    size = 0
    stamp = 0

    def __init__(self, dataset: str, config: str | None = None, split: str = "train", text_field: str = "text") -> None:
        self.name = f"hub:{dataset}" + (f":{config}" if config else "") + f":{split}"
        self._dataset, self._config, self._split = dataset, config, split
        self._text_field = text_field
        self._sha256 = hashlib.sha256()

    def sha256(self) -> str:
        """Of all texts that ``blocks`` gave out, in hexadecimal."""
        return self._sha256.hexdigest()

    def blocks(self) -> Iterator[Block]:
        """Raises TrainingError when the dataset cannot be opened, or a row has no text."""
        self._sha256 = hashlib.sha256()
        for block in text_blocks(self.name, self.format, self._texts()):
            for text in block.data:
                data = str(text).encode("utf-8", "surrogatepass")
                self._sha256.update(len(data).to_bytes(8, "little") + data)
            yield block

    def _texts(self) -> Iterator[str]:
        for number, row in enumerate(self._rows(), start=1):
            text = row.get(self._text_field)
            if not isinstance(text, str):
                known = ", ".join(row)
                raise TrainingError(f"{self.name}: row {number} has no text in {self._text_field!r}; it has {known}")
            yield text

    def _rows(self) -> Iterable[dict[str, Any]]:
        try:
            from datasets import load_dataset
        except ImportError:
            raise TrainingError(f"{self.name}: needs the package datasets; pip install 'crucible-lm[hub]'") from None
        try:
            yield from load_dataset(self._dataset, self._config, split=self._split, streaming=True)
        except TrainingError:
            raise
        except Exception as error:  # whatever its network and file readers raise
            reason = (str(error).splitlines() or [""])[0]
            raise TrainingError(f"{self.name}: cannot be read ({type(error).__name__}: {reason})") from None
