"""What is on its way between the workers of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from holdfast.core.ids import WorkerId
from holdfast.core.summing import Contribution, Total, add_up
from holdfast.errors import InternalError
from holdfast.runtime.transport.port import MessageKey

__all__ = ["Group", "Mail"]

T = TypeVar("T")
Group = tuple[WorkerId, ...]


@dataclass(slots=True, kw_only=True)
class Mail(Generic[T]):
    """What was sent and not yet taken, what was contributed and not yet summed, who has joined. Knows no time."""

    _messages: dict[tuple[MessageKey, WorkerId, WorkerId], T] = field(default_factory=dict)
    _sums: dict[object, dict[WorkerId, Contribution]] = field(default_factory=dict)
    _joined: dict[tuple[int, Group], set[WorkerId]] = field(default_factory=dict)

    def post(self, key: MessageKey, source: WorkerId, target: WorkerId, tensor: T) -> None:
        """Leaves a message, which nobody changes any more; a second one under the same key is a bug."""
        if (key, source, target) in self._messages:
            raise InternalError(f"{key} from {source} to {target} was sent twice")
        self._messages[key, source, target] = tensor

    def collect(self, key: MessageKey, source: WorkerId, target: WorkerId) -> T | None:
        """Takes a message, or returns None if it has not come yet."""
        return self._messages.pop((key, source, target), None)

    def contribute(self, name: object, worker: WorkerId, contribution: Contribution) -> None:
        """Adds one worker's part to the sum called ``name``; nobody changes it any more."""
        self._sums.setdefault(name, {})[worker] = contribution

    def has_all(self, name: object, members: Group) -> bool:
        """Whether all members contributed."""
        there = self._sums.get(name, {})
        return len(there) == len(members) and there.keys() == set(members)

    def total(self, name: object, members: Group) -> Total | None:
        """The sum, or None until all members contributed."""
        if not self.has_all(name, members):
            return None
        return add_up([self._sums[name][member] for member in members])

    def join(self, generation: int, groups: tuple[Group, ...], worker: WorkerId) -> None:
        """Notes that ``worker`` has come to those of its groups."""
        for group in groups:
            if worker in group:
                self._joined.setdefault((generation, group), set()).add(worker)

    def complete(self, generation: int, groups: tuple[Group, ...], worker: WorkerId) -> bool:
        """Whether all members have come to every group of ``worker``."""
        return all(self._joined.get((generation, group)) == set(group) for group in groups if worker in group)
