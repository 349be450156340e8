"""What all workers say, at once, to what they were told: messages, as those of a real job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.control.membership import Membership
from holdfast.control.membership.running import Upcoming
from holdfast.control.messages import CommitVote, Joined, Left, Saved, ShardWritten, Status
from holdfast.core.ids import WorkerId
from holdfast.core.plan import Plan
from holdfast.core.progress import StepProgress
from holdfast.storage.checkpoints import Shard

__all__ = ["crossing", "joined", "saved", "shards", "statuses", "writers_of"]

_NO_HASH = "0" * 64


def statuses(
    state: Membership,
    workers: Sequence[WorkerId],
    number: int,
    held: Mapping[WorkerId, tuple[int, ...]],
    kept: Mapping[WorkerId, StepProgress],
    snapshots: tuple[int, ...],
) -> Iterator[Status]:
    """Yield what members say that they hold.

    Args:
        state: a generation is being formed.
        workers: who of its members says so.
        number: the step that layers are at.
        held: the layers of each, where the generation has no plan that says so.
        kept: what workers have of the step.
        snapshots: the steps of which they have copies in memory.
    """
    plan, known = state.running.plan, (CommitVote(step=number - 1, complete=True, value=b""),)
    for worker in workers:
        if plan is not None:
            holds, follows = plan.placement.held_layers(worker), plan.placement.followed_layers(worker)
        else:
            holds, follows = held.get(worker, ()), ()
        yield Status(
            worker=worker,
            generation=state.generation,
            layer_steps=tuple((layer, number) for layer in holds),
            executed=(),
            snapshots=snapshots,
            votes=known if holds else (),
            progress=(kept[worker],) if worker in kept else (),
            follows=follows,
        )


def joined(state: Membership) -> Iterator[Joined]:
    """Yield that the transport of each member stands."""
    for worker in state.alive:
        yield Joined(worker=worker, generation=state.generation)


def crossing(state: Membership, upcoming: Upcoming, number: int) -> Iterator[Joined | Left]:
    """Yield that all go over into the generation that was prepared, before step ``number``."""
    generation, alive = upcoming.generation, state.alive
    for worker in sorted(upcoming.entering & state.roster.arriving):
        yield Joined(worker=worker, generation=generation)
    for worker in upcoming.plan.workers:
        if worker not in upcoming.entering or worker in alive:
            yield Joined(worker=worker, generation=generation, step=number)
    for worker in alive:
        if worker not in upcoming.plan.workers:
            yield Left(worker=worker, process=state.roster.processes[worker], generation=generation, step=number)


def writers_of(plan: Plan) -> dict[WorkerId, tuple[int, ...]]:
    """Return the layers that each worker writes into a checkpoint."""
    found: dict[WorkerId, tuple[int, ...]] = {}
    for layer in range(plan.placement.num_layers):
        writer = plan.writer_of(layer)
        if writer is not None:
            found[writer] = (*found.get(writer, ()), layer)
    return found


def shards(
    number: int, generation: int, writers: Mapping[WorkerId, tuple[int, ...]], stall_s: float, write_s: float
) -> Iterator[ShardWritten]:
    """Yield that each layer of a checkpoint was written, as long as it took the longest."""
    for writer, layers in writers.items():
        for layer in layers:
            shard = Shard(layer=layer, name=f"layer-{layer:04d}-{0:016x}.safetensors", sha256=_NO_HASH, size=0)
            yield ShardWritten(
                worker=writer, generation=generation, step=number, shard=shard, stall_s=stall_s, write_s=write_s
            )


def saved(state: Membership) -> Iterator[Saved]:
    """Yield that each worker has written its share of the last state."""
    for worker in state.full:
        yield Saved(worker=worker, generation=state.generation, digests=())
