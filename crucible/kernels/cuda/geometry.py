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
_SMALL_NS = 1000  # of linear_small beside its multiply-adds
_SMALL_RATE = 320  # its multiply-adds a nanosecond and processor
_BIG_NS = {64: (2400, 10.5), 128: (3600, 15.1)}  # of a block of linear_big: once, and for each input


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


def cheapest(tiles: int, inputs: int, rows: int, processors: int) -> str:
    """linear_small or linear_big as the form's name, ``small32`` say: the least estimated time.

    A block of linear_big takes its time however few tokens it has, and each round of blocks over the processors takes
    it again; linear_small's time grows with the multiply-adds. From ``crucible bench kernels`` on an H200 (int8, five
    shapes of a 120M model, 1 … 1,024 rows): over all 55 cases the choice takes 1.003 times the fastest form's time.
    Only ratios matter, and they compare instructions of one processor, so other GPUs should not be far off.
    """
    times = {}
    tokens = small_tokens(rows, inputs)
    if small_shared(1, inputs, tokens, 1) <= MAX_SHARED:
        padded = -(-rows // tokens) * tokens
        times[f"small{tokens}"] = _SMALL_NS + tiles * 16 * padded * inputs / (_SMALL_RATE * processors)
    for tokens, (once, each) in _BIG_NS.items():
        blocks = -(-tiles // _BIG_TILES) * -(-rows // tokens)
        times[f"big{tokens}"] = -(-blocks // processors) * (once + each * inputs)
    return min(times, key=times.__getitem__)


def scalar(tiles: int, rows: int) -> Launch:
    """linear_scalar."""
    return Launch((tiles, -(-rows // 32)), THREADS, 0)


def launch(form: str, tiles: int, inputs: int, rows: int, processors: int) -> Launch:
    """linear_{form}, such as ``small16`` or ``scalar``. Raises ValueError as ``small`` does."""
    if form == "scalar":
        return scalar(tiles, rows)
    if form.startswith("big"):
        return big(tiles, rows, int(form[3:]))
    return small(tiles, inputs, rows, int(form[5:]), processors)
