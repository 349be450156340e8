"""``holdfast board``: a page on which a run is seen as it goes on."""

from __future__ import annotations

import argparse
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import msgspec

from holdfast.cli.inspect import tell_at_once
from holdfast.cli.serving import Asked, Page, add_serving_arguments, serve
from holdfast.cli.watched import Watched
from holdfast.control.chain.opening import is_database, plans_in
from holdfast.core.plan import Plan
from holdfast.drawing.schedule import schedule_to_svg
from holdfast.drawing.step import step_to_svg
from holdfast.errors import HoldfastError
from holdfast.plain import one_line
from holdfast.runtime.launch.directory import decisions_of
from holdfast.schedule.evaluate import evaluate
from holdfast.telemetry.board import Board
from holdfast.telemetry.events import Agreed, Detected, FaultInjected, JobStarted, StepOps, Timed
from holdfast.telemetry.measured import measured_costs, ran_by_step
from holdfast.telemetry.story import EVENTS

__all__ = ["add_board_parser"]

_ADDRESS = "127.0.0.1:8571"
_DRAWN = 64
"""So many workers are drawn at most: more are no picture any more, and take long."""
_PATIENCE_S = 10.0
_STEPS = 3
_BESIDES = 200
_JSON = "application/json"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/board.css": ("board.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/board.js": ("board.js", "text/javascript; charset=utf-8"),
    "/uPlot.css": ("uPlot.min.css", "text/css; charset=utf-8"),
    "/uPlot.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
}


def add_board_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``board`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "board",
        help="a page on which a run is seen as it goes on",
        description="Serves a page, each second anew: workers and layers, what may be lost now, loss and speed, "
        "recoveries, schedules and what happens. It reads the run directory, wherever that is seen, of a run that goes "
        "on, has ended or is yet to begin: nothing that trains waits for it. The page loads nothing from elsewhere.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory")
    text = f"where it is served, until Ctrl-C or SIGTERM; default: {_ADDRESS}, port 0: any that is free"
    add_serving_arguments(parser, text, "what the page shows", _ADDRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves the page until Ctrl-C; returns 130."""
    run_dir = Path(args.run_dir)
    begins = "" if (run_dir / EVENTS).is_file() else " (the run is yet to begin)"
    watched = _Watched(run_dir)
    return serve(
        args,
        {"/news": watched.news, "/schedules": watched.schedules},
        files={path: Page(_file(name), kind) for path, (name, kind) in _FILES.items()},
        look=watched.look,
        tell=lambda address: f"board of {run_dir} at {address}/{begins}",
        at_once=True,
    )


def _file(name: str) -> str:
    return (resources.files("holdfast.cli") / "page" / name).read_text(encoding="utf-8")


class _Watched(Watched):
    """A run, as its board has it."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._board = Board(tell_at_once, secrets.randbits(40))
        self._pictures = _Pictures()
        self._planned = (0, 0)
        self._plan: Plan | None = None
        self._sought = -_PATIENCE_S
        self._seeking: threading.Thread | None = None
        self._trouble = ""

    def look(self) -> None:
        """See Watched.look."""
        super().look()
        wanted = self._board.run, self._board.generation
        due = wanted != self._planned and wanted[1] > 0 and time.monotonic() >= self._sought + _PATIENCE_S
        if due and (self._seeking is None or not self._seeking.is_alive()):
            # a store that does not answer holds nothing else up
            self._seeking = threading.Thread(target=self._seek_plan, args=(wanted,), name="plan", daemon=True)
            self._seeking.start()
        self._trouble = "It has not ended, and no process that can be found runs it." if self.is_gone() else ""

    def hear(self, news: list[Timed]) -> None:
        """See Watched.hear."""
        self._board.hear(news)
        if any(isinstance(event, JobStarted) for _, event in news):
            self._pictures, self._plan = _Pictures(), None
        self._pictures.hear(news)

    def _seek_plan(self, wanted: tuple[int, int]) -> None:
        """Finds the plan of an attempt's generation; where it cannot be read now, that is tried again later."""
        plan, why = self._find_plan(wanted[1])
        self._sought = -_PATIENCE_S if plan else time.monotonic()
        with self._lock:
            if (self._board.run, self._board.generation) != wanted:  # there is another one meanwhile
                self._sought = -_PATIENCE_S
                return
            self._plan, self._planned = plan, wanted if plan else (0, 0)
            self._board.hold(None if plan is None else plan.placement, why)

    def _find_plan(self, generation: int) -> tuple[Plan | None, str]:
        """The plan of a generation, or why it is not known."""
        why = "who holds what is not known: "
        try:
            if (url := decisions_of(self._run_dir)) is None:
                return None, f"{why}the run has no control.db, and nothing says where else plans are"
            if is_database(url) and not self.here:
                return None, f"{why}plans are in a database of the machine where the job was begun"
            plan = plans_in(url).get(generation)
        except (HoldfastError, OSError, UnicodeError) as error:
            return None, why + one_line(str(error))
        return plan, "" if plan else f"{why}the store has no plan of generation {generation} any more"

    def news(self, asked: Asked) -> Page:
        """What has changed since it was last asked for."""
        known = _number(asked, "run"), _number(asked, "since")
        with self.still() as now:
            told = self._board.told(*known, now, self.damage or self._trouble, reading=not self.read)
        return Page(msgspec.json.encode(told).decode(), _JSON)

    def schedules(self, asked: Asked) -> Page:
        """The last step, or (``which=interrupted``) the last one that a loss interrupted, beside the newest plan."""
        with self.still():
            interrupted = asked.query.get("which") == "interrupted"
            step = self._pictures.interrupted if interrupted else self._board.figures.done - 1
            timed, known = self._pictures.of(step), self._pictures.all()
            plan, generation = self._plan, self._planned[1]
        found = {"measured": _measured(timed, step), "planned": _planned(plan, generation, known)}
        return Page(msgspec.json.encode(found).decode(), _JSON)


class _Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as SVG, empty if there is none; a line about it, or why there is none; and the share of its time that
    its workers wait, None if that is not known."""

    svg: str = ""
    about: str
    idle: float | None = None


def _measured(timed: list[Timed], step: int) -> _Picture:
    """What every worker ran in a step."""
    last = {event.worker: event.ops for _, event in timed if isinstance(event, StepOps) and event.step == step}
    spans = [(worker, op[3], op[4]) for worker, ops in last.items() for op in ops]
    if not spans:
        return _Picture(about="no such step was run so far" if step < 0 else f"nothing is told of step {step}")
    return _picture(lambda: step_to_svg(timed, step), f"step {step}, as it was run", spans)


def _planned(plan: Plan | None, generation: int, known: list[Timed]) -> _Picture:
    """The newest plan, with the times that were measured under it."""
    ran = [each for (at, _), each in ran_by_step(known, whole=True).items() if at == generation]
    if plan is None or not any(ops for each in ran for ops in each.values()):
        return _Picture(about="the plan is not known" if plan is None else "no step was run by the newest plan so far")
    costs = measured_costs(plan, ran)
    timeline = evaluate(plan, costs)
    spans = [(str(span.worker), span.start, span.end) for span in timeline.spans]
    about = f"the plan of generation {generation}, with the times that its operations took"
    return _picture(lambda: schedule_to_svg(plan, costs, timeline), about, spans)


def _picture(draw: Callable[[], str], about: str, spans: list[tuple[str, float, float]]) -> _Picture:
    """Draws a schedule; of each of its operations: by whom, from when and until when it is run."""
    workers = len({worker for worker, _, _ in spans})
    lasts = max(end for *_, end in spans) - min(start for _, start, _ in spans)
    busy = sum(end - start for _, start, end in spans)
    idle = 1 - busy / (workers * lasts) if lasts else None
    if workers > _DRAWN:
        told = f"{about}; drawn for up to {_DRAWN} workers, here are {workers}: holdfast inspect --format svg --step N"
        return _Picture(about=told, idle=idle)
    return _Picture(svg=draw(), about=about, idle=idle)


def _number(asked: Asked, name: str) -> int:
    given = asked.query.get(name, "0")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 16 else 0


class _Pictures:
    """What is needed to draw the last steps, and the last one that a loss interrupted."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Timed]] = {}
        self._besides: deque[Timed] = deque(maxlen=_BESIDES)
        self.interrupted = -1
        """Its step; -1: none was."""

    def hear(self, news: list[Timed]) -> None:
        """Takes events into account, in the order of time."""
        for at, event in news:
            if isinstance(event, StepOps):
                self._steps.setdefault(event.step, []).append((at, event))
                kept = range(event.step - _STEPS + 1, event.step + 1)
                near = (self.interrupted - 1, self.interrupted)
                self._steps = {step: each for step, each in self._steps.items() if step in kept or step in near}
            elif isinstance(event, Agreed | Detected | FaultInjected):
                self._besides.append((at, event))
                if isinstance(event, Agreed) and event.generation > 1:
                    self.interrupted = event.step

    def of(self, step: int) -> list[Timed]:
        """Returns what is known about a step."""
        known = [*self._steps.get(step - 1, ()), *self._steps.get(step, ()), *self._besides]
        return sorted(known, key=lambda pair: pair[0])

    def all(self) -> list[Timed]:
        """Returns what is known of all steps."""
        return [pair for step in sorted(self._steps) for pair in self._steps[step]]
