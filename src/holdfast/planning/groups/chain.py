"""The machines of a pipeline, what passes between them, and groups of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError

__all__ = ["MOST_MACHINES", "MachineChain", "Group", "Grouping"]

Group = tuple[int, ...]
"""Machines that are recovered together: neighbours, in order."""
MOST_MACHINES = 1024
"""More are refused: the programme keeps a few numbers for every pair of machines."""
_MOST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineChain:
    """Machines of which each passes tensors to the next, and how much may be logged of that.

    Attributes:
        compute_s: seconds that each machine computes in a step.
        boundary_bytes: bytes between each machine and the next in a step, both directions: one fewer than machines.
        bandwidth: bytes per second between two machines.
        interval: steps from one checkpoint to the next: logs of so many are kept.
        limit_bytes: how much all logs together may take.
        parallel: whether a group is recovered by as many copies of it as all machines have room for.

    Raises:
        ConfigError: a number or a count is impossible; the message says which and what would be right.
    """

    compute_s: tuple[float, ...]
    boundary_bytes: tuple[float, ...]
    bandwidth: float
    interval: int
    limit_bytes: float
    parallel: bool = False

    def __post_init__(self) -> None:
        """Checks counts and ranges."""
        if not 1 <= self.num_machines <= MOST_MACHINES:
            raise ConfigError(f"{self.num_machines} machines are impossible: expected 1 to {MOST_MACHINES}")
        if len(self.boundary_bytes) != self.num_machines - 1:
            raise ConfigError(
                f"{len(self.boundary_bytes)} boundaries between {self.num_machines} machine(s): "
                f"expected {self.num_machines - 1}"
            )
        _check("compute of machine", "seconds", self.compute_s)
        _check("boundary", "bytes", self.boundary_bytes)
        _check("limit", "bytes", (self.limit_bytes,))
        if not 0 < self.bandwidth < math.inf:
            raise ConfigError(f"a bandwidth of {self.bandwidth} is impossible: expected bytes per second above 0")
        if self.interval < 1:
            raise ConfigError(f"an interval of {self.interval} is impossible: expected 1 step or more")
        if not sum(self.compute_s) + sum(self.boundary_bytes) * max(1.0, 1 / self.bandwidth) < _MOST:
            raise ConfigError(f"compute and boundaries are too large: expected less than {_MOST:g} s and bytes in all")

    @property
    def num_machines(self) -> int:
        """How many machines there are, N."""
        return len(self.compute_s)


def _check(what: str, unit: str, values: Sequence[float]) -> None:
    for place, value in enumerate(values):
        if not 0 <= value < math.inf:
            named = what if len(values) == 1 else f"{what} {place}"
            raise ConfigError(f"{named} is {value}: expected {unit}, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Groups, and what they come to.

    Attributes:
        groups: every machine once, in order.
        recovery_s: what a lost step costs on average, each machine being as likely to be lost as any other:
            the sum over groups of R(G) |G| / N, with R(G) as in :class:`~holdfast.planning.groups.costs.GroupCosts`.
        storage_bytes: the most that is logged at once: between groups, for all steps of an interval. Whole if it is.
    """

    groups: tuple[Group, ...]
    recovery_s: float
    storage_bytes: float
