"""The coordinator writes manifests off its event loop, in order, and the membership hears how that went."""

import asyncio
import threading
import time

from tests.decisions import leading_in
from tests.waiting import LIMIT_S

from holdfast.control.checkpoint_ledger import Settled, WriteManifest
from holdfast.control.coordinator import Committer, Coordinator
from holdfast.control.membership import GridState, Membership
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
    folder, held, begun = tmp_path / "checkpoints", threading.Event(), []

    class Slow(LocalStore):
        def put(self, name, data):
            begun.append(name)
            assert held.wait(LIMIT_S)
            super().put(name, data)

    coordinator = Coordinator(
        membership=Membership(grid=GridState(baseline=PLAN), rules=JobRules(steps=9, directory="out")),
        leading=leading_in(tmp_path / "control.db"),
        log=EventLog(tmp_path / "events.jsonl"),
        clock=time.monotonic,
        awake=time.monotonic,
        committer=Committer(checkpoints=Checkpoints(Slow(folder, reserved_bytes=0), 3), facts=FACTS),
    )

    async def until(condition):
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def run():
        for step in (2, 4):
            for shard in written(folder, step):
                coordinator.decider.take([ShardWritten(worker=W, generation=1, step=step, shard=shard)])
        await until(lambda: begun)
        assert coordinator.decider.membership.checkpoints.committing == {2, 4}, "the loop is not held up"
        held.set()
        await until(lambda: not coordinator.decider.membership.checkpoints.committing)

    asyncio.run(run())
    assert begun == ["step-00000002/manifest.json", "step-00000004/manifest.json"]
    told = [event for _, event in read_events(tmp_path / "events.jsonl")]
    assert [type(event) for event in told] == [Checkpointed, Checkpointed]
    assert [event.step for event in told] == [2, 4]
    assert not [event for event in told if isinstance(event, CheckpointFailed | Notice)]
