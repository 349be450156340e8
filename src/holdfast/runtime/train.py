"""Trains a job on this machine and tells how it went."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.job import Job
from holdfast.control.messages import Progress
from holdfast.core.faults import Fault
from holdfast.core.profile import Profile
from holdfast.errors import ConfigError, InternalError, StateUnavailable
from holdfast.runtime.agent import Agent, Outcome
from holdfast.runtime.resume import parse_resume
from holdfast.telemetry.events import Event, read_events
from holdfast.telemetry.report import RunReport, report

__all__ = ["Summary", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run went; ``summary.json`` holds the same.

    Attributes:
        steps: committed steps.
        final_loss: float64 mean over the last step's micro-batches, in their order.
        weights_sha256: of all parameters after the last step.
        state_sha256: of parameters, buffers and optimizer state.
        generations: plans installed, the first included.
        processes_restarted: how often the coordinator was; workers never are while they live.
        steps_per_s: committed steps per second.
        report: failures and timeline.
        unfired: scheduled faults that never fired.
        run_dir: where everything was written.
        resumed_from: the step of the checkpoint that it went on from; None if it began anew.
    """

    steps: int
    final_loss: float | None
    weights_sha256: str | None
    state_sha256: str | None
    generations: int
    processes_restarted: int
    steps_per_s: float | None
    report: RunReport
    unfired: tuple[str, ...]
    run_dir: Path
    resumed_from: int | None = None

    def to_json(self) -> str:
        """The form of ``summary.json``."""
        fields = {
            "steps": self.steps,
            "final_loss": self.final_loss,
            "weights_sha256": self.weights_sha256,
            "state_sha256": self.state_sha256,
            "generations": self.generations,
            "processes_restarted": self.processes_restarted,
            "steps_per_s": self.steps_per_s,
            "failures": self.report.failures_json(),
            "resumed_from": self.resumed_from,
            "checkpoints": self.report.checkpoints,
        }
        return json.dumps(fields, indent=2) + "\n"


def train(
    job: Job,
    *,
    run_dir: str | Path | None = None,
    faults: Iterable[Fault] = (),
    emulate: Profile | None = None,
    resume: str | Path | None = None,
    accept: Iterable[str] = (),
    on_event: Callable[[Event], None] = lambda event: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Trains a job to its end, with the workers that are left when some die.

    Call it under ``if __name__ == "__main__":``, as everything that starts processes.

    Args:
        job: what to train, see :func:`holdfast.config.load.load_job`.
        run_dir: an empty or new directory; default ``runs/NAME-DATE-TIME``.
        faults: what is to be killed when, to see that training survives it.
        emulate: sleep as long as this profile says instead of computing, on its number of layers; for timing protocols
            and plans, not for training. Model and data of the job are not even built.
        resume: go on from the newest sound checkpoint of a run directory, a folder or a URL; with ``@STEP`` behind it,
            from that one.
        accept: keys of the job that may differ from those of the job which made the checkpoint, such as
            ``model.dropout``, or ``optimizer`` for all of its; the run is then no longer the one that was begun.
        on_event: called with what is worth a line before training starts: checkpoints that were rejected, and why;
            what the model or the data do not do the same every time.
        on_progress: called after every step.

    Raises:
        ConfigError: the job cannot be used, or cannot go on from that checkpoint; nothing was overwritten.
        StateUnavailable: a layer lost its last owner; what lives was saved in ``RUN_DIR/final``.
        Interrupted: SIGINT or SIGTERM came; every process is ended.
    """
    directory = Path(run_dir) if run_dir is not None else _default_directory(job)
    planned = tuple(faults)
    agent = Agent(
        job=job,
        run_dir=directory,
        faults=planned,
        emulate=emulate,
        resume=None if resume is None else parse_resume(str(resume)),
        accept=tuple(accept),
        on_event=on_event,
        on_progress=on_progress,
    )
    outcome = agent.run()
    summary = _summarise(directory, outcome, planned)
    (directory / "summary.json").write_text(summary.to_json())
    _raise_unless_done(outcome, summary)
    return summary


def _default_directory(job: Job) -> Path:
    return Path("runs") / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _summarise(directory: Path, outcome: Outcome, faults: tuple[Fault, ...]) -> Summary:
    told = report(read_events(directory / "events.jsonl"))
    return Summary(
        steps=outcome.step,
        final_loss=told.final_loss,
        weights_sha256=outcome.weights_sha256,
        state_sha256=outcome.state_sha256,
        generations=outcome.generations,
        processes_restarted=told.coordinator_restarts,
        steps_per_s=told.steps_per_s,
        report=told,
        unfired=tuple(str(fault) for fault in faults if str(fault) not in told.fired),
        run_dir=directory,
        resumed_from=told.resumed_from,
    )


def _raise_unless_done(outcome: Outcome, summary: Summary) -> None:
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
        case "user-error":
            raise ConfigError(outcome.detail)
        case _:
            raise InternalError(outcome.detail)
