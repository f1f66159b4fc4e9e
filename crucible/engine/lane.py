"""Lane: the page-locked host memory of one step on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from crucible.engine.batch import Batch
from crucible.model.cuda_arrays import attention_tiles
from crucible.native.batch import pages_for


class Lane:
    """A step's batch, which one copy takes to the device, and the tokens that come back.

    tile_first, tile_rows: prompt rows as attention tiles; top_ks: candidates of each row. All lie in the batch's spare.
    """

    def __init__(self, device: Any, max_rows: int, max_sequences: int, context: int) -> None:
        tiles = max_rows  # a tile a row at worst: prompts of one token
        self.batch = Batch(
            max_rows,
            max_sequences,
            pages_for(context),
            spare=2 * tiles + max_sequences,
            allocate=lambda count: device.pinned(count, np.int32),
        )
        self.batch.memory[:] = 0
        self.tile_first, self.tile_rows, self.top_ks = np.split(self.batch.spare, [tiles, 2 * tiles])
        self.tokens = device.pinned(max_sequences, np.int32)

    def cut(self, decode_rows: int) -> int:
        """Prompt rows as attention tiles. Returns how many there are."""
        tiles = attention_tiles(self.batch.sequence_starts[decode_rows:].tolist())
        for index, (row, count) in enumerate(tiles):
            self.tile_first[index], self.tile_rows[index] = row, count
        return len(tiles)
