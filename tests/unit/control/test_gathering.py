"""How a job begins: nobody is started before there is room for all, and then each worker has a node."""

from dataclasses import replace

import pytest
from tests.processes import NODE, process_of
from tests.unit.control.test_agents import ELSEWHERE, NODES, PLAN, THERE, W00, W01, W10, W11, W20, W21, Job, agent, gone

from holdfast.control.membership import Closed, Phase, Tick, unplaced
from holdfast.control.membership.starting import Offer
from holdfast.control.membership.watching import AGENT_ALONE_S, WHOLE_NODE_S
from holdfast.control.messages import (
    BeginAnew,
    Exited,
    Fence,
    Hello,
    NodeLeaving,
    Remark,
    Started,
    StartWorker,
    WorkerOffer,
)
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId

SPARE = WorkerId(3, 0)


@pytest.fixture
def job():
    made = Job(PLAN)
    made.state = replace(made.blank, rules=replace(made.blank.rules, first_spares=(SPARE,)))
    return made


def offers(count):
    return (None,) * count


def remarks(job):
    return [command.text for _, command in job.told if isinstance(command, Remark)]


def test_one_agent_with_room_for_all_starts_all_and_the_spare(job):
    job.give(agent(NODE, offers=offers(7)))
    assert job.asked == [(worker, NODE) for worker in (*PLAN.workers, SPARE)]
    assert all(each.command.first for each in job.tells if isinstance(each.command, StartWorker))
    assert (unplaced(job.state), job.state.vacancies.offers, remarks(job)) == (0, (), [])


def test_nobody_is_started_before_there_is_room_for_all(job):
    assert unplaced(job.state) == 6
    job.give(agent(NODE, offers=offers(2)), agent(THERE, offers=offers(2)))
    assert (job.asked, unplaced(job.state)) == ([], 2)
    job.give(agent(ELSEWHERE, offers=offers(2)))
    by_node = {node: [worker for worker, at in job.asked if at == node] for node in NODES}
    assert sorted(by_node.values()) == [[W00, W01], [W10, W11], [W20, W21]]
    assert remarks(job) == ["6 workers begin on 3 nodes: any 2 of them may be lost, but the coordinator's"]


def test_room_may_be_offered_one_by_one(job):
    job.give(agent(NODE, offers=offers(5))).give(WorkerOffer(worker=None, node=NODE))
    assert [worker for worker, _ in job.asked] == [*PLAN.workers]


def test_who_offers_room_for_a_worker_is_asked_for_it_at_once(job):
    job.give(agent(THERE, offers=(W10, SPARE)))
    assert (job.asked, unplaced(job.state)) == ([(W10, THERE), (SPARE, THERE)], 5)


def test_room_of_an_agent_that_is_away_does_not_count(job):
    job.give(agent(NODE, offers=offers(3)), gone(NODE), agent(THERE, offers=offers(3)))
    assert (job.asked, unplaced(job.state)) == ([], 3)
    job.give(agent(NODE, offers=offers(3)))
    assert len(job.asked) == 6


def test_who_is_told_to_go_before_the_job_has_begun_is_not_asked_again(job):
    """Its workers have yet to come, or have attached: they are started where there is room, and told nothing."""
    job.give(agent(NODE, offers=offers(2)), agent(THERE, offers=offers(2)), agent(ELSEWHERE, offers=offers(2)))
    there = sorted(worker for worker, node in job.asked if node == THERE)
    late, early = there
    own = {worker: replace(process_of(worker, 1), node=THERE) for worker in there}
    job.give(*(Started(worker=worker, process=process) for worker, process in own.items()))
    job.give(Hello(worker=early, process=own[early]), NodeLeaving(process=agent(THERE).process))
    job.give(*(Exited(worker=worker, process=own[worker], status=143) for worker in there))
    assert (job.asked, job.state.phase) == ([], Phase.GATHERING)
    job.give(*[WorkerOffer(worker=None, node=NODE)] * 2)
    assert job.asked == [(late, NODE), (early, NODE)]
    job.give(*(Hello(worker=worker, process=process_of(worker, 2)) for worker in there))
    assert not job.state.roster.leaving


def test_room_that_is_left_stays_offered(job):
    job.give(agent(NODE, offers=offers(9)))
    assert job.state.vacancies.offers == (Offer(None, NODE), Offer(None, NODE))


def test_a_coordinator_that_is_started_again_learns_who_has_been_asked(job):
    """One agent has started its workers and been asked for another; the rest waits for room."""
    started = Started(worker=W00, process=process_of(W00, 1))
    job.give(agent(NODE, started=(started,), coming=(W00, W01)))
    assert (job.asked, unplaced(job.state), job.state.roster.where) == ([], 4, {W00: NODE, W01: NODE})
    job.give(agent(THERE, offers=offers(4)))
    assert [worker for worker, _ in job.asked] == [W10, W11, W20, W21]


def test_who_has_attached_already_is_not_expected_when_its_agent_is_back(job):
    job.give(Hello(worker=W00, process=process_of(W00, 1)), agent(NODE, coming=(W00,)))
    assert W00 not in job.state.roster.expected


def test_a_node_that_is_gone_before_the_job_has_begun_waits_for_room_elsewhere(job):
    job.give(agent(NODE, offers=offers(4)), agent(THERE, offers=offers(2)))
    lost, others = ([worker for worker, at in job.asked if at == node] for node in (THERE, NODE))
    job.give(gone(THERE), now=5.0).give(Tick(), now=5.0 + WHOLE_NODE_S)
    assert (job.asked, unplaced(job.state), job.state.phase) == ([], 2, Phase.GATHERING)
    job.give(agent(NODE, coming=tuple(others)))  # is back, and has no room
    assert job.asked == []
    job.give(agent(ELSEWHERE, offers=offers(2)))
    assert job.asked == [(worker, ELSEWHERE) for worker in lost]


def test_whoever_dies_while_starting_is_started_again_where_it_was(job):
    job.give(agent(NODE, offers=offers(6)))
    died = replace(process_of(W10, 1), node=NODE)
    job.give(Started(worker=W10, process=died), Exited(worker=W10, process=died, status=-9))
    assert job.asked == [(W10, NODE)]


def test_a_node_that_is_back_before_the_job_has_begun_may_come_as_another_one(job):
    """Its workers wait for room elsewhere; what it was starting is ended, and nobody counts on it."""
    job.give(agent(NODE, offers=offers(4)), agent(THERE, offers=offers(2)))
    lost, others = ([worker for worker, at in job.asked if at == node] for node in (THERE, NODE))
    started = tuple(Started(worker=worker, process=process_there(worker)) for worker in lost)
    job.give(*started).give(gone(THERE), now=5.0).give(Tick(), now=5.0 + AGENT_ALONE_S)
    job.give(agent(THERE, started=started, coming=tuple(lost)), now=6.0)
    assert [each.node for each in job.tells if isinstance(each.command, Fence)] == [THERE, THERE]
    assert (job.to(BeginAnew), unplaced(job.state)) == ([THERE], 2)
    job.give(*(Exited(worker=each.worker, process=each.process, status=-9) for each in started))
    job.give(agent(ELSEWHERE, offers=offers(2)))
    assert job.asked == [(worker, ELSEWHERE) for worker in lost]
    assert len(others) == 4


def test_nodes_may_be_lost_again_and_again_before_the_job_has_begun(job):
    """It waits for room; only a worker that fails by itself is started no third time."""
    job.give(agent(NODE, offers=offers(5)))
    for number in range(4):
        node = NodeId(name=f"node-{number}", nonce=f"{number:016x}")
        job.give(agent(node, offers=offers(1)))
        (worker,) = [worker for worker, at in job.asked if at == node]
        process = replace(process_of(worker, 1), node=node)
        job.give(Started(worker=worker, process=process))
        if number % 2:  # it has attached
            job.give(Hello(worker=worker, process=process), Closed(worker=worker, process=process), now=5.0 * number)
        job.give(gone(node), now=5.0 * number).give(Tick(), now=5.0 * number + AGENT_ALONE_S)
        assert (job.state.phase, unplaced(job.state)) == (Phase.GATHERING, 1)


def test_a_coordinator_that_follows_another_one_hears_all_agents_before_it_gives_out_workers(job):
    """Else one that has room may be asked for what another has started."""
    job.state = replace(job.state, contact=replace(job.state.contact, seats_from=1.0))
    job.give(agent(THERE, offers=offers(8)), now=0.1)
    job.give(agent(NODE, coming=PLAN.workers), now=0.2).give(Tick(), now=0.9)
    assert job.asked == []
    assert job.give(Tick(), now=1.0).asked == [(SPARE, THERE)]


def test_who_was_asked_for_twice_is_here_once(job):
    here, late = process_of(W00, 1), replace(process_of(W00, 2), node=THERE)
    job.give(Hello(worker=W00, process=here), Started(worker=W00, process=late))
    assert [each.node for each in job.tells if isinstance(each.command, Fence)] == [THERE]
    job.give(Exited(worker=W00, process=late, status=-9))
    assert job.state.roster.processes[W00] == here


def process_there(worker):
    return replace(process_of(worker, 1), node=THERE)
