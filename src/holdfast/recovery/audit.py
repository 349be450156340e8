"""Standing audit: what of a step is computed a second time by somebody else, and who is wrong if the bits differ."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.errors import ConfigError

__all__ = [
    "Claim",
    "AuditFinding",
    "Judgement",
    "Sample",
    "Sampling",
    "Strikes",
    "audits_weights",
    "judge",
    "other_owners",
    "sample",
]

STRIKES = 2
"""Whoever is wrong so often is told to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is computed a second time: one micro-batch's way through one layer, forward and backward.

    Attributes:
        step: in which.
        layer: index of the layer.
        microbatch: global number of the micro-batch.
    """

    step: int
    layer: int
    microbatch: int


def sample(seed: int, step: int, every: int, num_layers: int, num_microbatches: int) -> Sample | None:
    """Returns what is audited in a step; None in most.

    Of ``every`` steps in a row, counted from 0, one is drawn, and in it one of all (layer, micro-batch). Nobody has to
    tell anybody, and what is wrong regularly cannot keep out of its way.

    Args:
        seed: of the job.
        step: 0-based.
        every: N, in steps, at least 1.
        num_layers: of the model.
        num_microbatches: of a step, over all pipelines.

    Raises:
        ConfigError: a number is below 1.

    >>> [step for step in range(12) if sample(7, step, 4, 5, 6)]
    [2, 7, 9]
    """
    if min(every, num_layers, num_microbatches) < 1:
        raise ConfigError(
            f"an audit every {every} steps of {num_layers} layers and {num_microbatches} micro-batches is impossible: "
            "expected at least 1 each"
        )
    block, place = divmod(step, every)
    if _draw(seed, block, 0) % every != place:
        return None
    layer, microbatch = divmod(_draw(seed, block, 1) % (num_layers * num_microbatches), num_microbatches)
    return Sample(step=step, layer=layer, microbatch=microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a job audits.

    Attributes:
        seed: of the job.
        every: N: one step of so many is audited, and so often the weights of owners are compared.
        layers: whether samples are of one layer, and are computed again before their step is committed. False: of the
            loop of a script, which runs micro-batches whole: one of the last step before weights are compared is run by
            two workers, and what came of it is compared with the weights.
    """

    seed: int
    every: int
    layers: bool = True

    def of(self, step: int, plan: Plan) -> Sample | None:
        """Returns what is audited in a step of a plan before it is committed; see :func:`sample`."""
        if not self.layers:
            return None
        counted = plan.routes.microbatches
        found = sample(self.seed, step, self.every, plan.placement.num_layers, len(counted))
        return None if found is None else replace(found, microbatch=counted[found.microbatch].number)

    def item(self, step: int, plan: Plan) -> int | None:
        """Returns the micro-batch that two workers run in a step of a plan; None if all are run once."""
        if self.layers or not self.weighs(step):
            return None
        counted = plan.routes.microbatches
        return counted[_draw(self.seed, step, 3) % len(counted)].number

    def weighs(self, step: int) -> bool:
        """Returns whether owners compare their weights after a step; of a script, soon, and then more and more seldom.

        What is wrong with a script mostly is so from its beginning, and it may have fewer than N steps.
        """
        number = step + 1
        early = not self.layers and 1 < number < self.every and number & (number - 1) == 0
        return early or audits_weights(step, self.every)


def audits_weights(step: int, every: int) -> bool:
    """Returns whether owners of a layer compare its weights after a step: once in every so many steps, all layers.

    What is wrong in the weights of one owner shows in no gradient of others; so it is found within ``every`` steps.
    """
    return (step + 1) % every == 0


def other_owners(seed: int, found: Sample, owners: Iterable[WorkerId], ran: WorkerId) -> tuple[WorkerId, ...]:
    """Returns who can compute a sample again, in the order in which they are asked: each is first as often as another.

    Args:
        seed: of the job.
        found: the sample.
        owners: who holds its layer.
        ran: who has run it in this step.
    """
    others = sorted(set(owners) - {ran})
    start = _draw(seed, found.step, 2) % len(others) if others else 0
    return (*others[start:], *others[:start])


def _draw(seed: int, number: int, purpose: int) -> int:
    mixed = blake2b(struct.pack("<3q", seed, number, purpose), digest_size=8, person=b"audit").digest()
    return int.from_bytes(mixed, "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a worker says that it computed, and of what, as :func:`holdfast.optim.digest.tensors_sha256` tells it.

    Attributes:
        worker: who.
        inputs: digest of what went into the layer, forward and backward.
        result: digest of what came out: its output, the gradient of its input, and those of its weights.
    """

    worker: WorkerId
    inputs: str
    result: str


class AuditFinding(StrEnum):
    """What the claims about one sample come to."""

    AGREED = "agreed"
    """All say the same: the step may be committed."""
    ASK = "ask"
    """It is to be computed once more, by whom :attr:`Judgement.ask` says."""
    WRONG = "wrong"
    """Some are wrong, and it is known who."""
    UNSTEADY = "unsteady"
    """Two or more do not get the same twice: the program does not repeat.

    Nor does a lone owner; its hardware could be to blame, too.
    """
    UNDECIDED = "undecided"
    """Two or more stand by what they said: nobody can tell who is right."""
    INPUTS = "inputs"
    """They did not compute with the same: it was changed on its way, or where it was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A finding, and what follows from it.

    Attributes:
        finding: which.
        wrong: who is wrong, sorted; others are not known to be.
        ask: who is to compute the sample next.
        right: the digest of the right result, where two have it; else None.
    """

    finding: AuditFinding
    wrong: tuple[WorkerId, ...] = ()
    ask: tuple[WorkerId, ...] = ()
    right: str | None = None


def judge(claims: tuple[Claim, ...], others: tuple[WorkerId, ...]) -> Judgement:
    """Returns what claims about one sample come to.

    A result that two workers have is right, unless two others have another one: two do not become wrong in the same
    way. Where no two agree, the next owner is asked; where there is none left, all who were asked repeat it once.
    Whoever then contradicts itself is wrong; but if two do, the layer does not repeat: two do not break at once.

    Args:
        claims: in the order in which they were made; the first is by who ran the sample in its step.
        others: owners of the layer that were not asked yet, in order.

    Raises:
        ConfigError: there is no claim.
    """
    if not claims:
        raise ConfigError("nobody claims anything: expected who ran the sample to")
    if len({claim.inputs for claim in claims}) > 1:
        return Judgement(finding=AuditFinding.INPUTS)
    said: dict[WorkerId, list[str]] = {}
    for claim in claims:
        said.setdefault(claim.worker, []).append(claim.result)
    results = Counter(result for mine in said.values() for result in set(mine))
    if len(results) == 1 and len(claims) > 1:
        return Judgement(finding=AuditFinding.AGREED, right=claims[0].result)
    if sum(len(set(mine)) > 1 for mine in said.values()) > 1:
        return Judgement(finding=AuditFinding.UNSTEADY)
    confirmed = [result for result, workers in results.items() if workers > 1]
    if len(confirmed) == 1:
        return _wrong((worker for worker, mine in said.items() if set(mine) != set(confirmed)), confirmed[0])
    if confirmed:
        return Judgement(finding=AuditFinding.UNDECIDED)
    return _unconfirmed(said, others)


def _unconfirmed(said: Mapping[WorkerId, list[str]], others: tuple[WorkerId, ...]) -> Judgement:
    """No result is claimed by two workers."""
    if others:
        return Judgement(finding=AuditFinding.ASK, ask=others[:1])
    if once := sorted(worker for worker, mine in said.items() if len(mine) == 1):
        return Judgement(finding=AuditFinding.ASK, ask=tuple(once))
    wavering = [worker for worker, mine in said.items() if len(set(mine)) > 1]
    if len(said) == 1:
        return Judgement(finding=AuditFinding.UNSTEADY)
    return _wrong(wavering) if wavering else Judgement(finding=AuditFinding.UNDECIDED)


def _wrong(workers: Iterable[WorkerId], right: str | None = None) -> Judgement:
    return Judgement(finding=AuditFinding.WRONG, wrong=tuple(sorted(workers)), right=right)


@dataclass(frozen=True, slots=True)
class Strikes:
    """How often workers were found to be wrong.

    Attributes:
        counts: per worker that ever was, sorted.

    >>> one = WorkerId(0, 1)
    >>> Strikes().add([one]).leaving, Strikes().add([one]).add([one]).leaving
    ((), (WorkerId(pipeline=0, stage=1),))
    """

    counts: tuple[tuple[WorkerId, int], ...] = ()

    def add(self, workers: Iterable[WorkerId]) -> Strikes:
        """Returns the strikes after these workers were wrong once more."""
        counts = Counter(dict(self.counts))
        counts.update(workers)
        return Strikes(tuple(sorted(counts.items())))

    def without(self, gone: Iterable[WorkerId]) -> Strikes:
        """Returns the strikes once these workers are gone: whoever takes such a place begins anew."""
        absent = frozenset(gone)
        return Strikes(tuple(each for each in self.counts if each[0] not in absent))

    @property
    def leaving(self) -> tuple[WorkerId, ...]:
        """Who has been wrong too often: it is told to leave."""
        return tuple(worker for worker, count in self.counts if count >= STRIKES)
