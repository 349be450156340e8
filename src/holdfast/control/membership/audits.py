"""What audits have found so far: who was wrong how often, which layers do not repeat, and what is disputed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.control.messages import Audited, Audits, Weighed
from holdfast.core.ids import WorkerId
from holdfast.recovery.audit import Strikes

__all__ = ["AuditState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditState:
    """What audits have found so far. All of it is stored but ``weighed``.

    Attributes:
        strikes: how often workers that are here were wrong.
        unsteady: layers that do not repeat, sorted; they are not audited any more.
        disputed: the step of which not all computed the same, until it is committed; None if there is none. Whatever
            interrupts it, it is run again whole.
        told: what was found out about the step that is, or was last, disputed, and is not judged yet.
        weigh: whether owners' layers were found to differ, so that they are compared again.
        alone: layers of which it was said that nobody can audit them, sorted.
        weighed: what workers have told of the layers that they hold, by the step before which they are compared, until
            they are, or those of a later step.
    """

    strikes: Strikes = field(default_factory=Strikes)
    unsteady: tuple[int, ...] = ()
    disputed: int | None = None
    told: tuple[Audited, ...] = ()
    weigh: bool = False
    alone: tuple[int, ...] = ()
    weighed: Mapping[int, Mapping[WorkerId, Weighed]] = field(default_factory=dict)

    @property
    def durable(self) -> AuditState:
        """What of it is stored."""
        return replace(self, weighed={}) if self.weighed else self

    @property
    def order(self) -> Audits:
        """What workers are told of it."""
        return Audits(disputed=self.disputed, unsteady=self.unsteady, weigh=self.weigh)

    def committed(self, step: int) -> AuditState:
        """Returns them once a step is committed: it is disputed no more."""
        over = self.disputed is not None and self.disputed <= step
        return replace(self, disputed=None) if over else self

    def departed(self, gone: Iterable[WorkerId]) -> AuditState:
        """Returns them once workers are gone: whoever takes their places begins anew."""
        absent = frozenset(gone)
        weighed = {
            step: {worker: report for worker, report in told.items() if worker not in absent}
            for step, told in self.weighed.items()
        }
        return replace(self, strikes=self.strikes.without(absent), weighed=weighed)
