"""``holdfast inspect``: shows what happened in a run."""

from __future__ import annotations

import argparse
import json
import time
from itertools import starmap
from pathlib import Path

from holdfast.cli.following import Runner, follow, read_news, tell_underway, who_runs
from holdfast.cli.ways_shown import tell_technique, tell_way, tell_way_in_full
from holdfast.control.chain.opening import plans_in
from holdfast.core.plan import Plan
from holdfast.drawing.run import run_to_svg
from holdfast.drawing.run_text import run_to_text
from holdfast.drawing.run_trace import run_to_trace
from holdfast.drawing.step import step_to_svg
from holdfast.errors import ConfigError, StorageError, place_of
from holdfast.parsing import parsing
from holdfast.plain import one_line
from holdfast.runtime.launch.directory import decisions_of
from holdfast.runtime.rundir import attempts
from holdfast.telemetry.events import (
    Agreed,
    Checkpointed,
    CheckpointFailed,
    CheckpointRejected,
    Chosen,
    ClockCompared,
    CoordinatorLost,
    CoordinatorReady,
    Detected,
    Evaluated,
    Event,
    EventsMissing,
    ExceptionRaised,
    FaultInjected,
    HandingOver,
    Held,
    Installed,
    JobEnded,
    JobStarted,
    Judged,
    LibraryFilled,
    Loaded,
    MadeAgain,
    Migrating,
    Notice,
    Parted,
    Pinned,
    PlanImproved,
    Predicted,
    Preparing,
    Ran,
    Reattached,
    Rebuilt,
    Replaying,
    Resumed,
    Scheduled,
    Seated,
    StepOmitted,
    StepOps,
    Summed,
    Suspected,
    Synced,
    Timed,
    WorkerReady,
)
from holdfast.telemetry.report import FailureReport, attempt, report
from holdfast.telemetry.shown import shown
from holdfast.telemetry.story import EVENTS, StoryReader
from holdfast.telemetry.timeline import BOUNDARY, run_timeline
from holdfast.telemetry.underway import Underway, underway

__all__ = ["add_inspect_parser", "narrate", "sum_up", "tell_at_once", "tell_checkpoint"]


def add_inspect_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``inspect`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser("inspect", help="show what happened in a run", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory")
    parser.add_argument(
        "--format",
        choices=("text", "svg", "json"),
        default="text",
        help="text: what matters, a picture in letters, then what happened when (default); svg: a picture; json: what "
        "matters, for machines",
    )
    parser.add_argument(
        "--all", dest="every", action="store_true", help="tell every step, and whatever else happens in every run"
    )
    parser.add_argument(
        "--perfetto",
        action="store_true",
        help="print what every worker ran, beside its plan, as a trace for https://ui.perfetto.dev",
    )
    parser.add_argument("--step", type=int, help="with --format svg: what every worker ran in this step, 0-based")
    parser.add_argument(
        "--follow",
        action="store_true",
        help="tell how far a running job is, and what happens to it, until it ends; then exit with 0 if done, else 1",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the picture, or picture and story, of a run and returns 0; for ``--follow`` see :func:`follow`."""
    run_dir = Path(args.run_dir)
    if args.follow:
        _check_follow(args)
        return follow(run_dir, tell_at_once)
    if not (run_dir / EVENTS).is_file():
        raise ConfigError(f"{args.run_dir}: is no run directory, it has no {EVENTS}")
    timed, now = _read(run_dir)
    if args.perfetto:
        plans = _plans(run_dir)
        with parsing(lambda text: ConfigError(f"{args.run_dir}: its log and its plans do not fit together: {text}")):
            print(run_to_trace(timed, plans), end="")
    elif args.step is not None:
        if args.format != "svg":
            raise ConfigError("--step: one step is drawn; expected --format svg with it")
        print(step_to_svg(timed, args.step), end="")
    elif args.format == "svg":
        print(run_to_svg(run_timeline(timed), _title(timed)), end="")
    elif args.format == "json":
        print(_to_json(timed, _running(run_dir, timed, now)[0]))
    else:
        running, unknown = _running(run_dir, timed, now)
        told = unknown if running is None else tell_underway(*running)
        print(narrate_attempts(run_dir) + _text(timed, every=args.every, running=told))
    return 0


def _check_follow(args: argparse.Namespace) -> None:
    if args.format != "text" or args.perfetto or args.every or args.step is not None:
        raise ConfigError("--follow: tells what happens as it does; expected neither --format nor what else is drawn")


def tell_at_once(event: Event, beginning: bool) -> str | None:
    """Returns what to say of an event while a job runs, None if nothing; ``beginning``: of all its workers."""
    return None if _is_routine(event, beginning) else _tell(event)


def _running(run_dir: Path, timed: list[Timed], now: float) -> tuple[tuple[Runner, Underway] | None, str]:
    """Who runs a job, and how far it is; None if it has ended, or was killed. And why that is not known, if so."""
    if any(isinstance(event, JobEnded) for _, event in timed):
        return None, ""
    try:
        who = who_runs(run_dir)
    except ConfigError as error:
        return None, f"it has not ended, or was killed; {error}"
    return None if who is None else (who, underway(timed, now)), ""


def _read(run_dir: Path) -> tuple[list[Timed], float]:
    """The events of a run, fit to be shown, and what their clock shows now.

    Raises:
        ConfigError: its logs are none, or cannot be read.
    """
    reader = StoryReader(run_dir)
    news = read_news(reader, run_dir)
    return [*news, *((at, shown(gap)) for at, gap in reader.gaps())], reader.now()


def _text(timed: list[tuple[float, Event]], *, every: bool, running: str) -> str:
    """What matters, the picture, and the story."""
    if not timed:
        return "nothing happened yet"
    return "\n\n".join([sum_up(timed, running), run_to_text(run_timeline(timed)), narrate(timed, every=every)])


def narrate_attempts(run_dir: Path) -> str:
    """Returns a line for each earlier attempt in a run directory, and a heading for the newest one; empty if none."""
    lines = [_tell_attempt(number, folder) for number, folder in enumerate(attempts(run_dir), 1)]
    return "".join(f"{line}\n" for line in (*lines, f"attempt {len(lines) + 1}:")) if lines else ""


def _tell_attempt(number: int, folder: Path) -> str:
    """One earlier attempt in one line; also one whose log is damaged, which must not hide the others."""
    path = folder / EVENTS
    try:
        timed = _read(folder)[0] if path.is_file() else []
        with parsing(lambda text: ConfigError(f"{path}: cannot be told: {text}")):
            return f"{_told(number, timed)}: holdfast inspect {folder}"
    except ConfigError as error:
        return f"attempt {number}: {error}"


def _when(began: float) -> str:
    try:
        return f" began {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(began))}"
    except OSError as error:  # a year that does not fit, which other numbers have an OverflowError for
        raise OverflowError(f"{began} is no time: {error}") from error


def _told(number: int, timed: list[tuple[float, Event]]) -> str:
    """One earlier attempt in one line."""
    told = attempt(timed)
    when = "" if told.began is None else _when(told.began)
    start = f", went on from step {told.resumed_from}" if told.resumed_from is not None else ""
    lost = f", lost {told.failures} worker(s)" if told.failures else ""
    return f"attempt {number}{when}{start}{lost}, ended after {told.steps} steps: {one_line(told.outcome)}"


def _plans(run_dir: Path) -> dict[int, Plan]:
    """The plans of all generations.

    Raises:
        ConfigError: the run kept its decisions elsewhere.
    """
    if (url := decisions_of(run_dir)) is None:
        raise ConfigError(
            f"{run_dir}: its plans are not known: it has no control.db, and its job.yaml does not say where else they "
            "are (or it was simulated)"
        )
    try:
        return plans_in(url)
    except StorageError as error:
        raise ConfigError(str(error)) from None


def _title(timed: list[tuple[float, Event]]) -> str:
    """What a picture says of its run in one line."""
    told = [_tell_job(event) for _, event in timed if isinstance(event, JobStarted | JobEnded)]
    return "; ".join(text for text in told if text)


def _to_json(timed: list[tuple[float, Event]], running: tuple[Runner, Underway] | None) -> str:
    """What matters of a run, as data; how it recovers from the loss of a node with all figures."""
    told, events = report(timed), [event for _, event in timed]
    found = {
        "name": next((event.name for event in events if isinstance(event, JobStarted)), None),
        "outcome": next((event.outcome for event in events if isinstance(event, JobEnded)), None),
        "running": None if running is None else {"process": running[0].process, **running[1].to_json()},
        "recovery": next((event.figures() for event in events if isinstance(event, Chosen)), None),
        "resumed_from": told.resumed_from,
        "steps_committed": len(told.commits),
        "steps_per_s": told.steps_per_s,
        "failures": told.failures_json(),
        "nodes": told.nodes,
        "checkpoints": told.checkpoints,
        "missing": told.missing,
    }
    return json.dumps(found, indent=2)


def sum_up(timed: list[tuple[float, Event]], running: str = "") -> str:
    """Returns what matters of a run in a few lines: how it ended, what it learnt, whom it lost, what to look at.

    ``running``: how far it is, if it has not ended.
    """
    told, events = report(timed), [event for _, event in timed]
    started = [_tell_job(event) for event in events if isinstance(event, JobStarted)]
    ended = [_tell_job(event) for event in events if isinstance(event, JobEnded)]
    lines = [text for text in (*started, *(ended or [running or "it has not ended, or was killed"])) if text]
    if told.commits:
        lines.append(f"{len(told.commits)} steps committed, {told.steps_per_s or 0:.2f} steps/s{_losses(events)}")
    lines += [_tell_failure(failure) for failure in told.failures]
    lines += [_tell_rest(event) for event in events if isinstance(event, Agreed) and event.goes_on]
    lines += [text for event in events if isinstance(event, ExceptionRaised) if (text := _tell_loss(event))]
    lines += [text for event in events if isinstance(event, Parted | Seated | Synced) if (text := _tell_members(event))]
    lines += [tell_technique(event.technique, event.why) for event in events if isinstance(event, Scheduled)]
    lines += [line for event in events if isinstance(event, Chosen) for line in tell_way_in_full(event)]
    if len(told.nodes) > 1:
        lines.append(f"nodes: {'; '.join(starmap(_tell_node, told.nodes.items()))}")
    if (sent := told.sent_per_step) is not None:
        lines.append(f"for each step all together sent {_size(sent.messages)} in messages, {_size(sent.sums)} for sums")
    if told.coordinator_restarts:
        lines.append(f"the coordinator was started again {told.coordinator_restarts} times")
    if told.checkpoints:
        lines.append(f"checkpoints of the steps {', '.join(map(str, told.checkpoints))}")
    lines += [text for event in events if isinstance(event, CheckpointFailed) if (text := tell_checkpoint(event))]
    if told.omitted:
        lines.append(f"OMITTED: {told.tell_omitted()}")
    if told.missing:
        lines.append(f"events are MISSING: {told.missing}")
    return "\n".join(
        [*lines, *dict.fromkeys(text for event in events if isinstance(event, Notice) if (text := _tell(event)))]
    )


def _tell_node(node: str, workers: tuple[str, ...]) -> str:
    return f"{node} with {', '.join(workers)}" if workers else f"{node} without a worker"


def _losses(events: list[Event]) -> str:
    known = {event.step: event.loss for event in events if isinstance(event, StepOps) and event.loss is not None}
    if not known:
        return ""
    first, last = min(known), max(known)
    return f", loss {known[first]:.4f} in step {first}, {known[last]:.4f} in step {last}"


def _tell_failure(failure: FailureReport) -> str:
    where = f" at {failure.point}" if failure.point else ""
    when = f" in step {failure.step}" if failure.step >= 0 else ""
    text = f"worker {failure.worker} lost{when} ({failure.kind}{where})"
    if failure.resumed_s is not None:
        text += (
            f": detected {_ms(failure.detected_s)}, agreed {_ms(failure.agreed_s)}, rebuilt {_ms(failure.rebuilt_s)}, "
            f"next commit {_ms(failure.resumed_s)} after the {failure.kind}"
        )
    known, at_most = failure.recomputed_microbatches, failure.recomputed_at_most
    number = str(known) if at_most <= known else f"{known} to {at_most}"
    return f"{text}; {number} (layer, micro-batch) pairs run again"


def _tell_rest(event: Agreed) -> str:
    """What was kept of a step that a loss interrupted."""
    dropped = f", {event.dropped} of the step behind dropped" if event.dropped else ""
    if event.concluded:
        return f"step {event.step} was over but for updates, which were made by the verdict that somebody knew{dropped}"
    text = f"step {event.step} was gone on with: {len(event.redone)} pairs were lost and run again"
    text += f", {len(event.regenerated)} more for a message that nobody had" if event.regenerated else ""
    return text + dropped


def narrate(timed: list[tuple[float, Event]], *, every: bool = True) -> str:
    """Returns a run as lines: what happened when.

    Args:
        timed: its events, in the order of time, at least one.
        every: also what happens in every run: steps that counted, workers that get ready at the beginning, messages
            that did not arrive after a loss. Else a line at the end says how many of these were left out.
    """
    start = timed[0][0]
    begun = next((time for time, event in timed if isinstance(event, Installed)), timed[-1][0])
    told = [(time, event, text) for time, event in timed if (text := _tell(event))]
    kept = [
        f"{time - start:9.3f} s  {text}" for time, event, text in told if every or not _is_routine(event, time < begun)
    ]
    left_out = len(told) - len(kept)
    return "\n".join([*kept, f"{left_out} lines of every run are left out; --all tells them"] if left_out else kept)


def _is_routine(event: Event, beginning: bool) -> bool:
    match event:
        case StepOps(omitted=omitted):
            return not omitted
        case WorkerReady():
            return beginning
    return isinstance(event, Suspected | Pinned | Loaded | Ran | ClockCompared | Summed | Judged)


def tell_checkpoint(event: Event) -> str | None:
    """Returns one line on what became of a checkpoint; None if the event is about something else."""
    match event:
        case Resumed():
            return "; ".join((f"goes on from the checkpoint of step {event.step} in {event.url}", *event.notes))
        case CheckpointRejected():
            return f"checkpoint of step {event.step} is not used: {event.reason}"
        case Pinned():
            return f"worker {event.worker} pinned its part of checkpoint {event.step} in {_ms(event.seconds)}"
        case Loaded():
            return f"worker {event.worker} loaded its layers of before step {event.step} in {_ms(event.seconds)}"
        case Checkpointed():
            return f"checkpoint of step {event.step} is complete"
        case CheckpointFailed():
            who = f" by worker {event.worker}" if event.worker else ""
            return f"checkpoint of step {event.step} could not be written{who}: {event.detail}"
    return None


def _figure(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _memory(generation: int) -> str:
    return f", it remembers generation {generation}" if generation else ""


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes} bytes"


def _tell(event: Event) -> str | None:
    told = _tell_job(event) or _tell_coordinator(event) or _tell_loss(event)
    return told or _tell_members(event) or tell_checkpoint(event)


def _tell_job(event: Event) -> str | None:
    match event:
        case JobStarted():
            return f"job {event.name}: {event.workers} workers, {event.steps} steps of {event.samples_per_step} samples"
        case Chosen():
            return tell_way(event)
        case Scheduled():
            return tell_technique(event.technique, event.why)
        case Preparing():
            return event.text
        case Notice():
            return f"{f'worker {event.worker}' if event.worker[:1].isdigit() else event.worker}: {event.text}"
        case EventsMissing():
            return f"{event.count} events before this one are missing, they could not be written: {event.why}"
        case StepOps(loss=float() as loss):
            omitted = ", OMITTED: a gradient was not finite" if event.omitted else ""
            return f"step {event.step} done by {event.worker}, loss {loss:.4f}{omitted}"
        case Ran():
            return f"steps {event.first} to {event.stop - 1} done, in {event.step_s:.4g} s each"
        case Summed(sums=0):
            return f"worker {event.worker} begins step {event.step}"
        case Summed():
            return f"worker {event.worker} holds {event.sums} sum(s) of step {event.step}"
        case Judged():
            rate = "" if event.rate is None else f", learning rate {event.rate:.4g}"
            return f"step {event.step} judged, norm of its gradient {_figure(event.norm)}{rate}"
        case StepOmitted():
            return f"step {event.step}, updated ahead of its verdict, is OMITTED: a gradient was not finite"
        case StepOps(knows_loss=True):
            return f"step {event.step} done by {event.worker}, OMITTED: the loss was not finite"
        case JobEnded():
            return f"ended: {event.outcome} at step {event.step}"
    return None


def _tell_coordinator(event: Event) -> str | None:
    match event:
        case FaultInjected(worker="coordinator"):
            return f"FAULT {event.kind} strikes the coordinator in step {event.step} at {event.point}"
        case CoordinatorLost():
            return f"the coordinator is gone: {event.how}"
        case CoordinatorReady():
            where = f" on node {event.node}" if event.node else ""
            return f"coordinator ready{where} (process {event.pid})" + _memory(event.generation)
        case ClockCompared():
            text = f"clock {event.other} is {event.ahead_s:.6f} s ahead of {event.mine}, the coordinator's"
            return f"{text}, within {1000 * event.within_s:.2g} ms"
        case Reattached():
            after = "all go on" if event.adopted else "a new one follows"
            return f"all are back at the coordinator in generation {event.generation}: {after}"
    return None


def _tell_loss(event: Event) -> str | None:
    match event:
        case FaultInjected(kind="join", worker="new"):
            return f"JOIN: a new worker is offered from step {event.step} on"
        case FaultInjected(kind="join"):
            return f"JOIN: worker {event.worker} is offered again from step {event.step} on"
        case FaultInjected():
            point = f" at {event.point}" if event.point else ""
            return f"FAULT {event.kind} strikes worker {event.worker} in step {event.step}{point}"
        case ExceptionRaised():
            place = place_of(event.phase, event.layer, event.item, event.microbatch)
            return f"worker {event.worker} stopped in step {event.step}, {place}: {event.error}"
        case Detected():
            return f"worker {event.worker}{', a spare,' if event.spare else ''} is lost: {event.how}"
        case Suspected():
            return f"worker {event.worker} cannot reach {event.peer or 'a peer'}: {event.detail}"
        case Agreed():
            how = "goes on with" if event.goes_on else "runs from"
            return f"generation {event.generation} {how} step {event.step}"
    return None


def _tell_members(event: Event) -> str | None:
    match event:
        case WorkerReady():
            where = f" on node {event.node}" if event.node else ""
            return f"worker {event.worker} ready{where} (process {event.pid})"
        case Installed():
            why = {"": "", BOUNDARY: ", between two steps"}.get(event.strategy, f", by {event.strategy}")
            return f"generation {event.generation}: {len(event.workers)} workers{why}"
        case Replaying(layers=(first, stop)):
            who, steps = ", ".join(event.workers), event.stop - event.start
            what = f"layers {first}-{stop - 1}" if stop > first + 1 else f"layer {first}"
            return f"{who} replay(s) {steps} step(s) of {what}, from the checkpoint of step {event.start}"
        case Rebuilt():
            return f"generation {event.generation} is connected"
        case MadeAgain():
            return f"the updates of step {event.step} are made again: {event.why}"
        case PlanImproved():
            faster = 1 - event.period / event.before
            return f"a plan whose steps are {faster:.1%} shorter was found: generation {event.generation}"
        case LibraryFilled():
            return f"the plan library is complete, for 1 to {event.failures} failures"
        case HandingOver():
            takes = ", ".join(f"{worker} takes layers {layers} over" for worker, layers in event.takes)
            return f"{takes}: generation {event.generation}"
        case Predicted():
            others = "; ".join(f"{name}: {steps:.4g}" for name, steps in event.steps if name != event.chosen)
            makes = dict(event.steps)[event.chosen]
            return (
                f"{event.chosen}: {makes:.4g} step(s) until the next failure, in {event.until_s:.4g} s on average; "
                f"compared with {others or 'nothing'}"
            )
        case Held():
            return (
                f"{event.chosen}: {event.made} step(s) were made in {event.seconds:.4g} s, "
                f"{event.expected:.4g} were expected"
            )
        case Evaluated():
            return event.told
        case Migrating():
            moves = ", ".join(f"{worker} takes the place of {place}" for worker, place in event.moves)
            faster = 1 - event.period / event.before
            return f"{moves}, for steps that are {faster:.1%} shorter: generation {event.generation}"
        case Seated():
            return f"worker {event.worker} takes the place of {event.place}"
        case Parted():
            return f"worker {event.worker} has left before step {event.step}"
        case Synced():
            return (
                f"worker {event.worker} has caught up before step {event.step}: it entered before step "
                f"{event.entered} and was given {_size(event.bytes)}"
            )
    return None
