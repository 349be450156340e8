"""What a simulated worker's driver reaches: it never waits, and says so."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from holdfast.core.ids import WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.placement import split_evenly
from holdfast.core.step_plan import StepPlan
from holdfast.errors import InternalError, PeerLost, StaleGeneration
from holdfast.recovery.rules import JobRules
from holdfast.runtime.transport.port import MessageKey
from holdfast.schedule.builders import regular_plan
from holdfast.telemetry.events import Pinned, StepOps
from holdfast.testing.scenario import Scenario
from holdfast.testing.virtual import VirtualCluster
from holdfast.testing.virtual_links import ControlLinks
from holdfast.testing.virtual_log import VirtualLog
from holdfast.testing.virtual_time import Sleep, VirtualTime
from holdfast.testing.virtual_transport import VirtualTransport
from holdfast.testing.world import World, WouldBlock

A, B = WorkerId(0, 0), WorkerId(0, 1)
PLAN = regular_plan(1, split_evenly(2, 2), 2)
VALUE = np.arange(3)


class Network:
    """Two workers' transports, and the time that messages take between them."""

    def __init__(self):
        self.time, log = VirtualTime(seed=1), VirtualLog()
        links = ControlLinks(self.time, (0.0, 0.0), up=lambda event: None, listens=lambda: False)
        scenario, rules = Scenario(plan=PLAN, steps=1), JobRules(steps=1)
        known = {"scenario": scenario, "rules": rules, "time": self.time, "links": links, "log": log}
        self._world = World(**known, knows_agent=lambda node: True)
        self.looked = []
        for worker in (A, B):
            look = lambda worker=worker: self.looked.append(worker)  # noqa: E731
            asleep = Sleep(self.time, log.fire_once)
            self._world.running[worker] = SimpleNamespace(worker=worker, goes=True, asleep=asleep, look=look)
        self.a, self.b = (VirtualTransport(self._world.running[worker], self._world) for worker in (A, B))

    def build(self, generation):
        for transport in (self.a, self.b):
            with pytest.raises(WouldBlock):
                transport.build(generation, ((A, B),))
        self.pass_()
        for transport in (self.a, self.b):
            transport.build(generation, ((A, B),))

    def pass_(self):
        while self.time.go_on():
            pass


@pytest.fixture
def network():
    made = Network()
    made.build(1)
    return made


def key(microbatch=0, generation=1):
    return MessageKey(generation=generation, step=0, payload=Payload.ACTIVATION, microbatch=microbatch)


def test_what_is_not_there_yet_is_asked_for_again_when_it_has_come(network):
    handle = network.b.receive(key(), A, None)
    network.a.send(key(), B, VALUE)
    with pytest.raises(WouldBlock):
        handle.wait()
    network.looked.clear()
    network.pass_()
    assert network.looked == [B]
    assert handle.wait().tolist() == VALUE.tolist()


def test_who_begins_to_wait_for_a_worker_that_is_gone_hears_of_it(network):
    network.a.send(key(0), B, VALUE)
    network.pass_()
    network.b.lose(A, generation=1)
    assert network.b.receive(key(0), A, None).wait() is not None, "what had come before"
    with pytest.raises(PeerLost):
        network.b.receive(key(1), A, None).wait()


def test_who_is_gone_from_another_generation_is_not_missed(network):
    network.b.lose(A, generation=2)
    with pytest.raises(WouldBlock):
        network.b.receive(key(), A, None).wait()
    network.b.lose(A, generation=1)
    network.build(2)
    with pytest.raises(WouldBlock):
        network.b.receive(key(generation=2), A, None).wait()


def test_an_abort_ends_what_is_waited_for(network):
    handle = network.b.receive(key(), A, None)
    network.b.abort(1)
    with pytest.raises(StaleGeneration):
        handle.wait()


def test_a_simulated_job_tells_what_a_real_one_tells():
    result = VirtualCluster(Scenario(plan=PLAN, steps=4, checkpoint_every=2)).run()
    told = [event for _, event in result.events]
    assert {event.step for event in told if isinstance(event, Pinned)} == {2, 4}
    steps = [event for event in told if isinstance(event, StepOps)]
    assert {event.worker for event in steps if event.knows_loss} == {str(B)}
    assert all({name for name, *_ in event.besides} == {"reduce", "update"} for event in steps)


def test_who_leaves_its_order_is_found_out(monkeypatch):
    monkeypatch.setattr(StepPlan, "order", property(lambda step: ()))
    with pytest.raises(InternalError, match="its order is"):
        VirtualCluster(Scenario(plan=PLAN, steps=1)).run()


def test_a_mistake_of_the_simulation_is_no_workers_exception(monkeypatch):
    def build(*arguments, **told):
        raise KeyError("of the simulation")

    monkeypatch.setattr(VirtualTransport, "build", build)
    with pytest.raises(KeyError, match="of the simulation"):
        VirtualCluster(Scenario(plan=PLAN, steps=1)).run()
