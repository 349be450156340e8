"""Deaths that happen are told from a process that cannot live, and from one that only cannot be started yet."""

import pytest

from holdfast.errors import ConfigError, CoordinatorUnavailable, InternalError, describe_exit
from holdfast.runtime.node.supervision import RestartLimit, Supervisor
from holdfast.telemetry.events import CoordinatorLost, EventLog, Notice, read_events


def test_too_many_deaths_in_a_short_time_are_an_error():
    limit = RestartLimit(num_restarts=2, within_s=10.0)
    limit.note(0.0, "signal 9")
    limit.note(1.0, "signal 9")
    with pytest.raises(InternalError, match=r"died 3 times within 10 s, it is not started again; .*: exit code 1"):
        limit.note(9.9, "exit code 1")


def test_deaths_far_apart_are_not():
    limit = RestartLimit(num_restarts=2, within_s=10.0)
    for at in range(0, 100, 5):
        limit.note(float(at), "signal 9")


@pytest.mark.parametrize(("status", "text"), [(-9, "signal 9"), (1, "exit code 1"), (0, "exit code 0")])
def test_how_a_process_ended(status, text):
    assert describe_exit(status) == text


SPEC = object()
TAKEN = ConfigError("control.port: is in use")


class Watched:
    """A supervisor in a time of its own, with a coordinator whose starts go as the test says."""

    def __init__(self, folder, *outcomes, delay_s=0.0):
        self.now, self._due, self._outcomes = 0.0, [], list(outcomes)
        self.started_at = []
        self._events, self.log = folder / "events.jsonl", EventLog(folder / "events.jsonl")
        self.supervisor = Supervisor(
            start=self._start,
            later=lambda delay_s, wanted: self._due.append((self.now + delay_s, wanted)),
            clock=lambda: self.now,
            awake=lambda: self.now,
            log=self.log,
            delay_s=delay_s,
            patience_s=3.0,
            limit=RestartLimit(num_restarts=2, within_s=10.0),
        )

    def _start(self, spec):
        assert spec is SPEC
        self.started_at.append(self.now)
        outcome = self._outcomes.pop(0) if self._outcomes else None
        if outcome is not None:
            raise outcome

    def dies(self, status=-9):
        """One ends; time goes on until nothing is left to be done."""
        self.supervisor.on_ended(SPEC, status)
        while self._due:
            self.now, wanted = self._due.pop(0)
            self.supervisor.again(wanted)

    def told(self, kind):
        return [event for _, event in read_events(self._events) if isinstance(event, kind)]


@pytest.fixture
def watched(tmp_path):
    made = []

    def make(*outcomes, **options):
        made.append(Watched(tmp_path, *outcomes, **options))
        return made[-1]

    yield make
    for each in made:
        each.log.close()


def test_one_that_died_is_started_again_after_the_delay(watched):
    job = watched(delay_s=1.5)
    job.dies()
    assert job.started_at == [1.5]
    assert [event.how for event in job.told(CoordinatorLost)] == ["signal 9"]


def test_one_that_ended_in_good_order_is_not(watched):
    job = watched()
    job.dies(status=0)
    assert job.started_at == []
    assert job.told(CoordinatorLost) == []


def test_a_port_that_is_taken_is_no_death_and_is_tried_until_it_is_free(watched):
    job = watched(*[TAKEN] * 5)
    job.dies()
    assert job.started_at == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert len(job.told(CoordinatorLost)) == 1
    (notice,) = job.told(Notice)
    assert "it is tried every 0.5 s: control.port: is in use" in notice.text


def test_a_port_that_stays_taken_ends_the_job_with_the_reason(watched):
    job = watched(*[TAKEN] * 99)
    with pytest.raises(ConfigError, match=r"^the coordinator died and could not be started again for 3 s: contr"):
        job.dies()
    assert job.now == 3.0


def test_the_patience_begins_anew_with_each_death(watched):
    job = watched(*[TAKEN] * 5, None, *[TAKEN] * 5)
    job.dies()
    job.dies()
    assert job.now == 5.0


def test_one_that_dies_before_it_listens_counts(watched):
    job = watched(*[InternalError("ended without an answer")] * 9)
    with pytest.raises(InternalError, match=r"died 3 times within 10 s, .*: could not be started again: ended without"):
        job.dies()
    assert len(job.started_at) == 2


def test_when_everyone_gave_up_the_obstacle_is_told_if_there_is_one(watched):
    job, gone = watched(TAKEN), CoordinatorUnavailable("nobody listens")
    assert str(job.supervisor.gone(gone)) == "the coordinator is gone, the job cannot go on: nobody listens"
    job.supervisor.on_ended(SPEC, -9)
    job.supervisor.again(job._due.pop()[1])
    assert str(job.supervisor.gone(gone)) == "the coordinator died and cannot be started again: control.port: is in use"
    job.supervisor.again(job._due.pop()[1])
    assert isinstance(job.supervisor.gone(gone), InternalError)
