"""Grids, threads and shared memory of the linear kernels (cuda/linear_*.cu). Numbers only."""

from __future__ import annotations

from typing import NamedTuple

from crucible.kernels.cuda.pack import CHUNK

THREADS = 256
MAX_SHARED = 99 * 1024
SMALL_TOKENS = (8, 16, 32)
BIG_TOKENS = (64, 128)
_WARPS = THREADS // 32
_PART_BYTES = 80  # of a token in a chunk of a tile: 8 pairs and 2 unused ones, float2 each
_BIG_TILES = 8
_STAGE_BYTES = 4 * 144  # of a token: four stages of 64 halves and 8 unused ones


class Launch(NamedTuple):
    """Blocks in x and y, threads a block, dynamic shared memory in bytes."""

    grid: tuple[int, int]
    threads: int
    shared: int


def small_tokens(rows: int, inputs: int) -> int:
    """Tokens a block of linear_small should take: the least that hold ``rows``, as far as shared memory goes."""
    for tokens in SMALL_TOKENS:
        if rows <= tokens:
            break
    while tokens > SMALL_TOKENS[0] and -(-inputs // CHUNK) * tokens * _PART_BYTES > MAX_SHARED:
        tokens //= 2
    return tokens


def small(tiles: int, inputs: int, rows: int, tokens: int, processors: int) -> Launch:
    """linear_small{tokens}: as many tiles a block as keep its warps busy and every processor supplied.

    Raises ValueError when one tile needs more shared memory than a block has: more than 40,448 inputs of 8 tokens.
    """
    chunks = -(-inputs // CHUNK)
    block_tiles = max(1, min(_WARPS // chunks, tiles // processors))
    blocks = -(-tiles // block_tiles)
    shared = small_shared(tiles, inputs, tokens, blocks)
    if shared > MAX_SHARED:
        raise ValueError(f"linear_small{tokens} cannot take {inputs} inputs: {shared} bytes of shared memory")
    return Launch((blocks, -(-rows // tokens)), THREADS, shared)


def small_shared(tiles: int, inputs: int, tokens: int, blocks: int) -> int:
    """Dynamic shared memory of linear_small{tokens} with ``blocks`` blocks in x."""
    return -(-tiles // blocks) * -(-inputs // CHUNK) * tokens * _PART_BYTES


def big(tiles: int, rows: int, tokens: int) -> Launch:
    """linear_big{tokens}."""
    return Launch((-(-tiles // _BIG_TILES), -(-rows // tokens)), THREADS, tokens * _STAGE_BYTES)


def scalar(tiles: int, rows: int) -> Launch:
    """linear_scalar."""
    return Launch((tiles, -(-rows // 32)), THREADS, 0)
