"""Several nodes, with an agent each: who is asked, who is told, and what it means that one is away."""

from dataclasses import replace

import msgspec
import pytest
from tests.processes import NODE, process_of
from tests.unit.control.decided import DecidedJob

from holdfast.control.membership import Closed, Phase, Restoring, Tell, Tick, decide, node_due
from holdfast.control.membership.starting import Offer
from holdfast.control.membership.watching import AGENT_ALONE_S, BACK_S, WHOLE_NODE_S
from holdfast.control.messages import (
    BeginAnew,
    Exited,
    Fence,
    Heartbeat,
    Hello,
    Leaving,
    Left,
    NodeLeaving,
    Started,
    StartWorker,
    StateAt,
    Strike,
    Suspect,
    WorkerOffer,
)
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import split_evenly
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Detected, Installed, Notice

PLAN = regular_plan(3, split_evenly(2, 2), 1)
W00, W01, W10, W11, W20, W21 = PLAN.workers
THERE, ELSEWHERE = NodeId(name="there", nonce=16 * "b"), NodeId(name="elsewhere", nonce=16 * "c")
NODES = (NODE, THERE, ELSEWHERE)
"""A pipeline each."""


def process(worker, number=1, node=None):
    return replace(process_of(worker, number), node=node or NODES[worker.pipeline])


def agent(node, **more):
    return Hello(worker=None, process=replace(process_of(None, 1), node=node), **more)


def gone(node):
    return Closed(worker=None, process=agent(node).process)


def closed(*workers):
    return [Closed(worker=worker, process=process(worker)) for worker in workers]


def died(worker):
    return Exited(worker=worker, process=process(worker), status=-9)


class Job(DecidedJob):
    def give(self, *events, now=0.0):
        self.asked, self.tells = [], []
        told, recorded = [], []
        for event in events:
            _, outputs = decide(self.state, event, now=now)
            self.tells += [each for each in outputs if isinstance(each, Tell)]
            super().give(event, now=now)
            told, recorded = told + self.told, recorded + self.recorded
        self.told, self.recorded = told, recorded
        self.asked = [(each.command.worker, each.node) for each in self.tells if isinstance(each.command, StartWorker)]
        return self

    def to(self, kind):
        """The nodes whose agents, or the workers that, were told this."""
        return [each.node or each.to for each in self.tells if isinstance(each.command, kind)]


def begun_on_three_nodes():
    """A job all of whose workers run, each pipeline on a node of its own."""
    made = Job(PLAN, strategy="adaptive")
    made.state = made.blank
    made.give(*map(agent, NODES))
    return made.give(*(Hello(worker=worker, process=process(worker)) for worker in PLAN.workers)).agreed(0)


@pytest.fixture
def job():
    return begun_on_three_nodes()


def test_a_process_is_ended_by_the_agent_of_its_node(job):
    job.give(died(W10))
    assert job.to(Fence) == [THERE]


def test_a_fault_is_carried_out_by_the_agent_of_its_worker(job):
    assert job.give(Strike(worker=W21, spec="kill-node:2@1:start")).to(Strike) == [ELSEWHERE]


def test_whoever_offers_is_asked(job):
    job.give(died(W10)).give(WorkerOffer(worker=None, node=ELSEWHERE))
    assert (job.asked, dict(job.state.roster.where)) == ([(W10, ELSEWHERE)], {W10: ELSEWHERE})
    job.give(Hello(worker=W10, process=process(W10, 2, ELSEWHERE)))
    assert (job.state.roster.expected, dict(job.state.roster.where)) == (frozenset(), {})


def test_nobody_is_started_where_an_agent_was_told_to_go(job):
    leaves = NodeLeaving(process=agent(THERE).process)
    job.give(WorkerOffer(worker=None, node=THERE), leaves, leaves)
    assert [event.text for event in job.recorded] == ["node there was told to go: its workers leave"]
    assert job.give(died(W00)).asked == []
    assert job.give(WorkerOffer(worker=None, node=ELSEWHERE)).asked == [(W00, ELSEWHERE)]


def test_who_follows_learns_that_an_agent_was_told_to_go(job):
    job.give(gone(THERE)).give(agent(THERE, leaving=True))
    assert job.state.contact.staying == (ELSEWHERE, NODE)
    job.give(gone(THERE), *closed(W10, W11), now=5.0).give(Tick(), now=5.0 + WHOLE_NODE_S)
    told = [event.text for event in job.recorded if isinstance(event, Notice)]
    assert "node there is gone: its agent has lost its connection, and is not back" in told, "its workers had not left"
    assert not job.state.contact.leaving


def test_whoever_was_being_started_on_a_node_that_is_to_go_is_started_elsewhere(job):
    job.give(died(W10)).give(WorkerOffer(worker=None, node=THERE))
    assert job.asked == [(W10, THERE)]
    coming = process(W10, 2)
    job.give(Started(worker=W10, process=coming), NodeLeaving(process=agent(THERE).process))
    job.give(WorkerOffer(worker=None, node=ELSEWHERE))
    job.give(Exited(worker=W10, process=coming, status=143))
    assert job.asked == [(W10, ELSEWHERE)]
    assert job.give(Exited(worker=W10, process=process(W10, 3, ELSEWHERE), status=-9)).asked == [(W10, ELSEWHERE)]


def test_an_agent_that_has_left_is_not_waited_for(job):
    leaves = NodeLeaving(process=agent(THERE).process)
    left = msgspec.structs.replace(leaves, left=True)
    job.give(leaves, *(Left(worker=w, process=process(w), generation=2, step=1) for w in (W10, W11)))
    job.give(left, gone(THERE), left)
    assert [event.text for event in job.recorded] == ["node there has left"]
    assert job.state.contact.here == (ELSEWHERE, NODE)
    assert list(job.state.contact.agents) == sorted(job.state.contact.agents, key=(NODE, ELSEWHERE).index)


def test_where_a_worker_left_by_itself_its_place_is_filled_once_it_has_ended(job):
    """Its agent was asked for it before that, and starts none while the old one runs."""
    job.give(WorkerOffer(worker=None, node=THERE), Leaving(worker=W10))
    job.give(Left(worker=W10, process=process(W10), generation=2, step=1))
    assert job.asked == [(W10, THERE)]
    assert job.give(Exited(worker=W10, process=process(W10), status=0)).asked == [(W10, THERE)]
    job.give(Started(worker=W10, process=process(W10, 2)), Exited(worker=W10, process=process(W10), status=0))
    assert job.asked == []


def test_where_its_place_is_filled_elsewhere_its_end_is_no_news(job):
    job.give(WorkerOffer(worker=None, node=ELSEWHERE), Leaving(worker=W10))
    job.give(Left(worker=W10, process=process(W10), generation=2, step=1))
    assert job.asked == [(W10, ELSEWHERE)]
    assert job.give(Exited(worker=W10, process=process(W10), status=0)).asked == []


def test_who_has_left_while_another_coordinator_has_taken_it_for_a_member_is_lost_at_once(job):
    job.give(died(W20))
    stale = Left(worker=W10, process=process(W10), generation=1, step=1)
    assert job.give(msgspec.structs.replace(stale, process=process(W10, 0))).recorded == []
    assert [event.worker for event in job.give(stale).recorded if isinstance(event, Detected)] == ["1.0"]


def test_what_an_agent_offers_that_is_away_waits_for_it(job):
    job.give(died(W10)).give(WorkerOffer(worker=W20, node=THERE), gone(THERE), died(W20))
    assert (job.asked, job.state.vacancies.offers) == ([], (Offer(W20, THERE),))
    assert job.give(agent(THERE, offers=(W20,))).asked == [(W20, THERE)]


def test_one_that_failed_to_start_is_started_again_where_it_was(job):
    job.give(died(W10)).give(WorkerOffer(worker=None, node=ELSEWHERE))
    first = process(W10, 2, ELSEWHERE)
    job.give(Started(worker=W10, process=first), Exited(worker=W10, process=first, status=1))
    assert job.asked == [(W10, ELSEWHERE)]


def test_where_its_node_is_gone_it_is_started_where_the_fewest_are(job):
    job.give(died(W10)).give(WorkerOffer(worker=None, node=THERE))
    assert job.asked == [(W10, THERE)]
    job.give(gone(THERE), *closed(W11)).give(died(W20), Tick(), now=WHOLE_NODE_S)
    assert job.asked == [(W10, ELSEWHERE)]


def test_the_hello_of_an_agent_is_about_its_own_node(job):
    job.give(died(W10), died(W21)).agreed(2)
    job.give(WorkerOffer(worker=W10, node=THERE), WorkerOffer(worker=W21, node=ELSEWHERE))
    assert job.asked == [(W10, THERE), (W21, ELSEWHERE)]
    job.give(gone(THERE)).give(agent(THERE))
    assert job.to(Fence) == [THERE]
    assert (job.asked, job.state.roster.expected) == ([], {W21}), "it does not know of what it was asked for"


def test_who_is_not_there_is_asked_for_by_the_first_agent_that_is_back(job):
    """A strategy that waits for all wants one started, and nobody can be asked."""
    start = Restoring(restorable=(StateAt(url=None, step=0),))
    waits = Job(PLAN, strategy="checkpoint-restart", wait_s=60.0, restoring=start)
    waits.state = waits.blank
    waits.give(*map(agent, NODES)).give(*(Hello(worker=w, process=process(w)) for w in PLAN.workers)).agreed(0)
    waits.give(*map(gone, NODES)).give(died(W10))
    assert (waits.asked, waits.state.roster.expected, dict(waits.state.roster.where)) == ([], {W10}, {})
    assert waits.give(agent(ELSEWHERE)).asked == [(W10, ELSEWHERE)]
    assert waits.give(agent(THERE)).asked == [], "it is on its way"


def test_a_node_is_gone_with_all_that_was_on_it(job):
    job.give(WorkerOffer(worker=None, node=THERE)).give(gone(THERE), *closed(W10, W11), now=5.0)
    assert node_due(job.state) == 5.0 + WHOLE_NODE_S
    assert job.give(Tick(), now=5.0 + WHOLE_NODE_S - 1e-3).recorded == []
    job.give(Tick(), now=5.0 + WHOLE_NODE_S)
    assert [(event.worker, event.how) for event in job.recorded if isinstance(event, Detected)] == [
        ("1.0", "its node there is gone"),
        ("1.1", "its node there is gone"),
    ]
    assert len([event for event in job.recorded if isinstance(event, Installed)]) == 1
    assert (job.state.vacancies.offers, node_due(job.state)) == ((), None)


def test_while_one_of_its_workers_has_a_connection_its_agent_is_given_more_time(job):
    job.give(gone(THERE), *closed(W10), now=5.0)
    assert node_due(job.state) == 5.0 + AGENT_ALONE_S
    job.give(*closed(W11), now=5.2)
    assert node_due(job.state) == 5.2 + WHOLE_NODE_S
    job.give(agent(THERE), now=5.22)
    assert (node_due(job.state), job.give(Tick(), now=6.0).state.roster.lost) == (None, frozenset())


def beat(worker):
    return Heartbeat(worker=worker, generation=1, step=0, op=0, slowest_s=0.1)


def test_a_host_that_is_silent_is_given_no_more_time_though_connections_stand(job):
    """No worker there had been heard for two heartbeats when its agent's connection ended."""
    job.give(*map(beat, PLAN.workers), Tick(), now=4.0).give(Tick(), now=4.2).give(gone(THERE), now=5.0)
    assert node_due(job.state) == 5.0 + WHOLE_NODE_S
    job.give(beat(W10), now=5.01)
    assert node_due(job.state) == 5.0 + AGENT_ALONE_S


def test_a_worker_that_nobody_reaches_is_lost_with_its_node_if_its_agent_is_away(job):
    """One event, though its agent has not been away for as long as it is given, nor the other worker silent."""
    for tenth in range(10):
        job.give(*(beat(each) for each in PLAN.workers if each != W10 or tenth == 0), Tick(), now=4.0 + tenth / 10)
    job.give(Suspect(worker=W00, generation=1, peer=W10, detail="silent"), gone(THERE), now=4.95)
    assert job.give(*(beat(each) for each in PLAN.workers if each != W10), Tick(), now=4.98).recorded == []
    job.give(Tick(), now=5.05)
    assert [event.worker for event in job.recorded if isinstance(event, Detected)] == ["1.0", "1.1"]
    assert {event.how for event in job.recorded if isinstance(event, Detected)} == {"its node there is gone"}


def test_nobody_is_judged_while_no_agent_is_there_and_time_begins_when_one_is(job):
    job.give(*map(gone, NODES), *closed(*PLAN.workers), now=5.0)
    assert node_due(job.state) is None
    assert job.give(Tick(), now=6.0).state.roster.lost == frozenset()
    job.give(agent(NODE), now=6.5)
    assert node_due(job.state) == 6.5 + WHOLE_NODE_S
    job.give(agent(THERE), now=6.51).give(Tick(), now=6.5 + WHOLE_NODE_S)
    assert job.state.roster.lost == {W20, W21}


def test_a_node_without_workers_is_forgotten(job):
    spare = NodeId(name="spare", nonce=16 * "d")
    job.give(agent(spare, offers=(None,))).give(gone(spare), now=5.0).give(Tick(), now=5.1)
    assert [type(event) for event in job.recorded] == [Notice]
    assert (job.state.roster.lost, job.state.vacancies.offers) == (frozenset(), ())


def test_before_the_job_has_begun_its_workers_are_started_elsewhere():
    job = Job(PLAN)
    job.state = job.blank
    job.give(agent(NODE, started=(Started(worker=W00, process=process(W00)),), offers=(None, None)))
    job.give(
        agent(THERE, started=(Started(worker=W10, process=process(W10)), Started(worker=W11, process=process(W11))))
    )
    job.give(Hello(worker=W10, process=process(W10)))
    job.give(gone(THERE), *closed(W10), now=5.0).give(Tick(), now=5.0 + WHOLE_NODE_S)
    assert job.state.phase is Phase.GATHERING
    assert [(each.command, each.node) for each in job.tells if isinstance(each.command, StartWorker)] == [
        (StartWorker(worker=W10, first=True), NODE),
        (StartWorker(worker=W11, first=True), NODE),
    ]


def test_what_is_left_on_a_node_that_was_held_to_be_gone_is_ended(job):
    """One whose place another has taken, and one that was on its way."""
    job.give(gone(THERE), *closed(W10, W11)).give(Tick(), now=WHOLE_NODE_S).agreed(2)
    job.give(WorkerOffer(worker=W10, node=ELSEWHERE)).give(Hello(worker=W10, process=process(W10, 2, ELSEWHERE)))
    left = tuple(Started(worker=worker, process=process(worker)) for worker in (W10, W11))
    job.give(agent(THERE, started=left))
    ended = [(each.command.worker, each.node) for each in job.tells if isinstance(each.command, Fence)]
    assert sorted(ended) == [(W10, THERE), (W11, THERE)]
    assert job.to(BeginAnew) == [THERE]
    assert W10 not in job.state.vacancies.starting.since


def test_a_node_that_is_back_comes_anew_though_its_workers_have_ended_before(job):
    """They were told first that they are none of ours."""
    job.give(gone(THERE), *closed(W10, W11)).give(Tick(), now=WHOLE_NODE_S).agreed(2)
    job.give(agent(THERE, exits=(died(W10), died(W11))))
    assert job.to(BeginAnew) == [THERE]
    assert job.give(agent(ELSEWHERE, exits=(died(W20),))).to(BeginAnew) == [], "it has never been away"


def test_a_node_that_was_not_held_to_be_gone_goes_on(job):
    """Though its worker was lost while it was away for a moment, and is to be started there again."""
    job.give(died(W10), died(W11)).give(gone(THERE), now=5.0)
    job.give(agent(THERE, exits=(died(W10), died(W11))), now=5.1)
    assert job.to(BeginAnew) == []


def test_one_that_was_on_its_way_on_a_node_that_is_back_does_not_keep_its_place_from_others(job):
    job.give(died(W10)).give(WorkerOffer(worker=W10, node=THERE))
    first, second = process(W10, 2, THERE), process(W10, 3, ELSEWHERE)
    job.give(Started(worker=W10, process=first)).give(gone(THERE), *closed(W11)).give(Tick(), now=WHOLE_NODE_S)
    assert job.asked == [(W10, ELSEWHERE)]
    job.give(agent(THERE, started=(Started(worker=W10, process=first),)))
    assert (None, Fence(worker=W10, process=first)) in job.told
    job.give(Started(worker=W10, process=second), Exited(worker=W10, process=second, status=1))
    job.give(WorkerOffer(worker=W10, node=THERE), Started(worker=W10, process=process(W10, 4, THERE)))
    job.give(Exited(worker=W10, process=first, status=-9), Hello(worker=W10, process=process(W10, 4, THERE)))
    assert (job.state.roster.expected, W10 in job.state.roster.lost) == (frozenset(), False)


def test_two_that_are_offered_for_a_place_that_was_given_up_are_two(job):
    """Where the grid can grow, both come as spares."""
    job.state = replace(job.state, rules=replace(job.state.rules, weighs=True))
    given_up = WorkerId(7, 0)
    job.give(WorkerOffer(worker=given_up, node=THERE), WorkerOffer(worker=given_up, node=ELSEWHERE))
    job.give(agent(NODE, offers=(given_up, given_up)))
    assert len({worker for worker, _ in job.asked}) == len(job.asked)
    assert [node for _, node in job.asked] == [NODE, NODE]


def test_parts_of_one_machine_have_one_agent(job):
    """As nodes that are emulated have: they can lose the way to each other, but live and die together."""
    part = replace(NODE, name="part")
    job.give(died(W00), died(W01)).agreed(2)
    job.give(Hello(worker=W00, process=process(W00, 2, part)))
    job.give(gone(NODE), Closed(worker=W00, process=process(W00, 2, part)), now=5.0).give(Tick(), now=5.1)
    assert W00 in job.state.roster.lost
    assert "its node here is gone" in {event.how for event in job.recorded if isinstance(event, Detected)}


def test_the_next_coordinator_knows_who_was_asked_and_asks_another_for_whom_a_lost_node_was(job):
    job.give(died(W10)).give(WorkerOffer(worker=W10, node=ELSEWHERE))
    job.restarted()
    assert (dict(job.state.roster.where), job.state.contact.here) == ({W10: ELSEWHERE}, ())
    back = [W00, W01, W11]
    job.give(agent(NODE), agent(THERE), *(Hello(worker=w, process=process(w), generation=2) for w in back), now=1.0)
    assert job.asked == []
    assert node_due(job.state) == 1.0 + BACK_S
    job.give(Tick(), now=1.0 + BACK_S)
    assert job.state.roster.lost == {W10, W20, W21}
    assert job.asked == [(W10, THERE)], "it has one worker, and the other two"


def alone(job, **known):
    """All but its own node are away since 5 s."""
    job.state = replace(job.state, contact=replace(job.state.contact, home=NODE, **known))
    others = [closed(worker)[0] for worker in PLAN.workers if worker.pipeline]
    return job.give(gone(THERE), gone(ELSEWHERE), *others, now=5.0)


def test_who_reaches_no_other_node_decides_nothing_for_as_long_as_these_wait(job):
    """It is said once."""
    alone(job, patience_s=60.0).give(Tick(), now=5.1)
    assert [event.text for event in job.recorded] == [
        "no other node is reached: nothing is decided before one is, or 60 s have passed"
    ]
    assert node_due(job.state) == 65.0
    job.give(Tick(), now=9.0).give(Tick(), now=64.9)
    assert (job.state.roster.lost, job.recorded) == (frozenset(), [])
    job.give(Tick(), now=65.0)
    assert job.state.roster.lost == {W10, W11, W20, W21}


def test_who_reaches_another_node_again_decides_at_once(job):
    alone(job).give(Tick(), now=5.1).give(agent(THERE), now=6.0)
    job.give(*(Hello(worker=w, process=process(w), generation=1, activity="running") for w in (W10, W11)), now=6.0)
    job.give(Tick(), now=6.1)
    assert job.state.roster.lost == {W20, W21}


def test_of_two_nodes_one_is_held_to_be_gone_at_once(job):
    job.give(gone(ELSEWHERE), *closed(W20, W21), now=2.0).give(Tick(), now=2.1).agreed(1)
    job.state = replace(job.state, contact=replace(job.state.contact, home=NODE))
    job.give(gone(THERE), *closed(W10, W11), now=5.0).give(Tick(), now=5.1)
    assert job.state.roster.lost == {W10, W11, W20, W21}


def test_where_others_may_lead_it_is_for_the_store_to_say_whether_one_does(job):
    """What is put there changes nothing; the next look, at once, decides."""
    alone(job, others_lead=True)
    revision = job.state.revision
    job.give(Tick(), now=5.1)
    assert (job.state.revision, job.state.roster.lost) == (revision + 1, frozenset())
    assert node_due(job.state) < 5.1
    job.give(Tick(), now=5.11)
    assert job.state.roster.lost == {W10, W11, W20, W21}
    assert job.state.revision == revision + 2


def test_who_takes_over_does_without_a_node_that_is_not_back_if_all_others_hold_every_layer(job):
    job.restarted()
    back = {THERE: (W10, W11), NODE: (W00, W01)}
    for node, workers in back.items():
        job.give(agent(node), now=2.0)
        job.give(*(Hello(worker=w, process=process(w), generation=1, activity="running") for w in workers), now=2.0)
    assert node_due(job.state) == 2.0 + BACK_S
    job.give(Tick(), now=2.0 + BACK_S)
    assert job.state.roster.lost == {W20, W21}
    assert job.state.phase is Phase.FORMING


def test_who_takes_over_waits_for_a_node_without_which_a_layer_is_lost(job):
    job.restarted()
    job.give(agent(NODE), Hello(worker=W00, process=process(W00), generation=1, activity="running"), now=2.0)
    assert node_due(job.state) == 60.0 + AGENT_ALONE_S


def test_one_that_was_back_and_is_away_again_is_given_time_though_all_others_are_back(job):
    job.restarted()
    for node, workers in {NODE: (W00, W01), THERE: (W10, W11), ELSEWHERE: (W20,)}.items():
        job.give(agent(node), now=2.0)
        job.give(*(Hello(worker=w, process=process(w), generation=1, activity="running") for w in workers), now=2.0)
    job.give(gone(ELSEWHERE), now=4.0)
    assert node_due(job.state) == 4.0 + AGENT_ALONE_S


def test_one_whose_workers_are_back_is_waited_for_and_they_hold_nothing_before_its_agent_is(job):
    job.restarted()
    for node, workers in {NODE: (W00,), None: (W11,)}.items():
        if node:
            job.give(agent(node), now=2.0)
        job.give(*(Hello(worker=w, process=process(w), generation=1, activity="running") for w in workers), now=2.0)
    assert node_due(job.state) == 60.0 + AGENT_ALONE_S
    job.give(agent(ELSEWHERE), Hello(worker=W21, process=process(W21), generation=1, activity="running"), now=2.1)
    assert node_due(job.state) == 60.0 + AGENT_ALONE_S, "of the node of W11 somebody was seen"


def test_whom_nobody_reaches_though_another_may_lead_gives_nobody_up(job):
    job.restarted()
    job.state = replace(job.state, contact=replace(job.state.contact, home=NODE, others_lead=True))
    assert job.give(Tick(), now=61.0).state.roster.lost == frozenset()
    job.give(agent(NODE), now=62.0).give(Tick(), now=61.9 + BACK_S)
    assert job.state.roster.lost == frozenset()
    assert job.give(Tick(), Tick(), now=62.0 + BACK_S).state.roster.lost == set(PLAN.workers)
