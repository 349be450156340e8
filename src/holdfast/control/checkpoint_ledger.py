"""Which shards of which checkpoints are written: a pure value, kept by the membership.

A checkpoint is committed when every layer's shard was written under one generation. What two generations wrote of one
step is never mixed: in ``fast`` numerics a step that is run again may end in other bits.

That it is committed is decided, and stored, before its manifest is written. So whoever leads next writes it as well, as
it may not be there; and who does not lead any more writes none that nobody knows of, and deletes nothing for its sake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast.control.messages import ShardFailed, ShardWritten
from holdfast.core.evaluation import Best
from holdfast.storage.checkpoints import Shard
from holdfast.telemetry.events import Checkpointed, CheckpointFailed, Event, Notice

__all__ = ["CheckpointLedger", "Settled", "WriteManifest", "note_shard", "settle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteManifest:
    """Output: every shard of ``step`` is written; write the manifest, then say how that went by Settled.

    ``best``: the best states so far, the newest last; the manifest tells of that, and checkpoints of none are deleted.
    """

    step: int
    shards: tuple[Shard, ...]
    best: tuple[Best, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Event: the manifest of ``step`` is written at ``url``, or was not: ``error`` says why.

    ``untidy``: why something that it supersedes could not be deleted; empty if all was.
    """

    step: int
    url: str
    error: str = ""
    untidy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLedger:
    """What is known of checkpoints.

    Attributes:
        written: per step and generation, the shards written so far.
        failed: the steps and generations that will not become a checkpoint, as some shard could not be written.
        committing: the shards of checkpoints whose manifest is being written, by their step; stored with decisions.
        newest: the newest step whose manifest is written; 0 if none is.
    """

    written: Mapping[tuple[int, int], Mapping[int, Shard]] = field(default_factory=dict)
    failed: frozenset[tuple[int, int]] = frozenset()
    committing: Mapping[int, tuple[Shard, ...]] = field(default_factory=dict)
    newest: int = 0

    @property
    def unsettled(self) -> tuple[WriteManifest, ...]:
        """The manifests that are being written, in order."""
        return tuple(WriteManifest(step=step, shards=shards) for step, shards in sorted(self.committing.items()))


def note_shard(
    ledger: CheckpointLedger, message: ShardWritten | ShardFailed, num_layers: int
) -> tuple[CheckpointLedger, WriteManifest | CheckpointFailed | None]:
    """Returns the ledger after a worker's report, and what follows from it: a commit, a failure to tell of, or nothing.

    Args:
        ledger: before.
        message: what a worker wrote, or could not write.
        num_layers: of the model.
    """
    key = (message.step, message.generation)
    if message.step < ledger.newest or key in ledger.failed:
        return ledger, None
    if isinstance(message, ShardFailed):
        written = {k: shards for k, shards in ledger.written.items() if k != key}
        ledger = replace(ledger, written=written, failed=ledger.failed | {key})
        return ledger, CheckpointFailed(step=message.step, worker=str(message.worker), detail=message.detail)
    shards = {**ledger.written.get(key, {}), message.shard.layer: message.shard}
    if len(shards) < num_layers:
        return replace(ledger, written={**ledger.written, key: shards}), None
    ordered = tuple(shards[layer] for layer in sorted(shards))
    written = {k: kept for k, kept in ledger.written.items() if k != key}
    ledger = replace(ledger, written=written, committing={**ledger.committing, message.step: ordered})
    return ledger, WriteManifest(step=message.step, shards=ordered)


def settle(ledger: CheckpointLedger, settled: Settled) -> tuple[CheckpointLedger, tuple[Event, ...]]:
    """Returns the ledger after a manifest was written, or could not be, and what to tell of it.

    What is older than the newest checkpoint is forgotten: it is superseded.
    """
    ledger = replace(ledger, committing={s: shards for s, shards in ledger.committing.items() if s != settled.step})
    if settled.error:
        return ledger, (CheckpointFailed(step=settled.step, worker="", detail=settled.error),)
    newest = max(ledger.newest, settled.step)
    ledger = replace(
        ledger,
        newest=newest,
        written={key: shards for key, shards in ledger.written.items() if key[0] >= newest},
        failed=frozenset(key for key in ledger.failed if key[0] >= newest),
    )
    told: tuple[Event, ...] = (Checkpointed(step=settled.step, url=settled.url),)
    if settled.untidy:
        told += (Notice(worker="coordinator", text=f"older checkpoints could not be deleted: {settled.untidy}"),)
    return ledger, told
