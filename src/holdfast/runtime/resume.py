"""Finds the checkpoint that a job goes on from, and refuses one that is not this job's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from holdfast.config.job import Job
from holdfast.config.load import load_job
from holdfast.control.membership.progress import MAX_RESTORABLE
from holdfast.control.messages import StateAt
from holdfast.errors import ConfigError, StorageError
from holdfast.runtime.processes import Found, ResumeFrom
from holdfast.storage.blobs import open_store
from holdfast.storage.checkpoints import Checkpoints, Facts

__all__ = ["checkpoints_url", "differences", "find", "parse_resume", "with_found"]

_AT_STEP = re.compile(r"(?P<place>.+)@(?P<step>[0-9]{1,18})", re.ASCII | re.DOTALL)

_KEYS = {
    "seed": "train.seed",
    "layers": "the number of the model's layers",
    "microbatches": "grid.pipelines x grid.microbatches",
    "microbatch_size": "grid.microbatch_size",
    "optimizer": "optimizer.kind",
    "model": "model",
    "data": "data",
}
_OTHER = {
    "model": "other names, shapes or types of parameters than the checkpoint's; use the model that it was made with",
    "data": "other samples than the checkpoint's; use the data that it was made with",
}


def checkpoints_url(job: Job, run_dir: Path) -> str:
    """Returns where a job's checkpoints go."""
    return job.checkpoint.url or str(run_dir / "checkpoints")


def parse_resume(text: str) -> ResumeFrom:
    """Reads ``DIR|URL[@STEP]``; a run directory stands for its checkpoints.

    Raises:
        ConfigError: the run directory's job file cannot be read.
    """
    match = _AT_STEP.fullmatch(text)
    place, step = (match["place"], int(match["step"])) if match else (text, None)
    described = Path(place) / "job.yaml"
    if described.is_file():
        place = checkpoints_url(load_job(described), Path(place))
    return ResumeFrom(url=place, step=step)


def find(job: Job, resume: ResumeFrom | None, url: str, facts: Facts) -> Found | None:
    """Returns the checkpoint that a job goes on from, every shard verified; None if it begins anew.

    Args:
        job: the job.
        resume: from which checkpoint; None to begin anew.
        url: where the job's own checkpoints will go.
        facts: what the job is.

    Raises:
        ConfigError: there is no sound checkpoint, or it is another job's; or the job's own checkpoints would overwrite
            later ones.
    """
    if resume is None:
        if job.checkpoint.every:
            _refuse_later(url, 0, frozenset())
        return None
    try:
        sound = Checkpoints(open_store(resume.url)).newest_sound(resume.step)
    except StorageError as error:
        raise ConfigError(f"--resume {resume}: {error}") from error
    manifest = sound.manifest
    if found := differences(manifest.facts, facts):
        raise ConfigError(f"--resume {resume}: not a checkpoint of this job: {'; '.join(found)}")
    if manifest.step >= job.train.steps:
        raise ConfigError(
            f"train.steps: the checkpoint is of step {manifest.step}, nothing is left to do; expected more than that, "
            f"got {job.train.steps}"
        )
    if job.checkpoint.every:
        _refuse_later(url, manifest.step, frozenset(each.step for each in sound.rejected))
    return Found(step=manifest.step, rejected=sound.rejected)


def with_found(known: Sequence[StateAt], checkpoints: Checkpoints) -> tuple[StateAt, ...]:
    """Returns the states that can be loaded, the newest first: those known, and the checkpoints that the store holds.

    A coordinator that wrote one may have died before it could remember it, and after it had deleted those that it does
    remember.

    Raises:
        StorageError: the store cannot be read.
    """
    found = {step: StateAt(url=checkpoints.url, step=step) for step in checkpoints.steps()}
    if not found:
        return tuple(known)
    older = {each.step: each for each in known if each.url is not None}  # the start is for before the first checkpoint
    return tuple(sorted((older | found).values(), key=lambda each: -each.step)[:MAX_RESTORABLE])


def differences(saved: Facts, wanted: Facts) -> tuple[str, ...]:
    """Returns why a job cannot go on from a checkpoint: the keys, and what would be right; empty if it can."""
    differing = [name for name in _KEYS if getattr(saved, name) != getattr(wanted, name)]
    return tuple(_difference(name, getattr(saved, name), getattr(wanted, name)) for name in differing)


def _difference(name: str, saved: object, wanted: object) -> str:
    if name in _OTHER:
        return f"{_KEYS[name]}: {_OTHER[name]}"
    return f"{_KEYS[name]}: expected {saved}, as in the checkpoint, got {wanted}"


def _refuse_later(url: str, step: int, unsound: frozenset[int]) -> None:
    """Checkpoints of another course of events, or of another job, must not be mixed with those to come."""
    try:
        later = [at for at in Checkpoints(open_store(url)).steps() if at > step and at not in unsound]
    except StorageError as error:
        raise ConfigError(f"checkpoint.url: {error}") from error
    if later:
        raise ConfigError(
            f"checkpoint.url: {url} holds checkpoints of step {', '.join(map(str, later))} already; "
            "resume from the newest, or choose another place, nothing was overwritten"
        )
