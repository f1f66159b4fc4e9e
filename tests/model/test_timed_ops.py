"""The profiler's ops: every op of the forward pass is noted, and its results are the wrapped ops'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible.checkpoint import open_checkpoint
from crucible.model.direct import Direct, Part
from crucible.model.timed_ops import EventClock, HostClock, OmittingOps, TimedOps, clock_of, op_labels
from tests.checkpoints import make_checkpoint
from tests.kernels.cuda.stand_in import StandIn

LAYER = ["attention norm", "qkv", "attention", "attention output", "mlp norm", "swiglu", "mlp output"]


class Ticks:
    """A clock that advances by one a mark."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def wait(self) -> None:
        pass

    def microseconds(self, first: int, last: int) -> float:
        return float(last - first)


@pytest.fixture(params=["cpu", "cuda"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Direct:
    monkeypatch.setattr("crucible.kernels.device.CudaDevice", StandIn)
    path = make_checkpoint(tmp_path / "model", head_dim=64, num_heads=2, num_kv_heads=1)
    with open_checkpoint(path) as checkpoint:
        return Direct.load(
            checkpoint, device=request.param, quant="int8", context=32, max_rows=8, head_rows=1, threads=1
        )


def batch(model: Direct) -> Any:
    return model.batch([Part(np.arange(5, dtype=np.int32), 0, np.zeros(1, np.int32))], np.array([4], np.int32))


def test_every_op_is_noted_with_its_place_and_weights(model: Direct) -> None:
    cache = model.ops.allocate_cache(1)
    plain = model.download(model.forward(batch(model), cache)).copy()
    timed = TimedOps(model.ops, Ticks(), op_labels(model.weights))
    assert np.array_equal(model.download(model.forward(batch(model), cache, timed)), plain)
    found = timed.take()
    assert [label for label, _, _ in found] == ["embed", *LAYER, *LAYER, "final norm", "logits"]
    assert all(microseconds == 1 for _, _, microseconds in found)
    sizes = {label: size for label, size, _ in found}
    layer = model.weights.layers[0]
    assert sizes["qkv"] == layer.qkv.nbytes
    assert sizes["mlp output"] == layer.mlp_out.nbytes
    assert sizes["logits"] == model.weights.head.nbytes
    assert sizes["attention"] == sizes["embed"] == sizes["final norm"] == 0
    assert timed.take() == []


@pytest.mark.parametrize("model", ["cuda"], indirect=True)
@pytest.mark.parametrize("label", ["embed", *LAYER, "final norm", "logits"])
def test_an_omitted_op_launches_nothing_and_all_others_do(label: str, model: Direct) -> None:
    cache, device = model.ops.allocate_cache(1), model.device
    model.forward(batch(model), cache)
    whole = list(device.launches)
    device.launches.clear()
    model.forward(batch(model), cache, OmittingOps(model.ops, {label}, op_labels(model.weights)))
    assert len(whole) - len(device.launches) == (2 if label in LAYER else 1)
    device.launches.clear()
    model.forward(batch(model), cache)
    assert device.launches == whole  # and the ops are as they were


def test_a_device_without_cupy_is_timed_by_the_host() -> None:
    assert isinstance(clock_of(None), HostClock)
    assert isinstance(clock_of(StandIn()), HostClock)
    clock = HostClock()
    assert 0 <= clock.microseconds(clock.mark(), clock.mark()) < 1e6


def test_events_are_recorded_in_the_devices_stream() -> None:
    class Event:
        def record(self, stream: Any) -> None:
            self.stream = stream

    class Device:
        class cupy:
            class cuda:
                pass

        stream = object()
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    device: Any = Device()
    device.cupy.cuda.Event = Event
    device.cupy.cuda.get_elapsed_time = lambda first, last: 0.25  # milliseconds
    clock: Any = clock_of(device)
    assert isinstance(clock, EventClock)
    assert clock.mark().stream is device.stream
    clock.wait()
    assert device.waited == 1
    assert clock.microseconds(clock.mark(), clock.mark()) == 250
