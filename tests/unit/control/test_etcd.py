"""Leadership and decisions in a real etcd."""

import threading

import pytest

from holdfast.config.load import parse_job
from holdfast.control.etcd import EtcdStore, Leadership, parse_store_url
from holdfast.control.store import StoredDecision
from holdfast.core.builders import regular_plan
from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.errors import ConfigError, CoordinatorUnavailable, StorageError

PLAN = regular_plan(2, split_evenly(2, 1), 1)
LIMIT_S = 20.0


def decision(number, lost=()):
    return StoredDecision(revision=number, generation=1, healthy=PLAN, plan=PLAN, lost=lost)


class Coordinator:
    """What of a coordinator speaks to etcd."""

    def __init__(self, server):
        self.lost = threading.Event()
        self.leadership = Leadership(server.etcd, "job", self.lost.set)
        self.store = EtcdStore(server.etcd, "job", self.leadership)


def expire(server):
    """Lets the leader's lease run out at once, as if it had been stopped for long."""
    for lease in server.etcd.call("lease/leases", {})["leases"]:
        server.etcd.call("lease/revoke", {"ID": lease["ID"]})


def test_decisions_are_remembered_in_order(etcd_server):
    one = Coordinator(etcd_server)
    assert one.store.latest() is None
    one.leadership.win()
    for number in (1, 2, 10):
        one.store.put(decision(number))
    assert one.store.latest() == decision(10)
    assert Coordinator(etcd_server).store.latest() == decision(10)


def test_a_decision_whose_answer_was_lost_may_be_stored_again_but_not_another_under_its_number(etcd_server):
    one = Coordinator(etcd_server)
    one.leadership.win()
    one.store.put(decision(1))
    one.store.put(decision(1))
    with pytest.raises(StorageError, match="decision 1 is stored already"):
        one.store.put(decision(1, lost=(WorkerId(0, 0),)))
    assert one.store.latest() == decision(1)


def test_who_leads_no_more_cannot_decide(etcd_server):
    old, new = Coordinator(etcd_server), Coordinator(etcd_server)
    old.leadership.win()
    old.store.put(decision(1))
    expire(etcd_server)
    with pytest.raises(CoordinatorUnavailable, match="does not lead any more"):
        old.store.put(decision(2))
    new.leadership.win()
    with pytest.raises(CoordinatorUnavailable, match="does not lead any more"):
        old.store.put(decision(2))
    new.store.put(decision(2, lost=(WorkerId(0, 0),)))
    assert new.store.latest() == decision(2, lost=(WorkerId(0, 0),))
    assert old.lost.wait(LIMIT_S), "it is told when it tries to renew its lease"
    assert not new.lost.is_set()


def test_only_one_leads(etcd_server):
    first, second = Coordinator(etcd_server), Coordinator(etcd_server)
    first.leadership.win()
    won = threading.Event()

    def stand_by():
        second.leadership.win()
        won.set()

    threading.Thread(target=stand_by, daemon=True).start()
    assert not won.wait(3.0), "the leader renews its lease, which would have run out by now"
    expire(etcd_server)
    assert won.wait(LIMIT_S)


def test_decisions_wait_for_an_etcd_that_is_away(etcd_server):
    one = Coordinator(etcd_server)
    one.leadership.win()
    one.store.put(decision(1))
    etcd_server.kill()
    stored = threading.Event()

    def put():
        one.store.put(decision(2))
        stored.set()

    threading.Thread(target=put, daemon=True).start()
    assert not stored.wait(0.5)
    etcd_server.start()
    assert stored.wait(LIMIT_S)
    assert one.store.latest() == decision(2)


def test_the_form_of_the_address():
    assert parse_store_url("etcd://127.0.0.1:2379") == ("127.0.0.1", 2379, "holdfast")
    assert parse_store_url("etcd://etcd.example:2379/team/jobs/") == ("etcd.example", 2379, "team/jobs")
    for wrong in ("etcd://:1", "etcd://host", "etcd://host:x", "http://host:1", "postgres"):
        with pytest.raises(ConfigError, match=r"^control\.store: expected etcd://HOST:PORT\[/PREFIX\], got '"):
            parse_store_url(wrong)


def test_several_coordinators_need_etcd():
    tree = {
        "model": {"kind": "gpt"},
        "data": {"kind": "text", "path": "stdlib"},
        "grid": {"pipelines": 1, "stages": 1, "microbatches": 1},
        "train": {"steps": 1},
        "control": {"coordinators": 2},
    }
    with pytest.raises(ConfigError, match=r"control\.coordinators: 2 need control\.store: etcd://HOST:PORT"):
        parse_job(tree)
