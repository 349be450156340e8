"""Which agents are to start coordinators, and what all are told of these."""

from dataclasses import replace

import pytest
from tests.processes import process_of

from holdfast.control.messages import CoordinatorsAt, Hello, StandingBy
from holdfast.control.standbys import Standbys
from holdfast.core.nodes import NodeId

HEAD, ONE, TWO, THREE = (
    replace(process_of(None, 1), node=NodeId(name=name, nonce=16 * name[0])) for name in ("a", "b", "c", "d")
)
ALL = (HEAD, ONE, TWO, THREE)


@pytest.fixture
def three():
    """Three are wanted; the first one has begun the job, and all others have come."""
    known = Standbys(3)
    known.heard(Hello(worker=None, process=HEAD, coordinators=("a:7",)))
    for agent in ALL[1:]:
        known.heard(Hello(worker=None, process=agent))
    return known


def at(*addresses):
    return CoordinatorsAt(addresses=addresses)


def test_as_many_are_asked_as_are_wanted_besides_us(three):
    assert three.to_ask(ALL) == (ONE, TWO)
    assert three.to_ask(ALL) == (), "they are on their way"
    assert three.news() == at("a:7")
    three.heard(StandingBy(process=ONE, address="b:7"))
    assert (three.news(), three.news(), three.at) == (at("a:7", "b:7"), None, at("a:7", "b:7"))


def test_who_cannot_is_not_asked_again(three):
    three.to_ask(ALL)
    three.heard(StandingBy(process=ONE, address=""))
    assert three.to_ask(ALL) == (THREE,)
    three.heard(StandingBy(process=THREE, address=""))
    assert three.to_ask(ALL) == ()


def test_one_that_cannot_be_kept_alive_is_told_of_no_more_and_another_is_asked(three):
    for agent, address in zip(three.to_ask(ALL), ("b:7", "c:7"), strict=True):
        three.heard(StandingBy(process=agent, address=address))
    assert three.news() == at("a:7", "b:7", "c:7")
    three.heard(StandingBy(process=ONE, address=""))
    assert (three.to_ask(ALL), three.news()) == ((THREE,), at("a:7", "c:7"))


def test_in_the_place_of_one_whose_node_is_gone_another_is_asked(three):
    for agent, address in zip(three.to_ask(ALL), ("b:7", "c:7"), strict=True):
        three.heard(StandingBy(process=agent, address=address))
    three.only([ONE, TWO, THREE])
    assert three.to_ask((ONE, TWO, THREE)) == (THREE,)
    assert three.news() == at("b:7", "c:7")


def test_those_whose_nodes_are_to_go_are_told_of_as_such_and_others_are_started_before(three):
    for agent, address in zip(three.to_ask(ALL), ("b:7", "c:7"), strict=True):
        three.heard(StandingBy(process=agent, address=address))
    three.leaving = frozenset({HEAD, ONE, TWO})
    assert three.to_ask(ALL) == (THREE,)
    assert three.news() == CoordinatorsAt(addresses=("a:7", "b:7", "c:7"), leaving=("a:7", "b:7", "c:7"))
    three.heard(StandingBy(process=THREE, address="d:7"))
    assert three.news() == CoordinatorsAt(addresses=("a:7", "b:7", "c:7", "d:7"), leaving=("a:7", "b:7", "c:7"))


def test_who_has_lost_its_connection_may_not_have_heard(three):
    three.to_ask(ALL)
    three.heard(Hello(worker=None, process=ONE))
    assert three.to_ask(ALL) == (ONE,)


def test_a_job_with_one_coordinator_asks_nobody_and_tells_nothing():
    known = Standbys(1)
    known.heard(Hello(worker=None, process=HEAD, coordinators=("a:7",)))
    known.heard(Hello(worker=None, process=ONE))
    assert (known.to_ask(ALL), known.news()) == ((), None)
