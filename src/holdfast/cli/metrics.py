"""``holdfast metrics``: a run in figures, for Prometheus."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.serving import Asked, Page, add_serving_arguments, serve
from holdfast.cli.watched import Watched
from holdfast.errors import ConfigError
from holdfast.telemetry.events import JobStarted, Timed
from holdfast.telemetry.figures import Figures, Histogram
from holdfast.telemetry.story import EVENTS

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["add_metrics_parser"]

_STEPS_TO_STAND = 20
_STANDS_S = 60.0
"""A job that has done no step for so long, and for so many times as long as its steps take, stands still."""
_FIRST_S = 600.0
"""As long as it is not known how long they take, one that has done none for so long."""


def add_metrics_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``metrics`` command; its ``run`` default is :func:`run`."""
    parser = commands.add_parser(
        "metrics",
        help="a run in figures, for Prometheus",
        description="Prints how a run is in the format of Prometheus; with --listen serves that at /metrics, as it "
        "changes, with /healthz (the logs of the run can be read) and /readyz (its job does steps). It reads the run "
        "directory, wherever that is seen, and may be started before the job: nothing that trains waits for it.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory")
    add_serving_arguments(parser, "serve it there, until Ctrl-C or SIGTERM", "/metrics")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the figures, or serves them until Ctrl-C; returns 0, or 130."""
    watched = _Watched(Path(args.run_dir))
    text = _exposition(watched)
    if args.listen is None:
        if not (Path(args.run_dir) / EVENTS).is_file():
            raise ConfigError(f"{args.run_dir}: is no run directory, it has no {EVENTS}")
        watched.look()
        if watched.damage:
            raise ConfigError(watched.damage)
        print(text(Asked()).text, end="")
        return 0
    return serve(
        args,
        {"/metrics": text, "/healthz": watched.healthy, "/readyz": watched.ready},
        public=frozenset({"/healthz", "/readyz"}),
        look=watched.look,
        tell=lambda address: f"figures of {args.run_dir} at {address}/metrics",
    )


class _Watched(Watched):
    """A run in figures."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.figures = Figures()

    def hear(self, news: list[Timed]) -> None:
        """See Watched.hear."""
        for at, event in news:
            if isinstance(event, JobStarted):  # another attempt
                self.figures = Figures()
            self.figures.hear(at, event)

    def healthy(self, asked: Asked) -> Page:
        """Whether the run can be looked at."""
        return Page(f"{self.damage or 'ok'}\n", ok=not self.damage)

    def ready(self, asked: Asked) -> Page:
        """Whether the job does steps."""
        with self.still() as now:
            why = _stands(self.figures, now)
        return Page(f"{why or 'ok'}\n", ok=not why)


def _stands(figures: Figures, now: float) -> str:
    """Why no steps are done; empty if they are."""
    if figures.ended:
        return f"the job has ended: {figures.ended}"
    if not figures.committed:
        return "no step was done so far"
    idle, steps = figures.idle(now), sum(figures.step_s.counts)
    limit = max(_STANDS_S, _STEPS_TO_STAND * figures.step_s.total / steps) if steps else _FIRST_S
    return f"no step was done for {idle:.0f} s" if idle > limit else ""


def _exposition(watched: _Watched) -> Callable[[Asked], Page]:
    """Returns what writes the figures down, as whoever asks accepts them.

    Raises:
        ConfigError: what does that is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        raise ConfigError("prometheus-client is not installed; expected pip install 'holdfast[metrics]'") from None

    class Collector:
        def collect(self) -> Iterable[Metric]:
            with watched.still() as now:
                return list(_families(watched.figures, now))

    registry = CollectorRegistry()
    registry.register(Collector())

    def page(asked: Asked) -> Page:
        encode, kind = choose_encoder(asked.accept)
        return Page(encode(registry).decode(), kind)

    return page


def _families(figures: Figures, now: float) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

    def gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            yield GaugeMetricFamily(f"holdfast_{name}", text, value=value)

    yield InfoMetricFamily("holdfast_job", "The job.", value={"name": figures.job})
    running = bool(figures.job) and not figures.ended
    yield from gauge("running", "1 while the job has begun and has not said that it has ended.", running)
    ended = GaugeMetricFamily("holdfast_ended", "1 once the job has ended, by how.", labels=["outcome"])
    if figures.ended:
        ended.add_metric([figures.ended], 1)
    yield ended
    text = "How often a step was done in this attempt; one that a checkpoint took back counts again."
    yield CounterMetricFamily("holdfast_steps_committed", text, value=figures.committed)
    yield from gauge("steps_done", "Steps that are done, of the whole run.", figures.done)
    yield from gauge("steps", "Steps that the job has.", figures.steps)
    if running:
        text = "Seconds since the last step was done, or since this attempt's beginning."
        yield from gauge("step_age_seconds", text, figures.idle(now))
        text = "Seconds since the newest checkpoint was complete, or since this attempt's beginning."
        yield from gauge("checkpoint_age_seconds", text, figures.checkpoint_age(now))
    steps = HistogramMetricFamily("holdfast_step_seconds", "Seconds from one step to the next one.")
    steps.add_metric([], *_cumulative(figures.step_s))
    yield steps
    workers = GaugeMetricFamily("holdfast_workers", "Workers of the grid, by whether they are there.", labels=["state"])
    workers.add_metric(["present"], len(figures.present.workers))
    workers.add_metric(["missing"], figures.missing)
    yield workers
    failures = CounterMetricFamily("holdfast_failures", "Workers that were lost, by kind of failure.", labels=["kind"])
    for kind, number in figures.failures.items():
        failures.add_metric([kind], number)
    yield failures
    recovery = HistogramMetricFamily(
        "holdfast_recovery_seconds",
        "Seconds of recoveries: until all agree, until they are connected anew, until the next step is done.",
        labels=["phase"],
    )
    for phase, each in figures.recovery_s.items():
        recovery.add_metric([phase], *_cumulative(each))
    yield recovery
    text = "Workers that hold the state of the layer that the fewest hold."
    yield from gauge("layer_owners_min", text, figures.owners)
    text = "Share of the time since the beginning that its steps take at the pace of a job in which nothing fails."
    yield from gauge("goodput_ratio", text, figures.goodput(now))


def _cumulative(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Its buckets as Prometheus has them, and the sum of all values."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True)), histogram.total
