"""The emulator does what its head promises."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.emulator import HERE, ORDERS, Emulated, EmulationError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def smoke() -> Emulated:
    return Emulated(HERE / "smoke.cu")


@pytest.mark.parametrize("order", ORDERS)
def test_a_sum_over_warps(smoke: Emulated, order: str) -> None:
    x = np.random.default_rng(1).random(1000, dtype=np.float32)
    out = np.zeros(3, np.float32)
    smoke.launch("smoke_sum", 3, 128, 0, x, out, 1000, order=order)
    assert np.ptp(out) == 0
    assert np.isclose(out[0], x.sum(), rtol=1e-6)


def test_a_missing_barrier_shows_in_another_order(smoke: Emulated) -> None:
    x, out = np.ones(1000, np.float32), np.zeros(1, np.float32)
    smoke.launch("smoke_no_barrier", 1, 128, 0, x, out, 1000, order="forward")
    assert np.isnan(out[0])
    smoke.launch("smoke_no_barrier", 1, 128, 0, x, out, 1000, order="reversed")
    assert out[0] == 1000


def test_mma_multiplies_and_keeps_the_k_order(smoke: Emulated) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((8, 16)).astype(np.float16)
    d, want = np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
    smoke.launch("smoke_mma", 1, 32, 0, a, b, d)
    for k in range(16):
        want += a[:, k, None].astype(np.float32) * b[None, :, k].astype(np.float32)
    assert np.array_equal(d, want)


def test_asynchronous_copies_arrive_at_the_wait(smoke: Emulated) -> None:
    x, out = np.arange(200, dtype=np.float32), np.empty(256, np.float32)
    smoke.launch("smoke_copy", 1, 64, 1024, x, out, 200, 1)
    assert np.array_equal(out, np.pad(x, (0, 56)))
    smoke.launch("smoke_copy", 1, 64, 1024, x, out, 200, 0)
    assert np.isnan(out).all()
    with pytest.raises(EmulationError, match="bad address"):
        smoke.launch("smoke_copy", 1, 64, 1008, x, out, 200, 1)


def test_biased_bytes_become_halves(smoke: Emulated) -> None:
    q = np.arange(-127, 129, dtype=np.int16)[:256].clip(-127, 127)
    out = np.empty(256, np.float16)
    smoke.launch("smoke_bytes", 1, 64, 0, (q + 128).astype(np.uint8), out, 64)
    assert np.array_equal(out, q.astype(np.float16))


def test_votes_atomics_and_parts_of_warps(smoke: Emulated) -> None:
    out, counter = np.zeros(64, np.uint32), np.zeros(1, np.int32)
    smoke.launch("smoke_votes", 1, 64, 0, out, counter, order="shuffled", seed=3)
    assert counter[0] == 32
    lanes = np.arange(64)
    down = np.where(lanes % 32 == 31, lanes, lanes + 1)
    want = 0xAAAAAAAA + down + np.where(lanes < 32, lanes ^ 3, 0)
    assert np.array_equal(out, want.astype(np.uint32))


def test_a_stuck_block_is_an_error_that_says_where(smoke: Emulated) -> None:
    with pytest.raises(EmulationError, match=r"stuck: thread 0… at __syncthreads; thread 16… at __shfl_sync"):
        smoke.launch("smoke_stuck", 1, 32, 0, np.zeros(1, np.int32))


def test_writes_outside_an_array_are_errors(smoke: Emulated) -> None:
    out = np.zeros(5, np.int32)
    smoke.launch("smoke_write", 1, 32, 0, out, 4, 0.0, 7 << 32)
    assert out.tolist() == [0, 0, 0, 0, 7]
    for at in (5, 8, -1):
        with pytest.raises(EmulationError, match=r"a write beyond an array|bad address"):
            smoke.launch("smoke_write", 1, 32, 0, out, at, 0.0, 7 << 32)
    out.flags.writeable = False
    with pytest.raises(EmulationError, match="read-only"):
        smoke.launch("smoke_write", 1, 32, 0, out, 0, 0.0, 9 << 32)


def test_wrong_arguments_are_errors(smoke: Emulated) -> None:
    out = np.zeros(5, np.int32)
    assert smoke.kernels["smoke_write"] == "pifl"
    for arguments in ((out, 4, 0.0), (out, 4, 0, 1), (out, 4.0, 0.0, 1), (4, 4, 0.0, 1), (out[::2], 4, 0.0, 1)):
        with pytest.raises(EmulationError, match="argument"):
            smoke.launch("smoke_write", 1, 32, 0, *arguments)
