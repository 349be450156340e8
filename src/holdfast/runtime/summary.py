"""How a run went: what its events tell, and what its end was."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from holdfast.core.faults import Fault
from holdfast.errors import StorageError
from holdfast.parsing import parsing
from holdfast.runtime.hardening import write_private
from holdfast.runtime.launch.ending import JobOutcome
from holdfast.runtime.rundir import attempts
from holdfast.telemetry.events import Event, JobEnded, Notice, Timed
from holdfast.telemetry.report import AttemptReport, RunReport, attempt, report
from holdfast.telemetry.story import read_story

__all__ = ["SUMMARY", "Summary", "done_before", "events_of", "summarise", "write_summary"]

SUMMARY = "summary.json"
_OF_EVENTS = ("omitted_steps", "steps_per_s", "sent_per_step", "failures", "evaluations", "checkpoints")
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
            "evaluations": None if "evaluations" in self.reasons else self.report.evaluations_json(),
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


def write_summary(summary: Summary, on_event: Callable[[Event], None]) -> None:
    """Writes the summary into its run directory, if that can be done: whoever called is given it anyway."""
    path = summary.run_dir / SUMMARY
    try:
        write_private(path, summary.to_json().encode())
    except OSError as error:
        on_event(Notice(worker="agent", text=f"{path}: cannot be written: {error.strerror}"))


def events_of(attempt: Path) -> list[Timed]:
    """Returns the events of an attempt; none if there are none that can be read."""
    with contextlib.suppress(StorageError):
        return read_story(attempt)
    return []


def done_before(directory: Path, on_event: Callable[[Event], None]) -> JobOutcome | None:
    """Returns how the newest attempt ended, if it was done; its hashes say so, or else its last event."""
    path = directory / SUMMARY
    if not path.exists():
        return None
    try:
        with parsing(StorageError, OSError):
            told = msgspec.json.decode(path.read_bytes(), type=_Done)
    except StorageError as error:
        on_event(Notice(worker="agent", text=f"{path}: cannot be read, what it tells is made again: {error}"))
        return None
    ended = [event.outcome for _, event in events_of(directory) if isinstance(event, JobEnded)]
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


def summarise(directory: Path, outcome: JobOutcome, faults: tuple[Fault, ...], *, done_before: bool = False) -> Summary:
    """Returns how a run went.

    Args:
        directory: of the run.
        outcome: how its newest attempt has ended.
        faults: that were scheduled.
        done_before: see :class:`Summary`.
    """
    runs = [events_of(each) for each in (*attempts(directory), directory)]
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
