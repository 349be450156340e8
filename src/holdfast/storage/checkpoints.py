"""Checkpoints in a blob store: one shard per layer, and one small manifest, written last.

A checkpoint exists once its manifest does; shards without one are what an unfinished checkpoint left. A shard's name
holds the beginning of its own digest, so writing the same state again writes the same blob, and no other state can ever
take its place.

    step-00000025/layer-0000-1f0c9a55e2d07b3c.safetensors
    step-00000025/layer-0001-...
    step-00000025/manifest.json
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from holdfast.core.evaluation import Best
from holdfast.errors import ConfigError, CorruptBlob, MissingBlob, StorageError
from holdfast.parsing import parsing
from holdfast.storage.blobs import BlobStore

__all__ = ["Checkpoints", "Facts", "Manifest", "Rejected", "Shard", "Sound"]

_FORMAT = "holdfast-checkpoint-1"
_MANIFEST_BYTES = 64 << 20
_STEP = re.compile(r"step-(?P<step>[0-9]{8,18})/.+", re.ASCII)
_CLOSED = re.compile(r"step-(?P<step>[0-9]{8,18})", re.ASCII)

Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of what a manifest is made of: immutable, closed."""


class Shard(_Stored, frozen=True, kw_only=True):
    """One layer's state in a store: a name within its step's folder, and what must be found under it."""

    layer: Count
    name: Annotated[str, msgspec.Meta(pattern=r"\Alayer-[0-9]{4,9}-[0-9a-f]{16}\.safetensors\Z")]
    sha256: Sha256
    size: Count


class Facts(_Stored, frozen=True, kw_only=True):
    """What must be the same in a run that goes on from a checkpoint, and, for people, who wrote it.

    Attributes:
        job: name of the job.
        holdfast: version that wrote it.
        seed: ``train.seed``.
        layers: layers of the model.
        microbatches: of one step, over all pipelines.
        microbatch_size: samples.
        optimizer: ``optimizer.kind``.
        model: digest of the names, shapes and types of all parameters and buffers, and of what is tied.
        data: digest of the number of samples, and of a few of them.
        contents: digest of the files that samples are read from, as far as Holdfast reads them itself; empty else.
        values: every key of the job that decides bits, see :func:`holdfast.config.deciding.deciding`; None in a
            checkpoint of a version that did not tell.
        sources: digest of the file of every function that the job names, or of every file of a script.
        script: what a script says of its optimizers, schedulers and data, by key; None if the job has none, and in a
            checkpoint of a version that did not tell.
        first: of a script, digest of the model's first weights and of the first state of its optimizers.
    """

    job: str
    holdfast: str
    seed: Count
    layers: Annotated[int, msgspec.Meta(ge=1)]
    microbatches: Annotated[int, msgspec.Meta(ge=1)]
    microbatch_size: Annotated[int, msgspec.Meta(ge=1)]
    optimizer: str
    model: str
    data: str
    contents: str = ""
    values: dict[str, Any] | None = None
    sources: dict[str, str] = {}
    script: dict[str, Any] | None = None
    first: str = ""


class Manifest(_Stored, frozen=True, kw_only=True):
    """A whole checkpoint: the state after ``step`` steps; ``best``: which was the best until then, if that is told."""

    format: str
    step: Count
    facts: Facts
    shards: tuple[Shard, ...]
    best: Best | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A checkpoint that cannot be used, and why."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """A checkpoint whose every byte was verified, and the newer ones that were rejected before it."""

    manifest: Manifest
    rejected: tuple[Rejected, ...]


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _manifest_name(step: int) -> str:
    return f"{_folder(step)}/manifest.json"


class Checkpoints:
    """The checkpoints of one job in one store.

    Args:
        store: where they are.
        keep: how many finished ones are kept, at least 1.
    """

    def __init__(self, store: BlobStore, keep: int = 1) -> None:
        if keep < 1:
            raise ConfigError(f"checkpoint.keep: expected at least 1, got {keep}")
        self._store = store
        self._keep = keep

    @property
    def url(self) -> str:
        """Where they are."""
        return self._store.url

    def write_shard(self, step: int, layer: int, data: bytes) -> Shard:
        """Writes one layer's state and returns what the manifest will say of it.

        Raises:
            StorageError: it could not be written.

        After failure: nothing but perhaps a shard that no manifest names. Safe to repeat, also by another process.
        """
        digest = hashlib.sha256(data).hexdigest()
        shard = Shard(layer=layer, name=f"layer-{layer:04d}-{digest[:16]}.safetensors", sha256=digest, size=len(data))
        self._store.put(f"{_folder(step)}/{shard.name}", data)
        return shard

    def commit(self, step: int, shards: Iterable[Shard], facts: Facts, best: Best | None = None) -> Manifest:
        """Makes a checkpoint of shards that are written. Call :meth:`tidy` afterwards.

        Raises:
            StorageError: the manifest could not be written, and is not known to be there.

        After failure: the checkpoints before are as they were. Safe to repeat, also by another process.
        """
        ordered = tuple(sorted(shards, key=lambda shard: shard.layer))
        manifest = Manifest(format=_FORMAT, step=step, facts=facts, shards=ordered, best=best)
        _check(manifest, step)
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        try:
            self._store.put(_manifest_name(step), data)
        except StorageError:
            if not self._holds(_manifest_name(step), data):  # from an earlier try, or this one
                raise
        return manifest

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self._store.get(name) == data
        except StorageError:
            return False

    def tidy(self, step: int, spared: Collection[int] = ()) -> None:
        """Deletes what the checkpoint of ``step`` supersedes.

        That is all checkpoints up to it but the newest ``keep`` and those of steps that are ``spared``, and whatever of
        other older steps never became a checkpoint.

        Raises:
            StorageError: something could not be deleted.

        After failure: what is left are whole checkpoints, and shards without a manifest. Safe to repeat.
        """
        names = self._store.list()
        kept = {*[finished for finished in _finished(names) if finished <= step][-self._keep :], *spared}
        old = [name for name in names if (at := _step_of(name)) is not None and at < step and at not in kept]
        # A manifest goes before its shards, so that what is left of a checkpoint never looks like one.
        for name in sorted(old, key=lambda name: not name.endswith("/manifest.json")):
            self._store.delete(name)

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of all finished checkpoints, ascending; whether they are sound is another question.

        A folder that cannot be read is taken for one.

        Raises:
            StorageError: the store cannot be read.
        """
        names = self._store.list()
        closed = {int(match["step"]) for name in names if (match := _CLOSED.fullmatch(name))}
        return tuple(sorted({*_finished(names), *closed}))

    def read(self, step: int) -> Manifest:
        """Returns the manifest of one checkpoint.

        Raises:
            MissingBlob: there is no checkpoint of this step.
            CorruptBlob: the manifest is not one.
            StorageError: it cannot be read.
        """
        name = _manifest_name(step)
        data = self._store.get(name, range(_MANIFEST_BYTES))
        with parsing(lambda text: CorruptBlob(name, _FORMAT, text)):
            manifest = msgspec.json.decode(data, type=Manifest)
        try:
            _check(manifest, step)
        except StorageError as error:
            raise CorruptBlob(name, _FORMAT, str(error)) from error
        return manifest

    def read_shard(self, manifest: Manifest, layer: int) -> bytes:
        """Returns one layer's state, exactly as it was written.

        Raises:
            MissingBlob: the shard is gone, or the manifest has none for this layer.
            CorruptBlob: its bytes are not those that were written.
        """
        shard = next((shard for shard in manifest.shards if shard.layer == layer), None)
        if shard is None:
            raise MissingBlob(f"the checkpoint of step {manifest.step} has no layer {layer}")
        name = f"{_folder(manifest.step)}/{shard.name}"
        data = self._store.get(name, range(shard.size, shard.size + 1))
        digest = hashlib.sha256(data).hexdigest()
        if len(data) != shard.size or digest != shard.sha256:
            raise CorruptBlob(
                name, f"{shard.size} bytes with sha256 {shard.sha256}", f"{len(data)} bytes with sha256 {digest}"
            )
        return data

    def newest_sound(self, step: int | None = None) -> Sound:
        """Returns the newest checkpoint of which every shard is there and unchanged.

        Args:
            step: only this one will do; None for the newest.

        Raises:
            MissingBlob: there is no checkpoint, or none of this step.
            StorageError: the store cannot be read; the one that was named is not sound or cannot be read, or none is.
        """
        if step is not None:
            return Sound(manifest=self._verified(step), rejected=())
        rejected: list[Rejected] = []
        for candidate in reversed(self.steps()):
            try:
                return Sound(manifest=self._verified(candidate), rejected=tuple(rejected))
            except StorageError as error:
                rejected.append(Rejected(step=candidate, reason=str(error)))
        if not rejected:
            raise MissingBlob(f"{self.url} holds no checkpoint")
        reasons = "; ".join(f"step {each.step}: {each.reason}" for each in rejected)
        raise StorageError(f"{self.url} holds no sound checkpoint: {reasons}")

    def _verified(self, step: int) -> Manifest:
        manifest = self.read(step)
        for shard in manifest.shards:
            self.read_shard(manifest, shard.layer)
        return manifest


def _finished(names: Iterable[str]) -> tuple[int, ...]:
    steps = {step for name in names if (step := _step_of(name)) is not None and name == _manifest_name(step)}
    return tuple(sorted(steps))


def _step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return None if match is None else int(match["step"])


def _check(manifest: Manifest, step: int) -> None:
    """What the types alone cannot tell.

    Raises:
        StorageError: the manifest contradicts itself, or the place where it lies.
    """
    if manifest.format != _FORMAT:
        raise StorageError(f"format {manifest.format!r} is not {_FORMAT!r}")
    if manifest.step != step:
        raise StorageError(f"it is of step {manifest.step}, not of step {step}")
    layers = [shard.layer for shard in manifest.shards]
    if len(layers) != manifest.facts.layers or layers != list(range(len(layers))):
        raise StorageError(f"it has layers {layers}, expected 0 to {manifest.facts.layers - 1}, each once, in order")
