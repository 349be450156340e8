"""Whether what is known suffices to replay layers that nobody holds, and what is ordered then."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.control.membership import GridState, Membership, Restoring
from holdfast.control.membership.replaying import TooLittle, order_replays
from holdfast.control.messages import CommitVote, ReplayOrder, StateAt, Status
from holdfast.core.ids import WorkerId
from holdfast.core.placement import group_into_nodes, split_evenly
from holdfast.planning.replays import Logging
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan

PLAN = regular_plan(1, split_evenly(6, 3), 2)
LOST = WorkerId(0, 1)
LOGGING = Logging(nodes=group_into_nodes(PLAN.workers, 1))


def membership(*, step, checkpoint, votes=(), logging=LOGGING):
    """All but one say that they hold what is theirs at ``step``; the newest checkpoint is of another."""
    blank = Membership(
        grid=GridState(baseline=PLAN),
        rules=JobRules(steps=9, wait_s=0.0, logging=logging),
        restoring=Restoring(restorable=(StateAt(url="store", step=checkpoint),)),
    )
    statuses = {
        worker: Status(
            worker=worker,
            generation=2,
            layer_steps=tuple((layer, step) for layer in PLAN.placement.layers_of(worker)),
            executed=(),
            votes=votes,
        )
        for worker in PLAN.workers
        if worker != LOST
    }
    return dataclasses.replace(blank, reports=dataclasses.replace(blank.reports, statuses=statuses))


VOTE = CommitVote(step=6, complete=True, value=b"all")
OTHERS = (CommitVote(step=6, complete=False, value=b"some"), CommitVote(step=3, complete=True, value=b"before"))


def test_the_lost_one_s_layers_are_replayed_from_the_checkpoint_up_to_where_the_others_are():
    _, outputs = order_replays(membership(step=7, checkpoint=5, votes=(VOTE,)), PLAN)
    (order,) = (each.command for each in outputs if isinstance(getattr(each, "command", None), ReplayOrder))
    (part,) = order.parts
    assert (part.layers.start, part.layers.stop, part.workers, part.start, part.stop) == (2, 4, (LOST,), 5, 7)
    assert (order.state, order.vote) == (StateAt(url="store", step=5), b"all")


def test_of_the_checkpoint_s_own_step_no_verdict_is_needed():
    _, outputs = order_replays(membership(step=5, checkpoint=5), PLAN)
    (order,) = (each.command for each in outputs if isinstance(getattr(each, "command", None), ReplayOrder))
    assert [(part.start, part.stop) for part in order.parts] == [(5, 5)]
    assert order.vote is None


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (membership(step=7, checkpoint=8, votes=(VOTE,)), "checkpoint is of step 8, and the others go on from step 7"),
        (membership(step=7, checkpoint=5), "nobody knows the verdict over step 6"),
        (membership(step=7, checkpoint=5, votes=OTHERS), "nobody knows the verdict over step 6"),
        (membership(step=7, checkpoint=5, votes=(VOTE,), logging=None), "nobody holds the state of any layer"),
    ],
)
def test_too_little_is_known(state, why):
    with pytest.raises(TooLittle, match=why):
        order_replays(state, PLAN)
