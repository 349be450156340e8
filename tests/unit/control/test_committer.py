"""The coordinator writes manifests off its event loop, in order, and the membership hears how that went."""

import asyncio
import threading
import time

from tests.decisions import leading_in, newest_in
from tests.waiting import LIMIT_S

from holdfast.control.checkpoint_ledger import Settled, WriteManifest
from holdfast.control.coordinator import Committer, Coordinator
from holdfast.control.membership import GridState, Membership, restore
from holdfast.control.messages import ShardWritten
from holdfast.core.placement import split_evenly
from holdfast.errors import StorageError
from holdfast.recovery.rules import JobRules
from holdfast.schedule.builders import regular_plan
from holdfast.storage.blobs import LocalStore
from holdfast.storage.checkpoints import Checkpoints, Facts
from holdfast.telemetry.events import Checkpointed, CheckpointFailed, EventLog, Notice, read_events

PLAN = regular_plan(1, split_evenly(2, 1), 1)
(W,) = PLAN.workers
FACTS = Facts(
    job="j", holdfast="0", seed=0, layers=2, microbatches=1, microbatch_size=1, optimizer="sgd", model="m", data="d"
)


def committer(folder, keep=1, **options):
    return Committer(checkpoints=Checkpoints(LocalStore(folder, reserved_bytes=0, **options), keep), facts=FACTS)


def written(folder, step):
    checkpoints = Checkpoints(LocalStore(folder, reserved_bytes=0))
    return [checkpoints.write_shard(step, layer, b"%d.%d" % (step, layer)) for layer in range(2)]


class Slow(LocalStore):
    """A store that begins to write, and is held up for as long as we like."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.held, self.begun = threading.Event(), []

    def put(self, name, data):
        self.begun.append(name)
        assert self.held.wait(LIMIT_S)
        super().put(name, data)


def coordinates(folder, store, keep=1):
    """A coordinator that leads, by the decisions in a folder, and writes manifests into a store."""
    membership = Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=9, directory="out"), generation=1)
    if (decided := newest_in(folder / "control.db")) is not None:
        membership = restore(membership, decided, reattach_until=0.0)
    return Coordinator(
        membership=membership,
        leading=leading_in(folder / "control.db"),
        log=EventLog(folder / "events.jsonl"),
        clock=time.monotonic,
        awake=time.monotonic,
        committer=Committer(checkpoints=Checkpoints(store, keep), facts=FACTS),
    )


def report(coordinator, folder, step):
    for shard in written(folder, step):
        coordinator.decider.take([ShardWritten(worker=W, generation=1, step=step, shard=shard)])


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def manifests(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/manifest.json")}


def test_a_manifest_is_written_and_what_is_superseded_deleted(tmp_path):
    for step in (2, 4):
        settled = committer(tmp_path).commit(WriteManifest(step=step, shards=tuple(written(tmp_path, step))))
        assert settled == Settled(step=step, url=str(tmp_path))
    assert Checkpoints(LocalStore(tmp_path)).steps() == (4,)


def test_what_cannot_be_written_is_said_not_raised(tmp_path):
    shards = tuple(written(tmp_path, 2))
    full = Committer(checkpoints=Checkpoints(LocalStore(tmp_path, reserved_bytes=1 << 60)), facts=FACTS)
    settled = full.commit(WriteManifest(step=2, shards=shards))
    assert "must stay free" in settled.error
    assert Checkpoints(LocalStore(tmp_path)).steps() == ()


def test_what_cannot_be_deleted_does_not_undo_the_checkpoint(tmp_path):
    class Sticky(LocalStore):
        def delete(self, name):
            raise StorageError("busy")

    committer(tmp_path).commit(WriteManifest(step=2, shards=tuple(written(tmp_path, 2))))
    sticky = Committer(checkpoints=Checkpoints(Sticky(tmp_path, reserved_bytes=0)), facts=FACTS)
    settled = sticky.commit(WriteManifest(step=4, shards=tuple(written(tmp_path, 4))))
    assert (settled.error, settled.untidy) == ("", "busy")
    assert Checkpoints(LocalStore(tmp_path)).steps() == (2, 4)


def test_the_coordinator_goes_on_while_a_manifest_is_being_written(tmp_path):
    """Its loop is free; a second manifest waits for the first."""
    folder, slow = tmp_path / "checkpoints", Slow(tmp_path / "checkpoints", reserved_bytes=0)
    coordinator = coordinates(tmp_path, slow, keep=3)

    async def run():
        for step in (2, 4):
            report(coordinator, folder, step)
        await until(lambda: slow.begun)
        await until(lambda: coordinator.decider.membership.checkpoints.committing.keys() == {2, 4})
        slow.held.set()
        await until(lambda: not coordinator.decider.membership.checkpoints.committing)

    asyncio.run(run())
    assert slow.begun == ["step-00000002/manifest.json", "step-00000004/manifest.json"]
    told = [event for _, event in read_events(tmp_path / "events.jsonl")]
    assert [type(event) for event in told] == [Checkpointed, Checkpointed]
    assert [event.step for event in told] == [2, 4]
    assert not [event for event in told if isinstance(event, CheckpointFailed | Notice)]


def test_whoever_leads_next_writes_what_was_to_be_written_before_it_hears_anybody(tmp_path):
    """The one before was stopped in the middle of it, and goes on much later."""
    folder, slow = tmp_path / "checkpoints", Slow(tmp_path / "checkpoints", reserved_bytes=0)
    old = coordinates(tmp_path, slow)
    committer(folder).commit(WriteManifest(step=2, shards=tuple(written(folder, 2))))

    async def run():
        report(old, folder, 4)
        await until(lambda: slow.begun)
        new = coordinates(tmp_path, LocalStore(folder, reserved_bytes=0))
        assert manifests(folder).keys() == {"step-00000002"}
        await new.begin()
        await until(lambda: not new.decider.waits)
        assert [each.step for each in new.decider.membership.restoring.restorable] == [4]
        made = manifests(folder)
        assert made.keys() == {"step-00000004"}, "that of step 2 is superseded"
        slow.held.set()
        await until(lambda: old.decider.resigned)
        assert manifests(folder) == made

    asyncio.run(run())
    assert [type(event) for _, event in read_events(tmp_path / "events.jsonl")] == [Checkpointed, Notice]


def test_who_does_not_lead_any_more_makes_no_checkpoint_and_deletes_none(tmp_path):
    folder = tmp_path / "checkpoints"
    old = coordinates(tmp_path, LocalStore(folder, reserved_bytes=0))
    committer(folder).commit(WriteManifest(step=2, shards=tuple(written(folder, 2))))
    before = manifests(folder)
    leading_in(tmp_path / "control.db").chain.close()

    async def run():
        report(old, folder, 4)
        await until(lambda: old.decider.resigned)
        assert await old.run() is False

    asyncio.run(run())
    assert manifests(folder) == before


def test_a_manifest_that_is_there_already_needs_no_room(tmp_path):
    commit = WriteManifest(step=2, shards=tuple(written(tmp_path, 2)))
    committer(tmp_path).commit(commit)
    full = Committer(checkpoints=Checkpoints(LocalStore(tmp_path, reserved_bytes=1 << 60)), facts=FACTS)
    assert full.commit(commit) == Settled(step=2, url=str(tmp_path))
