"""What the agent of another machine is told of a job, and what it finds there."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from msgspec.structs import replace as replace_struct
from tests.processes import NODE
from tests.unit.runtime.test_preflight import NONCE, briefing, probed
from tests.unit.runtime.test_preflight import request as asked
from tests.waiting import until

from holdfast.control.messages import Ended
from holdfast.control.reach import Reach
from holdfast.core.ids import WorkerId
from holdfast.errors import ConfigError, CoordinatorUnavailable
from holdfast.runtime.launch.agents import _Places, _touch, heard_of_leader, this_node
from holdfast.runtime.launch.briefing import Brief
from holdfast.runtime.launch.directory import JOB_ID
from holdfast.runtime.launch.joining import Joiner, JoinRequest, _NextAttempt, _read
from holdfast.runtime.main.coordinator import _heard_at
from holdfast.version import __version__

SECRETS = ("00" * 32, "/of-this-machine/control.db")
A, B, C = (WorkerId(pipeline, 0) for pipeline in range(3))


SECTIONS = {
    "logs": {
        "train": {"steps": 9, "technique": "staggered"},
        "resilience": {"strategy": "adaptive", "spares": 1},
        "checkpoint": {"every": 3},
        "logging": {"use": "on"},
    },
    "templates": {"resilience": {"strategy": "templates", "tolerate": 1}},
    "audits": {"train": {"steps": 9, "audit_every": 2}, "resilience": {"strategy": "auto"}},
}


@pytest.fixture(params=SECTIONS)
def told(request, tmp_path, monkeypatch):
    """A briefing of a job with much in it, and what agents are told of it."""
    monkeypatch.chdir(tmp_path)
    sections = SECTIONS[request.param]
    run = asked("kill:0.0@3", sections=sections, slots=0)
    made = replace(briefing(run, probed(run)), store=SECRETS[1], deadline=99.0)
    return made, made.coordinator(NODE).brief


def test_an_agent_elsewhere_tells_its_workers_what_those_here_are_told(told):
    made, brief = told
    theirs = _read(brief).briefing
    here = made.worker(A, NODE, NONCE, begins=True, place=0)
    there = replace(theirs, token=made.token, host=made.host, events=made.events, address=made.address).worker(
        A, NODE, NONCE, begins=True, place=0
    )
    own = {"checkpoints": here.checkpoints, "logs": here.logs, "rules": here.rules}  # of the run directory, see below
    assert replace(there, **own) == here
    assert there.rules == replace(here.rules, directory=str(made.request.run_dir.absolute() / "final"))
    logs = made.request.run_dir.absolute() / "logs" / made.job_id
    assert there.logs == (None if here.logs is None else str(logs))


def test_nothing_secret_is_told(told):
    assert not [secret for secret in SECRETS if secret.encode() in told[1]]


def entering():
    """What looks about on this machine, once."""
    return Joiner(request=JoinRequest(where="127.0.0.1:1", find=pytest.fail), shared_s=0.0)._enter


def test_who_comes_behind_the_end_waits_for_the_next_attempt_but_not_for_long(monkeypatch):
    ended = Ended(outcome="done", detail="", step=9, directory="", generations=1, lost_layers=())
    found, now, said = iter([ended, CoordinatorUnavailable("away"), ended, ended, ended]), [0.0], []

    def find():
        if isinstance(each := next(found), Exception):
            raise each
        return each

    def pause(self, seconds):
        now[0] += 400.0

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(Joiner, "_pause", pause)
    joiner = Joiner(request=JoinRequest(where="run", find=find), on_event=lambda event: said.append(event.text))
    assert joiner._ask(math.inf) == ended
    assert "the job has ended: done; the next attempt is waited for" in said
    assert (next(found, None), now) == (None, [1600.0]), "600 s behind the time when it was heard again"


def test_who_finds_no_coordinator_any_more_looks_how_the_job_has_ended():
    ended = Ended(outcome="done", detail="", step=9, directory="", generations=1, lost_layers=())
    reach = Reach(addresses="h:1", token="t")
    answers = iter([ended, reach, CoordinatorUnavailable("away"), replace_struct(ended, outcome="superseded")])

    def find():
        if isinstance(each := next(answers), Exception):
            raise each
        return each

    joiner = Joiner(request=JoinRequest(where="run", find=find))
    assert [joiner._known_end() for _ in range(3)] == [ended, None, None]
    with pytest.raises(_NextAttempt):
        joiner._known_end()


@pytest.mark.parametrize("change", [lambda brief: b"", lambda brief: brief[:-1], lambda brief: brief + b"?"])
def test_what_cannot_be_read_is_said_to_be_of_another_version(told, change):
    with pytest.raises(ConfigError, match="expected the same version of it on every machine"):
        _read(change(told[1]))


def test_where_the_directory_of_the_run_is_another_nobody_takes_part(told):
    brief, enter = _read(told[1]), entering()
    run_dir = brief.briefing.request.run_dir
    with pytest.raises(ConfigError, match="expected a directory that all machines share"):
        enter(brief)
    run_dir.mkdir(parents=True)
    (run_dir / JOB_ID).write_text("another")
    with pytest.raises(ConfigError, match="expected a directory that all machines share"):
        enter(brief)
    (run_dir / JOB_ID).write_text(told[0].job_id)
    enter(brief)


def test_the_folder_and_the_version_are_the_same_everywhere(told):
    brief, enter = _read(told[1]), entering()
    with pytest.raises(ConfigError, match="expected the same folder on every machine"):
        enter(replace(brief, folder="/nowhere"))
    with pytest.raises(ConfigError, match=f"run by Holdfast 0.0.0, this is {__version__}"):
        enter(replace(brief, holdfast="0.0.0"))


def test_a_brief_with_more_in_it_is_refused(told):
    more = msgspec.msgpack.decode(told[1])
    more["briefing"]["request"]["run_dir"] = 7
    with pytest.raises(ConfigError, match="expected the same version"):
        _read(msgspec.msgpack.encode(more))
    assert isinstance(_read(told[1]), Brief)


def test_a_node_is_called_as_its_engine_says():
    assert this_node("mine", {"HOLDFAST_NODE": "b"}).name == "mine"
    assert this_node(environ={"SLURMD_NODENAME": "n7", "JOB_COMPLETION_INDEX": "3"}).name == "n7"
    assert this_node(environ={"HOLDFAST_NODE": "", "JOB_COMPLETION_INDEX": "3"}).name == "3"
    assert this_node(environ={}).nonce != this_node(environ={}).nonce
    with pytest.raises(ConfigError, match="is no node's name"):
        this_node("two words")


def test_a_slot_is_one_workers_while_that_runs():
    places = _Places()
    assert [places.of(worker, {A, B, C}) for worker in (A, B, C)] == [0, 1, 2]
    assert places.of(B, {A, C}) == 1, "it is started again"
    new = WorkerId(9, 0)
    assert places.of(new, {A, B}) == 2, "that of one who is gone"
    assert places.of(C, {A, B, new}) == 3, "which is taken when it comes back"


def test_a_coordinator_sees_when_its_agent_has_heard_of_who_leads():
    with heard_of_leader() as path:
        before = _heard_at(str(path))
        until(lambda: _touch(path) or _heard_at(str(path)) != before)
    assert _heard_at(str(path)) is None
    assert _heard_at(None) is None
    _touch(path)
