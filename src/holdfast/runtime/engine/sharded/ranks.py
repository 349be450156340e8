"""The processes of one sharded stage, and what they say to one another: rank 0 leads, the others are companions."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.errors import InternalError
from holdfast.runtime.engine.sharded.commands import Command, decode, encode
from holdfast.runtime.sockets import deaf_to_strangers

if TYPE_CHECKING:
    from holdfast.core.tensorspec import TensorSpec

__all__ = ["Ranks"]

_FOREVER = timedelta(days=365)
"""No operation among ranks times out: one that is stopped shows as its worker's hang."""


class Ranks:
    """One of the processes of a stage. All run the same operations in the same order, as the leader tells them.

    Args:
        rank: which; 0 leads.
        size: how many there are.
        meeting: a file, of which they have a private folder, where they find one another; may go afterwards.

    Cost: until all have come, and nothing tells when one never does: whoever started them must watch them.
    """

    def __init__(self, rank: int, size: int, meeting: Path) -> None:
        self.rank, self.size = rank, size
        self.stopped = threading.Event()
        self.stages = 0
        # Layers' outputs are cut from the graph at once, so nobody changes one in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all are on one machine, and nobody else is to come
        with deaf_to_strangers():
            store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_FOREVER)
            self.mesh: DeviceMesh = init_device_mesh("cpu", (size,))
            dist.barrier()

    def next_stage(self) -> int:
        """Returns the number of the next stage that these processes have; on the leader."""
        self.stages += 1
        return self.stages

    @property
    def leads(self) -> bool:
        """Whether this is the leader."""
        return self.rank == 0

    @property
    def broken(self) -> bool:
        """Whether an exception has ended here what all ranks do together: it does not begin again."""
        return self.stopped.is_set()

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Marks the stage as broken if an exception leaves it to one rank alone to have stopped."""
        try:
            yield
        except BaseException:
            self.stopped.set()
            raise

    def tell(self, command: Command) -> None:
        """Has all companions do something.

        Raises:
            InternalError: they may be in the midst of what an exception ended here.
        """
        if self.broken:
            raise InternalError("a stage of several GPUs cannot go on after an exception in it")
        self.send_bytes(encode(command))

    def told(self) -> Command:
        """Waits for the next command."""
        return decode(self.receive_bytes())

    def send_bytes(self, data: bytes) -> None:
        """Gives bytes to all companions."""
        dist.broadcast(torch.tensor([len(data)]), 0)
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)

    def receive_bytes(self) -> bytes:
        """Takes bytes from the leader."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0)
        data = torch.empty(int(length.item()), dtype=torch.uint8)
        dist.broadcast(data, 0)
        return data.numpy().tobytes()

    def scatter(self, messages: Sequence[Tensor] | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns what the leader has for this rank, of one shape for all of them.

        Args:
            messages: of the leader, one per rank; None on companions.
            shape: of each.
            dtype: of each.
        """
        mine = torch.empty(shape, dtype=dtype)
        dist.scatter(mine, None if messages is None else [each.contiguous() for each in messages], 0)
        return mine

    def scatter_batch(self, batch: Tensor | None, spec: TensorSpec) -> Tensor:
        """Returns this rank's samples of what the leader has for all: equally many for each."""
        shape = (spec.shape[0] // self.size, *spec.shape[1:])
        return self.scatter(None if batch is None else batch.chunk(self.size), shape, getattr(torch, spec.dtype))

    def gather(self, mine: Tensor) -> list[Tensor] | None:
        """Returns on the leader what all ranks have, of one shape; None on companions."""
        mine = mine.contiguous()
        into = [torch.empty_like(mine) for _ in range(self.size)] if self.leads else None
        dist.gather(mine, into, 0)
        return into

    def mean(self, mine: Tensor) -> Tensor:
        """Returns the mean of what all ranks have."""
        total = mine.clone()
        dist.all_reduce(total)
        return total / self.size
