"""Workers: the processes that torchrun started, or the only one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from crucible.errors import CrucibleError
from crucible_train.errors import TrainingError


@dataclass(frozen=True)
class Workers:
    """This process's place among ``world`` processes and its device. Only ``rank`` 0 writes files and prints."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` summed over all processes, in place and without waiting for the device."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value``, on every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The ``value`` of every process, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def agree(self, work: Any) -> Any:
        """The result of ``work()`` on rank 0, on every process; what goes wrong there is raised on every process."""
        result, failure = None, None
        if self.is_main:
            try:
                result = work()
            except CrucibleError as error:
                failure = str(error)
            except OSError as error:  # a full disk, for instance: the others would wait for ever
                where = f"{error.filename}: " if error.filename is not None else ""
                failure = f"{where}{error.strerror or error}"
        result, failure = self.broadcast((result, failure))
        if failure is not None:
            raise TrainingError(failure)
        return result


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` as a device; TrainingError where there is no GPU of that number."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainingError("device cuda was asked for, but PyTorch sees no GPU; use --device cpu")
    if local_rank >= torch.cuda.device_count():
        raise TrainingError(
            f"process {local_rank} of this machine has no GPU of its own ({torch.cuda.device_count()} seen); "
            "start fewer with torchrun --nproc-per-node"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def workers(device_name: str) -> Iterator[Workers]:
    """The process group of torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK), left again at the end.

    NCCL connects GPUs, gloo CPUs. Without that environment: one process and no group.
    """
    rank, world, local_rank = (_from_environment(name, low) for name, low in _VARIABLES.items())
    if rank >= world:
        raise TrainingError(f"RANK {rank} must be below WORLD_SIZE {world}, as torchrun sets them")
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == 1:
        yield Workers(0, 1, device)
        return
    own = not dist.is_initialized()
    if own:
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world)
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise TrainingError(f"the {world} processes cannot meet ({reason}); start them with torchrun") from None
    try:
        yield Workers(rank, world, device)
    finally:
        if own:
            dist.destroy_process_group()


_VARIABLES = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise TrainingError(f"{name} must be a number as torchrun sets it, got {text!r}")
    return int(text)
