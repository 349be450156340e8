"""Decisions that tests put into a run's database, as another coordinator would have."""

import asyncio
from contextlib import closing

from tests.waiting import LIMIT_S

from holdfast.control.chain.database import DatabaseChain
from holdfast.control.chain.entry import Entry, read_entry
from holdfast.control.chain.leading import Stored, lead

__all__ = ["as_read", "leading_in", "newest_in", "put_in", "taken"]


def as_read(decision):
    """A decision as a coordinator that takes over reads it."""
    return Entry.decoded(Entry(by=16 * "a", decision=decision).encoded).decision


def newest_in(path):
    """The decision in force by a database; None if nothing was decided."""
    with closing(DatabaseChain(path)) as chain:
        return [None, *(read_entry(body, str(path)).decision for body in chain.bodies())][-1]


def leading_in(path, job="", since=None):
    """Who leads from now on by this database, after the decision ``since`` if that is given; close its chain."""
    leading, decision = lead(DatabaseChain(path), job=job, by=16 * "a", alone=True, note=print)
    assert since in (None, decision)
    return leading


def put_in(path, decision):
    """Puts one decision more into a database, or the first into a new one."""
    leading = leading_in(path, decision.job)
    with closing(leading.chain):
        assert leading.put(decision) == Stored()


async def taken(coordinator, *events):
    """Returns once a coordinator has taken events, and what it decided about them is stored."""
    coordinator.decider.take(events)
    async with asyncio.timeout(LIMIT_S):
        while coordinator.decider.waits:
            await asyncio.sleep(0.001)
