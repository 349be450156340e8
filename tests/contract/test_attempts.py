"""One attempt at a job after another, by a store that several machines see: two never go on side by side."""

import threading
import uuid
from contextlib import closing

import msgspec
import pytest
from tests.waiting import LIMIT_S, until

from holdfast.control.chain.leading import end_for_good, is_led, lead, leads_at, show_life
from holdfast.control.chain.opening import open_chain
from holdfast.control.membership import GridState, StoredDecision
from holdfast.control.messages import Ended
from holdfast.core.placement import split_evenly
from holdfast.errors import CoordinatorUnavailable
from holdfast.schedule.builders import regular_plan

PLAN = regular_plan(1, split_evenly(1, 1), 1)
WHY = Ended(outcome="superseded", detail="", step=0, directory="", generations=0, lost_layers=())


def decision(revision):
    return StoredDecision(revision=revision, generation=1, grid=GridState(baseline=PLAN))


def leading(chain, by):
    return lead(chain, job="", by=16 * by, alone=True, note=print)[0]


@pytest.fixture(params=["folder", "etcd"])
def chain(request, tmp_path):
    url = f"file://{tmp_path}/chain"
    if request.param == "etcd":
        url = f"{request.getfixturevalue('shared_etcd')}/{uuid.uuid4().hex}"
    with closing(open_chain(url)) as opened:
        yield opened


def test_who_gives_signs_of_life_leads(chain):
    assert not is_led(chain), "nobody ever did"
    assert leads_at(chain) == ""
    one, deposed, listens = leading(chain, "a"), threading.Event(), []
    thread = threading.Thread(target=show_life, args=(one, deposed.set, lambda: "".join(listens)), daemon=True)
    thread.start()
    until(lambda: chain.said() is not None)
    assert leads_at(chain) == "", "it does not listen yet"
    assert is_led(chain)
    listens.append("n1:7000")
    until(lambda: leads_at(chain) == "n1:7000")
    while not deposed.is_set():  # its sign and that of one who leads later may cross
        chain.say(msgspec.json.encode({"number": 9, "by": 16 * "b", "count": 0}))
        deposed.wait(chain.beat_s / 10)
    thread.join()
    assert not is_led(chain)


def test_an_attempt_is_ended_once_and_whoever_led_learns_it(chain):
    one = leading(chain, "a")
    one.put(decision(1))
    end_for_good(chain, 16 * "b", WHY)
    end_for_good(chain, 16 * "c", WHY)
    assert isinstance(one.put(decision(2)).error, CoordinatorUnavailable)
    _, stored = lead(chain, job="", by=16 * "d", alone=True, note=print)
    assert (stored.ended, stored.revision) == (WHY, 1)
    assert not is_led(chain)


def test_who_leads_and_has_nothing_to_decide_learns_it_too(chain):
    one, deposed = leading(chain, "a"), threading.Event()
    one.put(decision(1))
    thread = threading.Thread(target=show_life, args=(one, deposed.set), daemon=True)
    thread.start()
    until(lambda: chain.said() is not None)
    end_for_good(chain, 16 * "b", WHY)
    thread.join(LIMIT_S)
    assert deposed.is_set()


def test_where_nothing_was_decided_nothing_is_to_be_ended(chain):
    end_for_good(chain, 16 * "b", WHY)
    assert chain.newest() is None
    end_for_good(chain, 16 * "b", WHY, decision(0))
    assert lead(chain, job="", by=16 * "c", alone=True, note=print)[1].ended == WHY


def test_who_was_to_lead_and_decided_nothing_so_far_can_be_ended(chain):
    one = leading(chain, "a")
    end_for_good(chain, 16 * "b", WHY, decision(0))
    assert isinstance(one.put(decision(1)).error, CoordinatorUnavailable)


def test_who_leads_a_chain_without_entries_is_the_first(chain):
    assert leading(chain, "a").first == 1
