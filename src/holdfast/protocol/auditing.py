"""What of a step is computed a second time, by whom, and what must be said before the step is committed.

All workers know it alike, from the job's seed, the step and the plan. The *runner* of the sample sends what it computed
with, and digests of what came of it, to the *auditors*. An auditor computes the same on scratch, before it contributes
to the sum of that layer. No verdict can come about without this contribution: so nobody commits what it disputes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.control.messages import Audited, Audits, Computed
from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Receive
from holdfast.core.lower import audit_message
from holdfast.core.placement import Placement
from holdfast.core.plan import Plan
from holdfast.core.step_plan import Audit
from holdfast.recovery.audit import Sample, Sampling, other_owners

__all__ = [
    "CLAIMS_BYTES",
    "TIMES",
    "Digests",
    "StepAudit",
    "audit_messages",
    "audit_of",
    "item_of",
    "pack_claims",
    "unpack_claims",
]

TIMES = 8
"""So often a disputed sample is computed by each owner: what does not repeat hardly ever gives the same so often."""
_DIGEST_BYTES = 32


class Digests(NamedTuple):
    """What was computed of a sample, and of what; see :class:`holdfast.control.messages.Computed`."""

    inputs: str
    output: str
    gradients: str


CLAIMS_BYTES = TIMES * len(Digests._fields) * _DIGEST_BYTES
"""How long the runner's claims are in its message."""


def pack_claims(claims: Iterable[Digests]) -> bytes:
    """Returns claims, at most so many as of a disputed sample, as so many bytes as those have."""
    return b"".join(bytes.fromhex("".join(each)) for each in claims).ljust(CLAIMS_BYTES, b"\0")


def unpack_claims(data: bytes, times: int) -> tuple[Digests, ...]:
    """Returns the first ``times`` claims of what ``pack_claims`` wrote."""
    texts = [data[at : at + _DIGEST_BYTES].hex() for at in range(0, CLAIMS_BYTES, _DIGEST_BYTES)]
    return tuple(Digests(*texts[3 * i : 3 * i + 3]) for i in range(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAudit:
    """The audit of one step.

    Attributes:
        sample: what is computed a second time.
        generation: in which.
        runner: who runs it, by the plan.
        auditors: who computes it again.
        times: how often everyone says what it computed.
        tell: makes an effect of a message to the coordinator.
    """

    sample: Sample
    generation: int
    runner: WorkerId
    auditors: tuple[WorkerId, ...]
    times: int = 1
    tell: Callable[[Audited], Any] = field(compare=False)

    @property
    def disputed(self) -> bool:
        """Whether the step was run before, and not all computed the same."""
        return self.times > 1

    @property
    def plan(self) -> Audit:
        """What it adds to what workers do in the step."""
        of = self.sample
        return Audit(layer=of.layer, microbatch=of.microbatch, runner=self.runner, auditors=self.auditors)

    def found(self, worker: WorkerId, theirs: Iterable[Digests], ours: Iterable[Digests]) -> Audited:
        """Returns what an auditor tells of what the runner and it have computed."""
        said = [(self.runner, each) for each in theirs] + [(worker, each) for each in ours]
        return Audited(
            worker=worker,
            generation=self.generation,
            step=self.sample.step,
            layer=self.sample.layer,
            microbatch=self.sample.microbatch,
            runner=self.runner,
            claims=tuple(Computed(worker=who, **each._asdict()) for who, each in said),
        )


def audit_of(
    sampling: Sampling, step: int, plan: Plan, audits: Audits, generation: int, tell: Callable[[Audited], Any]
) -> StepAudit | None:
    """Returns the audit of a step that is run whole; None in most, and where nobody else owns the layer.

    Args:
        sampling: what the job audits.
        step: which.
        plan: by which it is run; with all routes.
        audits: how that goes on.
        generation: in which it is run.
        tell: makes an effect of a message to the coordinator.
    """
    found = sampling.of(step, plan)
    if found is None or found.layer in audits.unsteady:
        return None
    runner = _runner(plan, found)
    others = other_owners(sampling.seed, found, plan.placement.owners(found.layer), runner)
    disputed = audits.disputed == step
    if not others:
        return None
    return StepAudit(
        sample=found,
        generation=generation,
        runner=runner,
        auditors=others if disputed else others[:1],
        times=TIMES if disputed else 1,
        tell=tell,
    )


def item_of(sampling: Sampling, step: int, plan: Plan) -> tuple[int, WorkerId] | None:
    """Returns the micro-batch that two workers run whole in a step, and the one beside its runner; None in most."""
    number = sampling.item(step, plan)
    if number is None:
        return None
    found = Sample(step=step, layer=0, microbatch=number)
    others = other_owners(sampling.seed, found, plan.placement.owners(found.layer), _runner(plan, found))
    return (number, others[0]) if others else None


def _runner(plan: Plan, found: Sample) -> WorkerId:
    visits = (v for route in plan.routes.routes if route.microbatch.number == found.microbatch for v in route.visits)
    return next(visit.worker for visit in visits if found.layer in visit.layers)


def audit_messages(placement: Placement, worker: WorkerId) -> tuple[Receive, ...]:
    """Returns all that audits may let a worker expect in a step: of each layer, from each other owner."""
    return tuple(
        audit_message(layer, other)
        for layer in placement.held_layers(worker)
        for other in placement.owners(layer)
        if other != worker
    )
