import numpy as np
from numpy.typing import NDArray

def select(
    logits: NDArray[np.float32],
    temperature: float,
    top_k: int,
    seed: int,
    choice: int,
    position: int,
    token_count: int,
) -> int: ...
def select_rows(
    logits: NDArray[np.float32],
    temperatures: NDArray[np.float64],
    top_ks: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    choices: NDArray[np.int32],
    positions: NDArray[np.int32],
    token_count: int,
    out: NDArray[np.int32],
) -> None: ...
def candidates(
    logits: NDArray[np.float32], temperature: float, top_k: int, token_count: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]: ...
def draw(
    ids: NDArray[np.int32], logits: NDArray[np.float32], temperature: float, seed: int, choice: int, position: int
) -> int: ...
def uniform(seed: int, choice: int, position: int) -> float: ...
def philox4x32(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]: ...
def order_key(logit: float, token_id: int) -> int: ...
def key_parts(key: int) -> tuple[float, int]: ...
