"""Finds the checkpoint that a job goes on from, and refuses one that is not this job's."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.config.deciding import GLOBAL_BATCH, compare, compare_told, covers, deciding
from holdfast.config.job import Job
from holdfast.config.load import load_job
from holdfast.errors import ConfigError, StorageError
from holdfast.runtime.rundir import job_files
from holdfast.runtime.specs import Found, ResumeFrom, changed_sources
from holdfast.storage.blobs import open_store
from holdfast.storage.checkpoints import Checkpoints, Facts, Rejected, Sound

__all__ = [
    "Comparison",
    "check_accepted",
    "check_same_job",
    "checkpoints_url",
    "compared",
    "find",
    "jobs_before",
    "parse_resume",
    "resume_auto",
]

_AT_STEP = re.compile(r"(?P<place>.+)@(?P<step>[0-9]{1,18})", re.ASCII | re.DOTALL)
_ROOM = 1_000
_OF_SCRIPTS = ("optimizer", "scheduler", "data")
_MODEL = "model: other names, shapes or types of parameters than the checkpoint's; use the model that it was made with"
_DATA = "data: other samples than the checkpoint's; use the data that it was made with"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A checkpoint beside a job.

    Attributes:
        foreign: why the checkpoint cannot be loaded at all.
        differences: what would lead to other bits, by the key that a user accepts it with.
        notes: what could not be compared, for people.
    """

    foreign: tuple[str, ...]
    differences: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


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
    if described := job_files(Path(place)):
        place = checkpoints_url(load_job(described[0]), Path(place))
    return ResumeFrom(url=place, step=step)


def jobs_before(run_dir: Path, skipped: Callable[[str], None]) -> tuple[Job, ...]:
    """Returns the jobs of the attempts in a run directory, the newest first.

    ``skipped`` is told of each that cannot be read: it was cut short, or is of another version of Holdfast.
    """
    jobs: list[Job] = []
    for path in job_files(run_dir):
        try:
            jobs.append(load_job(path))
        except ConfigError as error:
            skipped(f"an earlier attempt is passed over, its job cannot be read: {error}")
    return tuple(jobs)


def resume_auto(job: Job, run_dir: Path, before: Sequence[Job]) -> ResumeFrom:
    """Returns what goes on with whatever was begun: in a run directory, or where the job's checkpoints go.

    ``before``: the jobs of earlier attempts, the newest first.
    """
    urls = (checkpoints_url(each, run_dir) for each in (job, *before))
    first, *others = dict.fromkeys(urls)
    return ResumeFrom(url=first, step=None, auto=True, others=tuple(others))


def check_same_job(job: Job, run_dir: Path, before: Sequence[Job], accept: tuple[str, ...]) -> None:
    """Refuses to go on in the run directory of another job; ``before`` are those there, the newest first.

    Raises:
        ConfigError: it differs in what decides bits, and that was not accepted.
    """
    if before:
        found, _ = compare(deciding(before[0]), _told(job, before[0]))
        differences = tuple((each.path, each.told("the run before")) for each in found)
        comparison = Comparison(foreign=(), differences=differences, notes=())
        _accepted(f"--run-dir {run_dir}: holds a run of another job", comparison, accept)


def _told(job: Job, before: Job) -> Job:
    """A job whose script, or data, have yet to say how many steps and micro-batches it has: as in the run before."""
    if not job.train.steps:
        return replace(job, train=replace(job.train, steps=before.train.steps))
    if not (job.loops and before.loops):
        return job
    return replace(job, grid=before.grid, train=replace(job.train, steps=before.train.steps, seed=before.train.seed))


def find(job: Job, resume: ResumeFrom | None, url: str, facts: Facts, accept: tuple[str, ...] = ()) -> Found | None:
    """Returns the checkpoint that a job goes on from, every shard verified; None if it begins anew.

    Args:
        job: the job.
        resume: from which checkpoint; None to begin anew.
        url: where the job's own checkpoints will go.
        facts: what the job is.
        accept: keys that may differ from the checkpoint's, such as ``model.dropout`` or ``optimizer``.

    Raises:
        ConfigError: there is no sound checkpoint, or it is another job's; or the job's own checkpoints would overwrite
            later ones.
    """
    if resume is None:
        if job.checkpoint_every:
            _refuse_later(url, 0, frozenset())
        return None
    try:
        chosen = _choose(resume)
    except StorageError as error:
        raise ConfigError(f"--resume {resume}: {error}") from error
    if chosen is None:
        return None
    place, sound = chosen
    manifest = sound.manifest
    notes = _accepted(f"--resume {resume}: not a checkpoint of this job", compared(manifest.facts, facts, job), accept)
    if manifest.step >= job.train.steps + resume.auto:
        raise ConfigError(
            f"train.steps: the checkpoint is of step {manifest.step}, nothing is left to do; expected more than that, "
            f"got {job.train.steps}"
        )
    if job.checkpoint_every:
        _refuse_later(url, manifest.step, frozenset(each.step for each in sound.rejected))
    return Found(url=place, step=manifest.step, rejected=sound.rejected, notes=notes, best=manifest.best)


def _choose(resume: ResumeFrom) -> tuple[str, Sound] | None:
    """Returns the checkpoint that is meant, and where it is; None if one is not needed and there is none anywhere.

    Raises:
        StorageError: a place cannot be read; a checkpoint is needed and not there; or none that is there is sound.
    """
    if not resume.auto:
        return resume.url, Checkpoints(open_store(resume.url)).newest_sound(resume.step)
    stores = {place: Checkpoints(open_store(place)) for place in (resume.url, *resume.others)}
    found = sorted(((step, place) for place in stores for step in stores[place].steps()), reverse=True)
    rejected: list[Rejected] = []
    for step, place in found:
        try:
            sound = stores[place].newest_sound(step)
        except StorageError as error:
            rejected.append(Rejected(step=step, reason=str(error)))
        else:
            return place, Sound(manifest=sound.manifest, rejected=tuple(rejected))
    if rejected:
        reasons = "; ".join(f"step {each.step}: {each.reason}" for each in rejected)
        raise StorageError(f"no checkpoint is sound, delete them to begin anew: {reasons}")
    return None


def compared(saved: Facts, wanted: Facts, job: Job) -> Comparison:
    """Compares what a checkpoint says of the job that made it with ``job``, of which ``wanted`` are the facts."""
    foreign = [_MODEL] if saved.model != _model_as_in(saved, wanted) else []
    if saved.layers != wanted.layers:
        foreign.insert(0, f"the number of the model's layers: expected {saved.layers}, got {wanted.layers}")
    found, unknown = compare(saved.values or _values_of_old(saved, job), job)
    if saved.script is not None and wanted.script is not None:
        found += compare_told(saved.script, wanted.script)
    differences = [(each.path, each.told("the checkpoint")) for each in found]
    known = any(path == "data" or path.startswith("data.") for path, _ in differences)
    if not known and (
        saved.data != wanted.data or (saved.contents and wanted.contents and saved.contents != wanted.contents)
    ):
        differences.append(("data", _DATA))
    notes = _notes(saved, wanted, unknown)
    anew = [each.path for each in found if saved.script is not None and _begins_anew(each.path)]
    notes += tuple(f"{path}: its state begins anew, and the weights go on" for path in anew)
    return Comparison(foreign=tuple(foreign), differences=tuple(differences), notes=notes)


def _model_as_in(saved: Facts, wanted: Facts) -> str:
    """The model's digest; one that did not tell a script's settings has its first weights instead."""
    return wanted.first if wanted.first and saved.script is None else wanted.model


def _begins_anew(path: str) -> bool:
    return path.endswith(".kind") and path.startswith(("optimizer", "scheduler"))


def _values_of_old(saved: Facts, job: Job) -> dict[str, Any]:
    """What is known of a job that did not tell all: whatever it did not tell counts as equal."""
    told = {
        "train.seed": saved.seed,
        GLOBAL_BATCH: saved.microbatches,
        "grid.microbatch_size": saved.microbatch_size,
        "optimizer.kind": saved.optimizer,
    }
    return {**deciding(job), **told}


def _notes(saved: Facts, wanted: Facts, unknown: tuple[str, ...]) -> tuple[str, ...]:
    """What a comparison of values does not tell."""
    notes = [f"{path}: this version of Holdfast does not know it, the checkpoint's does" for path in unknown]
    if saved.values is None:
        notes.append(
            f"the checkpoint is of a Holdfast ({saved.holdfast}) that noted no arguments of model and optimizer, "
            "numerics, clipping or loss scale: they could not be compared"
        )
    elif wanted.script is not None and saved.script is None:
        notes.append(
            f"the checkpoint is of a Holdfast ({saved.holdfast}) that noted no settings of a script's optimizers and "
            "schedulers, and no samples: they could not be compared, and are as in the checkpoint"
        )
    changed = changed_sources(saved.sources, wanted.sources)
    return (*notes, *(f"{key}: the code in its file has changed since the checkpoint was made" for key in changed))


def _accepted(what: str, comparison: Comparison, accept: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what a person should read of a comparison.

    Raises:
        ConfigError: something differs and was not accepted.
    """
    refused = [(path, text) for path, text in comparison.differences if not covers(accept, path)]
    if refused or comparison.foreign:
        texts = [*comparison.foreign, *(text for _, text in refused)]
        hint = "" if comparison.foreign else _hint([path for path, _ in refused])
        raise ConfigError(f"{what}: {_listed(texts)}{hint}")
    return (*(f"{text}: accepted" for path, text in comparison.differences), *comparison.notes)


def _listed(texts: Sequence[str]) -> str:
    """As many as leave room for what is to be done about them, which comes behind."""
    fit = max(1, sum(end <= _ROOM for end in itertools.accumulate(map(len, texts))))
    more = [f"and {len(texts) - fit} more"] if fit < len(texts) else []
    return "; ".join([*(text[:_ROOM] for text in texts[:fit]), *more])


def _hint(paths: Sequence[str]) -> str:
    keys = ",".join(path.split(" x ")[-1] for path in paths)
    return f"; to go on all the same, with other bits than the run that was begun: --accept {keys}"


def check_accepted(job: Job, accept: Sequence[str]) -> None:
    """Refuses keys that decide nothing: they are misspelt.

    Raises:
        ConfigError: there is such a key.
    """
    known = [part for path in (*deciding(job), "data", "train.steps") for part in path.split(" x ")]
    sections = {path.rpartition(".")[0] for path in known}
    for name in accept:
        if job.loops and name.partition(".")[0] in _OF_SCRIPTS:
            continue  # only its script knows its optimizers
        if not any(path == name or path.startswith(f"{name}.") for path in known):
            near = difflib.get_close_matches(name, [*known, *sections], n=1)
            raise ConfigError(
                f"--accept {name}: no key that decides the bits of this job; "
                + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
            )


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
