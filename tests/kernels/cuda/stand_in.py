"""An emulated GPU that can stand in CudaDevice's place: commands and benchmarks make their own."""

from __future__ import annotations

from typing import Any

from tests.kernels.cuda.emulated_device import EmulatedDevice


class StandIn(EmulatedDevice):
    """Takes CudaDevice's arguments."""

    def __init__(self, index: int = 0, *, overlap: bool = True, say: Any = None) -> None:
        super().__init__(processors=4)

    def memory(self) -> tuple[int, int]:
        return 2**31, 2**32
