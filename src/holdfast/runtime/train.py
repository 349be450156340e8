"""Trains a job on this machine and tells how it went."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from holdfast.config.job import Job
from holdfast.control.messages import Progress
from holdfast.core.faults import Fault
from holdfast.core.profile import Profile
from holdfast.errors import (
    ConfigError,
    DecisionsLost,
    InternalError,
    ProgramFailed,
    StateUnavailable,
    StorageError,
    TooFewWorkers,
)
from holdfast.parsing import parsing
from holdfast.runtime.hardening import write_private
from holdfast.runtime.launch.ending import JobOutcome
from holdfast.runtime.launch.hearing import Hearing
from holdfast.runtime.launch.launcher import Launcher
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.resume import check_same_job, jobs_before, parse_resume, resume_auto
from holdfast.runtime.rundir import RunDirLock, attempts
from holdfast.runtime.specs import ResumeFrom
from holdfast.telemetry.events import Event, JobEnded, Notice, read_events
from holdfast.telemetry.report import AttemptReport, RunReport, attempt, report

__all__ = ["Summary", "train"]

_OF_EVENTS = ("omitted_steps", "steps_per_s", "sent_per_step", "failures", "checkpoints")
"""What nothing but events can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run went; ``summary.json`` holds the same.

    Attributes:
        steps: committed steps.
        final_loss: float64 mean over the last step's micro-batches, in their order; None if that step was omitted.
        omitted_steps: how many committed steps changed nothing, as their loss or a gradient was not finite.
        weights_sha256: of all parameters after the last step.
        state_sha256: of parameters, buffers and optimizer state.
        generations: plans installed, the first included.
        processes_restarted: how often the coordinator was; workers never are while they live.
        steps_per_s: committed steps per second.
        report: failures and timeline, as far as events tell.
        unfired: scheduled faults that never fired.
        run_dir: where everything was written.
        resumed_from: the step of the checkpoint that it went on from; None if it began anew.
        attempts: all attempts in the run directory, the oldest first, this one the last. What is not said to be of all
            of them is of this one.
        done_before: whether an earlier attempt was done, so that nothing was left to do, and nothing was changed.
        reasons: why a field is None, or null in ``summary.json``, that should have a value.
        unchanged_from: the first step, if no step of all attempts has changed the weights; else None.
        scripts_failed: the workers whose script failed behind its loop, when all was trained and saved.
    """

    steps: int
    final_loss: float | None
    omitted_steps: int | None
    weights_sha256: str | None
    state_sha256: str | None
    generations: int
    processes_restarted: int
    steps_per_s: float | None
    report: RunReport
    unfired: tuple[str, ...]
    run_dir: Path
    resumed_from: int | None = None
    attempts: tuple[AttemptReport, ...] = ()
    done_before: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)
    unchanged_from: int | None = None
    scripts_failed: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The form of ``summary.json``."""
        fields = {
            "steps": self.steps,
            "final_loss": self.final_loss,
            "omitted_steps": self.omitted_steps,
            "weights_sha256": self.weights_sha256,
            "state_sha256": self.state_sha256,
            "generations": self.generations,
            "processes_restarted": self.processes_restarted,
            "steps_per_s": self.steps_per_s,
            "sent_per_step": self._sent_json(),
            "failures": None if "failures" in self.reasons else self.report.failures_json(),
            "resumed_from": self.resumed_from,
            "checkpoints": None if "checkpoints" in self.reasons else self.report.checkpoints,
            "reasons": dict(self.reasons),
            "attempts": [each.to_json() for each in self.attempts],
            "scripts_failed": list(self.scripts_failed),
        }
        return json.dumps(fields, indent=2) + "\n"

    def _sent_json(self) -> dict[str, int] | None:
        sent = self.report.sent_per_step
        return None if sent is None or "sent_per_step" in self.reasons else asdict(sent)


def train(
    job: Job,
    *,
    run_dir: str | Path | None = None,
    faults: Iterable[Fault] = (),
    emulate: Profile | None = None,
    resume: str | Path | None = None,
    accept: Iterable[str] = (),
    slots: int | None = None,
    token: str = "",
    on_event: Callable[[Event], None] = lambda event: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Trains a job to its end, with the workers that are left when some die.

    Call it under ``if __name__ == "__main__":``, as everything that starts processes.

    Args:
        job: what to train, see :func:`holdfast.config.load.load_job`.
        run_dir: an empty or new directory, or with ``resume="auto"`` that of earlier attempts; default
            ``runs/NAME-DATE-TIME``, with ``auto`` ``runs/NAME``.
        faults: what is to be killed when, to see that training survives it.
        emulate: sleep as long as this profile says instead of computing, on its number of layers; for timing protocols
            and plans, not for training. Model and data of the job are not even built.
        resume: go on from the newest sound checkpoint of a run directory, a folder or a URL; with ``@STEP`` behind it,
            from that one. ``auto`` begins, or goes on with what the same call began in the same run directory, or with
            what is in the job's ``checkpoint.url``; if that is done already, nothing is changed. None: as the job says.
        accept: keys of the job that may differ from those of the job which made the checkpoint, such as
            ``model.dropout``, or ``optimizer`` for all of its; the run is then no longer the one that was begun.
        slots: how many workers may begin on this machine, 0 or more; the others wait for agents of other machines, see
            :class:`holdfast.runtime.launch.joining.Joiner`. None: all begin here.
        token: what those agents have to know; empty: one is drawn, and written into the run directory.
        on_event: called with what is worth a line: what is done before the first step and after the last (Preparing,
            every second while it goes on); how the layers of a lost node are to come back (Chosen); workers that are
            lost or have come; checkpoints that were rejected, and why; what the model or the data do not do the same
            every time; what cannot be written while training goes on.
        on_progress: called after every step. Both are called in one thread of their own, in the order in which things
            happen, and nothing waits for them but the return; what they raise ends the job.

    Raises:
        ConfigError: the job cannot be used, or cannot go on from that checkpoint; nothing was overwritten. Or no step
            has changed the weights, which are saved in ``RUN_DIR/final`` all the same.
        DecisionsLost: the store of decisions was emptied, exchanged or damaged; what lives was saved as well.
        ProgramFailed: model, data or optimizer raised, on more than one worker; what lives was saved there, too.
        StateUnavailable: a layer lost its last owner; what lives was saved in ``RUN_DIR/final``.
        TooFewWorkers: fewer are left than are to go on; all was saved there.
        Interrupted: SIGINT or SIGTERM came; every process is ended.
    """
    wanted = job.resume if resume is None else str(resume)
    auto = wanted == "auto"
    directory = Path(run_dir) if run_dir is not None else _default_directory(job, auto=auto)
    accepted, planned = tuple(accept), tuple(faults)
    with Hearing() as hearing, RunDirLock(directory) as claim:
        on_event, on_progress = hearing.of(on_event), hearing.of(on_progress)
        before: tuple[Job, ...] = ()
        if auto:
            claim.take()
            before = jobs_before(directory, lambda text: on_event(Notice(worker="agent", text=text)))
            check_same_job(job, directory, before, accepted)
            if (done := _done_before(directory, on_event)) is not None and done.step >= job.train.steps:
                return _changed(job, _summarise(directory, done, planned, done_before=True))
        request = RunRequest(
            job=job,
            run_dir=directory,
            faults=_still_due(planned, directory) if auto else planned,
            emulate=emulate,
            resume=_resume_from(wanted, job, directory, before),
            accept=accepted,
            again=auto,
            slots=slots,
            token=token,
        )
        outcome = Launcher(request=request, claim=claim, on_event=on_event, on_progress=on_progress).run()
        summary = _summarise(directory, outcome, planned)
        _write(directory / "summary.json", summary, on_event)
    try:
        _raise_unless_done(outcome, summary)
    except (StateUnavailable, TooFewWorkers, DecisionsLost) as error:
        error.resume = _to_go_on_from(summary, wanted)
        raise
    return _changed(job, summary)


def _changed(job: Job, summary: Summary) -> Summary:
    """Returns what a run came to.

    Raises:
        ConfigError: to nothing.
    """
    if summary.unchanged_from is None:
        return summary
    first, last = summary.unchanged_from, summary.steps - 1
    scale = job.train.loss_scale
    scaled = "" if scale is None else f", train.loss_scale (it began with {scale.initial:g})"
    raise ConfigError(
        f"no step has changed the weights: in each from {first} to {last} the loss or a gradient was not finite, so "
        f"all were omitted; what is in {summary.run_dir / 'final'} was trained by none of them. Expected finite ones: "
        f"look at the data, the loss and the first weights{scaled}"
    )


def _to_go_on_from(summary: Summary, resumed: str | None) -> str:
    """The run directory if a checkpoint was made, or may have been; else what this run had itself gone on from."""
    if summary.report.checkpoints or summary.report.missing or resumed == "auto":
        return str(summary.run_dir)
    return resumed or ""


def _write(path: Path, summary: Summary, on_event: Callable[[Event], None]) -> None:
    """Writes the summary, if that can be done: whoever called is given it anyway."""
    try:
        write_private(path, summary.to_json().encode())
    except OSError as error:
        on_event(Notice(worker="agent", text=f"{path}: cannot be written: {error.strerror}"))


def _default_directory(job: Job, *, auto: bool) -> Path:
    return Path("runs") / (job.name if auto else f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _resume_from(wanted: str | None, job: Job, directory: Path, before: Sequence[Job]) -> ResumeFrom | None:
    if wanted is None:
        return None
    return resume_auto(job, directory, before) if wanted == "auto" else parse_resume(wanted)


def _events_of(attempt: Path) -> list[tuple[float, Event]]:
    """The events of an attempt; none if there are none that can be read."""
    with contextlib.suppress(StorageError):
        return read_events(attempt / "events.jsonl")
    return []


def _still_due(faults: tuple[Fault, ...], directory: Path) -> tuple[Fault, ...]:
    """The faults that no earlier attempt was struck by."""
    fired = {spec for each in (*attempts(directory), directory) for spec in report(_events_of(each)).fired}
    return tuple(fault for fault in faults if str(fault) not in fired)


def _done_before(directory: Path, on_event: Callable[[Event], None]) -> JobOutcome | None:
    """How the newest attempt in a run directory ended, if it was done; its hashes say so, or else its last event."""
    path = directory / "summary.json"
    if not path.exists():
        return None
    try:
        with parsing(StorageError, OSError):
            told = msgspec.json.decode(path.read_bytes(), type=_Done)
    except StorageError as error:
        on_event(Notice(worker="agent", text=f"{path}: cannot be read, what it tells is made again: {error}"))
        return None
    ended = [event.outcome for _, event in _events_of(directory) if isinstance(event, JobEnded)]
    if told.weights_sha256 is None and ended[-1:] != ["done"]:
        return None
    return JobOutcome(
        outcome="done",
        detail="",
        step=told.steps,
        directory=str(directory / "final"),
        generations=told.generations,
        weights_sha256=told.weights_sha256,
        state_sha256=told.state_sha256,
        no_hashes=told.reasons.get("weights_sha256", ""),
    )


class _Done(msgspec.Struct):
    """What only ``summary.json`` tells of an attempt that was done."""

    steps: int
    generations: int
    weights_sha256: str | None
    state_sha256: str | None
    reasons: dict[str, str] = {}


def _summarise(
    directory: Path, outcome: JobOutcome, faults: tuple[Fault, ...], *, done_before: bool = False
) -> Summary:
    runs = [_events_of(each) for each in (*attempts(directory), directory)]
    told = [*map(report, runs[:-1]), _checked(report(runs[-1]), outcome)]
    fired = {spec for each in told for spec in each.fired}
    newest, missing = told[-1], bool(told[-1].missing)
    loss, no_loss = _final_loss(told)
    return Summary(
        steps=outcome.step,
        final_loss=loss,
        omitted_steps=None if missing else len(newest.omitted),
        weights_sha256=outcome.weights_sha256,
        state_sha256=outcome.state_sha256,
        generations=outcome.generations,
        processes_restarted=max(outcome.restarts, newest.coordinator_restarts),
        steps_per_s=None if missing else newest.steps_per_s,
        report=newest,
        unfired=() if missing else tuple(str(fault) for fault in faults if str(fault) not in fired),
        run_dir=directory,
        resumed_from=newest.resumed_from if newest.resumed_from is not None else outcome.resumed_from,
        reasons=_reasons(newest, no_loss, outcome),
        attempts=tuple(attempt(events) for events in runs),
        done_before=done_before,
        unchanged_from=None if any(each.missing for each in told) else _unchanged_from(told),
        scripts_failed=outcome.scripts_failed,
    )


def _unchanged_from(told: Sequence[RunReport]) -> int | None:
    """The first step that was made, if all were omitted; of one that was made again the newest attempt tells."""
    omitted = {step: step in each.omitted for each in told for step, _ in each.commits}
    return min(omitted) if omitted and all(omitted.values()) else None


def _reasons(told: RunReport, no_loss: str, outcome: JobOutcome) -> dict[str, str]:
    """Why fields of the summary are null that should have a value."""
    reasons = dict.fromkeys(_OF_EVENTS, told.missing) if told.missing else {}
    if no_loss:
        reasons["final_loss"] = no_loss
    if outcome.no_hashes:
        reasons |= dict.fromkeys(("weights_sha256", "state_sha256"), outcome.no_hashes)
    return reasons


def _checked(told: RunReport, outcome: JobOutcome) -> RunReport:
    """What the events tell; where some are missing, the last loss is the one that we heard of."""
    expected = range(told.resumed_from or 0, outcome.step) if outcome.outcome == "done" else ()
    if not told.missing and not set(expected) <= {step for step, _ in told.commits}:
        told = replace(told, missing="the events of some steps are missing")
    return _heard(told, outcome) if told.missing else told


def _heard(told: RunReport, outcome: JobOutcome) -> RunReport:
    last = outcome.last
    if last is None or last.step != outcome.step - 1:
        return replace(told, final_loss=None, no_loss=told.missing)
    if last.omitted:
        return replace(told, final_loss=None, no_loss=f"step {last.step}, the last one, was omitted")
    return replace(told, final_loss=last.loss, no_loss="")


def _final_loss(told: Sequence[RunReport]) -> tuple[float | None, str]:
    """That of the newest attempt, or of the one that made the last step, if nothing was left to do but to save.

    And why there is none; empty if there is one.
    """
    newest = told[-1]
    if not newest.commits and newest.resumed_from is not None:
        made = (each for each in reversed(told) if each.commits and each.commits[-1][0] + 1 == newest.resumed_from)
        newest = next(made, newest)
    return newest.final_loss, newest.no_loss


def _raise_unless_done(outcome: JobOutcome, summary: Summary) -> None:
    match outcome.outcome:
        case "done":
            return
        case "lost":
            detail = (
                f"step {summary.steps} of what lives is saved in {outcome.directory}"
                if outcome.directory
                else outcome.detail
            )
            raise StateUnavailable(outcome.lost_layers, detail)
        case "too-few":
            raise TooFewWorkers(
                f"{outcome.detail}; step {summary.steps} is saved in {outcome.directory}; with resilience.degraded: "
                "allow training would go on"
            )
        case "forgotten":
            raise DecisionsLost(f"{outcome.detail}; step {summary.steps} of what lives is saved in {outcome.directory}")
        case "user-error":
            raise ConfigError(outcome.detail)
        case "program":
            raise ProgramFailed(outcome.detail)
        case _:
            raise InternalError(outcome.detail)
