"""What an audit changes in the programs of a step: they end, whoever audits, and nobody else's change."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from holdfast.control.messages import Audits
from holdfast.core.ids import WorkerId, beside
from holdfast.core.instructions import Compute, Payload, Reduce, Send
from holdfast.core.lower import lower, lower_step
from holdfast.core.placement import split_evenly
from holdfast.core.plan import Plan
from holdfast.core.profile import unit_costs
from holdfast.core.validate import dry_run
from holdfast.planning.planner import Technique
from holdfast.planning.training import Terms, replanned
from holdfast.protocol.auditing import (
    CLAIMS_BYTES,
    TIMES,
    Digests,
    StepAudit,
    audit_messages,
    audit_of,
    pack_claims,
    unpack_claims,
)
from holdfast.recovery.audit import Sampling
from holdfast.schedule.builders import adaptive_plan, regular_plan


def plans() -> list[Plan]:
    whole = regular_plan(3, split_evenly(7, 3), 4)
    terms = Terms(technique=Technique.STAGGERED, costs=unit_costs(7), in_flight=6, ties=())
    return [whole, adaptive_plan(whole, [WorkerId(1, 1)]), replanned(whole, terms)]


def audits(plan: Plan, told: Audits) -> list[StepAudit]:
    made = (audit_of(Sampling(seed=seed, every=1), seed, plan, told, 3, lambda found: found) for seed in range(40))
    return [each for each in made if each is not None]


@pytest.mark.parametrize("plan", plans(), ids=["whole", "re-routed", "staggered"])
def test_an_audited_step_ends_and_its_programs_have_the_same_operations(plan: Plan) -> None:
    programs = lower(plan)
    for seed in range(12):
        told = Audits(disputed=seed if seed % 2 else None)
        audit = audit_of(Sampling(seed=seed, every=1), seed, plan, told, 3, list)
        assert audit is not None
        amended = [lower_step(replace(program.step, audit=audit.plan)) for program in programs]
        assert dry_run({program.worker: program.instructions for program in amended}) is None
        assert dry_run({program.worker: program.closing for program in amended}) is None
        for before, after in zip(programs, amended, strict=True):
            check_amended(plan, audit, before.worker, before.operations, after.operations)
            check_amended(plan, audit, before.worker, before.riding, after.riding)


def check_amended(plan: Plan, audit: StepAudit, worker: WorkerId, before: tuple, after: tuple) -> None:
    added = [each for each in after if each not in before]
    assert [each for each in after if isinstance(each, Compute)] == [
        each for each in before if isinstance(each, Compute)
    ]
    assert [each for each in after if isinstance(each, Reduce)] == [each for each in before if isinstance(each, Reduce)]
    if worker == audit.runner:
        assert added == [Send(Payload.AUDIT, beside(0, audit.sample.layer), each) for each in audit.auditors]
    elif worker in audit.auditors:
        assert [(each.payload, each.peer) for each in added] == [(Payload.AUDIT, audit.runner)]
        behind = after[after.index(added[0]) + 1 :]
        assert all(isinstance(each, Reduce) for each in behind)
        assert behind[0].reduction.layers == (audit.sample.layer,)
        assert set(added) <= set(audit_messages(plan.placement, worker))
    else:
        assert after == before


def test_who_audits():
    plan = plans()[0]
    for audit in audits(plan, Audits()):
        owners = set(plan.placement.owners(audit.sample.layer))
        assert audit.runner in owners
        assert (len(audit.auditors), audit.times, audit.disputed) == (1, 1, False)
        assert set(audit.auditors) < owners - {audit.runner}


def test_of_a_disputed_step_all_owners_do():
    plan = plans()[0]
    audit = audit_of(Sampling(seed=1, every=1), 5, plan, Audits(disputed=5), 3, list)
    assert {audit.runner, *audit.auditors} == set(plan.placement.owners(audit.sample.layer))
    assert (audit.times, audit.disputed) == (TIMES, True)


def test_layers_that_do_not_repeat_or_have_one_owner_are_not_audited():
    assert audits(plans()[0], Audits(unsteady=tuple(range(7)))) == []
    assert audits(regular_plan(1, split_evenly(7, 3), 4), Audits()) == []


def test_claims_travel():
    source = random.Random(3)
    made = [Digests(*(f"{source.getrandbits(256):064x}" for _ in range(3))) for _ in range(TIMES)]
    for count in (1, TIMES):
        data = pack_claims(made[:count])
        assert len(data) == CLAIMS_BYTES
        assert list(unpack_claims(data, count)) == made[:count]
