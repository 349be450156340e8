"""What is told of an exception in a worker, and where it came from."""

from __future__ import annotations

import pytest
import torch
from tests.processes import process_of

from holdfast.core.ids import WorkerId
from holdfast.core.work import WorkPhase, working
from holdfast.data.sampler import TRIES, load_microbatch
from holdfast.errors import (
    ConfigError,
    InternalError,
    InvalidSchedule,
    LedgerError,
    PeerLost,
    ReplicaDiverged,
    StateUnavailable,
    WorkFailed,
)
from holdfast.protocol.stopping import ends_job, report_of


class AcceleratorError(RuntimeError):
    """As torch's own, which older versions lack."""


def report(error, **changes):
    return report_of(
        error, worker=WorkerId(1, 2), process=process_of(WorkerId(1, 2), 7), generation=3, step=4, **changes
    )


@pytest.mark.parametrize(
    ("error", "at_once"),
    [
        (ConfigError("x"), True),
        (LedgerError(1, 2, 3), True),
        (ReplicaDiverged("x"), True),
        (InvalidSchedule("x"), True),
        (InternalError("x"), True),
        (AssertionError(), True),
        (WorkFailed(WorkPhase.FORWARD, AssertionError()), False),
        (StateUnavailable((1,)), False),
        (PeerLost("1.2", 1), False),
        (MemoryError(), False),
        (SystemExit(), False),
    ],
)
def test_what_needs_no_judging(error, at_once):
    assert ends_job(error) == at_once


def test_the_place_and_the_traceback_are_those_of_what_was_raised():
    with pytest.raises(WorkFailed) as caught, working(WorkPhase.BACKWARD, layer=5, microbatch=6):
        raise KeyError("token")
    told = report(caught.value)
    assert (told.phase, told.layer, told.item, told.microbatch) == (WorkPhase.BACKWARD, 5, None, 6)
    assert (told.kind, told.error, told.sound) == ("KeyError", "KeyError: 'token'", True)
    assert 'raise KeyError("token")' in told.traceback
    assert "WorkFailed" not in told.traceback


def test_what_was_raised_elsewhere_has_no_place():
    told = report(ZeroDivisionError("division by zero"))
    assert (told.phase, told.layer, told.kind) == (WorkPhase.OTHER, None, "ZeroDivisionError")


@pytest.mark.parametrize(
    ("error", "whole", "sound"),
    [
        (ValueError(), True, True),
        (ValueError(), False, False),
        (MemoryError(), True, True),
        (torch.OutOfMemoryError("CUDA out of memory"), True, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True, False),
        (WorkFailed(WorkPhase.UPDATE, AcceleratorError("x")), True, True),
        (AcceleratorError("x"), True, False),
    ],
)
def test_a_state_that_cannot_be_trusted_is_told(error, whole, sound):
    assert report(error, whole=whole).sound == sound


def test_a_sick_device_is_known_by_what_was_raised_first():
    with pytest.raises(WorkFailed) as caught, working(WorkPhase.FORWARD, layer=1):
        raise AcceleratorError("unspecified launch failure")
    assert not report(caught.value).sound


@pytest.mark.parametrize("error", [ConfigError("x"), LedgerError(0, 0, 2), WorkFailed("forward", ValueError())])
def test_errors_of_ours_pass_as_they_are(error):
    with pytest.raises(type(error)) as caught, working(WorkPhase.UPDATE, layer=1):
        raise error
    assert caught.value is error


class Shelf:
    """Items of which number 2 cannot be read so many times."""

    def __init__(self, failures, kind=OSError):
        self.failures, self.kind, self.readings = failures, kind, 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            self.readings += 1
            if self.readings <= self.failures:
                raise self.kind("away")
        return torch.zeros(1), torch.zeros(1)


class Drawing(Shelf):
    """Items that draw, and number 2 draws before it cannot be read."""

    def __getitem__(self, index):
        drawn = torch.rand(1)
        return drawn, super().__getitem__(index)[1]


def load(shelf):
    waits = []
    try:
        found = load_microbatch(
            shelf, seed=0, step=0, microbatch=0, num_microbatches=1, microbatch_size=3, sleep=waits.append
        )
    except WorkFailed as error:
        found = error
    return found, waits


def test_an_item_that_cannot_be_read_is_tried_three_times():
    found, waits = load(shelf := Shelf(TRIES - 1))
    assert found[0].shape == (3, 1)
    assert (shelf.readings, len(waits)) == (3, 2)


def test_an_item_that_is_tried_again_draws_what_it_had_drawn():
    torch.manual_seed(3)
    usual, _ = load(Drawing(0))
    torch.manual_seed(3)
    tried, waits = load(Drawing(TRIES - 1))
    assert len(waits) == 2
    assert torch.equal(tried[0], usual[0])


def test_an_item_that_stays_away_is_named():
    found, waits = load(shelf := Shelf(TRIES))
    assert (found.phase, found.item, found.kind) == (WorkPhase.LOADING, 2, "OSError")
    assert (shelf.readings, len(waits)) == (3, 2)


def test_any_other_exception_is_not_tried_again():
    found, waits = load(shelf := Shelf(1, ValueError))
    assert (found.item, found.kind, shelf.readings, waits) == (2, "ValueError", 1, [])
