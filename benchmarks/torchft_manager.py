"""The manager of torchft, as all benchmarks that run it set it up; only for its own environment (``peers.py``)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["make_manager"]


def make_manager(
    *,
    rank: int,
    lighthouse: str,
    least: int,
    timeout: timedelta,
    state: Callable[[], dict[str, Any]],
    load: Callable[[dict[str, Any]], None],
) -> Any:
    """Returns that of a replica group of one worker; it listens on loopback only.

    Args:
        rank: of the replica.
        lighthouse: its address.
        least: replicas without which no step is made.
        timeout: of everything that waits.
        state: what whoever joins is given.
        load: takes it.
    """
    import torchft.manager
    from torchft.process_group import ProcessGroupGloo

    server = torchft.manager.ManagerServer
    torchft.manager.ManagerServer = lambda **named: server(**{**named, "bind": "127.0.0.1:0"})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return torchft.manager.Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=least,
        replica_id=f"replica-{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        init_sync=False,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
    )
