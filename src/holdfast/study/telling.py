"""A study as text: a report in Markdown, a table, JSON, and a summary for the terminal."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from holdfast.recovery.overhead import DataParallel, per_failure, per_run
from holdfast.study.findings import Finding, Findings

__all__ = ["to_csv", "to_json", "to_markdown", "to_text"]

_HOUR_S = 3600.0
_COLUMNS = (
    *("seed", "at", "strategy", "progress", "survivors", "steps", "loss", "accuracy"),
    *("baseline_loss", "baseline_accuracy", "minibatch_s", "baseline_s", "weights_sha256"),
)


def to_json(found: Findings) -> str:
    """Returns all of it: each scenario's figures, means over seeds, and costs."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def to_csv(found: Findings) -> str:
    """Returns a line for each scenario, seed and time after the failure."""
    file = io.StringIO()
    write = csv.writer(file, lineterminator="\n").writerow
    write(_COLUMNS)
    by_seed = {each.seed: each for each in found.baselines}
    for each in found.outcomes:
        for ours, theirs in zip(each.after, by_seed[each.seed].after[each.at], strict=True):
            head = (each.seed, each.at, each.strategy, each.progress, each.survivors, ours.steps)
            held = (ours.loss, ours.accuracy, theirs.loss, theirs.accuracy)
            write((*head, *held, each.minibatch_s, each.baseline_s, each.weights_sha256))
    return file.getvalue()


def to_text(found: Findings) -> str:
    """Returns a table for people: what was right after each step, and what it cost."""
    lines = [f"{found.workers} workers, {found.steps} steps, {len(found.seeds)} seed(s); difference: to the baseline"]
    for at in _steps(found):
        costs = {each.name: each for each in found.costs if each.at == at}
        lines.append(f"\nstep {at:<23}{'loss':>9}{'difference':>12}{'accuracy':>10}{'slowdown':>10}")
        for each in found.after(at):
            cost = costs.get(each.name)
            slow = f"{cost.slowdown:.2f}x" if cost is not None and cost.strategy != "checkpoint-restart" else ""
            difference = f"{100 * each.loss_difference:.2f} %"
            lines.append(f"{each.name:28}{each.loss:9.4f}{difference:>12}{_percent(each.accuracy):>10}{slow:>10}")
    lines += ["", *_judged(found)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def to_markdown(found: Findings) -> str:
    """Returns the report."""
    parts = [
        "# Failures of data-parallel training\n",
        f"{found.workers} workers, {found.steps} steps, {found.baselines[0].steps_per_epoch} mini-batches per epoch, "
        f"seeds {', '.join(map(str, found.seeds))}. Trained on {found.baselines[0].samples[0]} samples, judged by "
        f"{found.baselines[0].samples[1]} that are held out. Differences are to the run without failures.\n",
        "![loss](curve-loss.svg)\n",
        *_judged(found),
        "",
        "## Costs\n",
        *_overheads(found),
        "",
        "![replay](replay.svg)\n",
    ]
    for at in _steps(found):
        parts += [f"## Step {at}\n", f"![loss](loss-step-{at}.svg)\n"]
        if all(each.accuracy is not None for each in found.after(at)):
            parts.append(f"![accuracy](accuracy-step-{at}.svg)\n")
        parts += [f"![slowdown](slowdown-step-{at}.svg)\n", *_table(found, at), ""]
    return "\n".join(parts)


def _steps(found: Findings) -> tuple[int, ...]:
    return tuple(dict.fromkeys(each.at for each in found.findings))


def _table(found: Findings, at: int) -> Iterator[str]:
    """Loss and its difference right after a step, later, and at the end."""
    rows = [each for each in found.findings if each.at == at]
    times = sorted({each.later for each in rows if each.later >= 0})
    rows = [msgspec.structs.replace(each, later=max(0, each.later)) for each in rows]  # before it: in the first column
    heads = [f"{'end' if each == found.steps - at - 1 else f'+{each}'}" for each in times]
    yield "| scenario | " + " | ".join(f"loss {head} | difference" for head in heads) + " |"
    yield "|---|" + "---:|---:|" * len(times)
    for name in dict.fromkeys(each.name for each in rows):
        cells = [_cell([each for each in rows if each.name == name and each.later == later]) for later in times]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _cell(found: Sequence[Finding]) -> str:
    return f"{found[0].loss:.4f} | {100 * found[0].loss_difference:.2f} %" if found else " | "


def _judged(found: Findings) -> Iterator[str]:
    """Yields what the published study found, and in how many cases it is so here."""
    lossy = [each for each in found.findings if each.strategy == "lossy-forward" and each.later == 0]
    back = {
        (each.at, each.progress): each.loss_difference
        for each in found.findings
        if each.strategy == "rollback" and each.later == 0
    }
    pairs = [each.loss_difference <= back[each.at, each.progress] for each in lossy if (each.at, each.progress) in back]
    if pairs:
        yield f"- lossy-forward differs no more than rollback in {sum(pairs)} of {len(pairs)} scenarios"
    more = {
        "with more survivors": _falls(lossy, "survivors", "progress"),
        "with more progress": _falls(lossy, "progress", "survivors"),
    }
    for what, falls in more.items():
        if falls:
            yield f"- lossy-forward differs less {what} in {sum(falls)} of {len(falls)} comparisons"
    near = [each.near for each in found.costs]
    yield f"- costs are as predicted, within 10 % or 50 ms, in {sum(near)} of {len(near)} scenarios"


def _falls(rows: Sequence[Finding], along: str, fixed: str) -> list[bool]:
    """Of any two neighbours along one key, all else being equal: whether the difference falls."""
    found = []
    groups = dict.fromkeys((each.at, getattr(each, fixed)) for each in rows)
    for group in groups:
        row = sorted((e for e in rows if (e.at, getattr(e, fixed)) == group), key=lambda e: getattr(e, along) or 0)
        found += [b.loss_difference < a.loss_difference for a, b in pairwise(row)]
    return found


def _overheads(found: Findings) -> Iterator[str]:
    restarts = [each for each in found.outcomes if each.init is not None and each.restart is not None]
    first = found.baselines[0]
    mean_s = statistics.fmean(each.minibatch_s for each in found.baselines)
    yield "| part | processor s | by the clock, s |"
    yield "|---|---:|---:|"
    yield f"| mini-batch, all workers | {mean_s:.4f} | |"
    checkpoint_s = statistics.fmean(each.checkpoint.cpu_s for each in found.baselines)
    yield f"| checkpoint | {checkpoint_s:.4f} | {statistics.fmean(e.checkpoint.wall_s for e in found.baselines):.4f} |"
    restart_s = init_s = 0.0
    if restarts:
        init = [each.init for each in restarts if each.init is not None]
        restart = [each.restart for each in restarts if each.restart is not None]
        init_s, restart_s = (statistics.fmean(each.cpu_s for each in row) for row in (init, restart))
        yield f"| initialisation | {init_s:.4f} | {statistics.fmean(each.wall_s for each in init):.4f} |"
        yield f"| restart | {restart_s:.4f} | {statistics.fmean(each.wall_s for each in restart):.4f} |"
    yield ""
    yield "| step | scenario | measured, s | predicted, s | within 10 % or 50 ms |"
    yield "|---:|---|---:|---:|---|"
    for each in found.costs:
        near = "yes" if each.near else "no"
        yield f"| {each.at} | {each.name} | {each.measured_s:.3f} | {each.predicted_s:.3f} | {near} |"
    of = DataParallel(
        minibatch_s=mean_s,
        minibatches_per_epoch=first.steps_per_epoch,
        minibatches=found.steps,
        workers=found.workers,
        microbatches=found.workers,
        model_bytes=first.model_bytes,
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        init_s=init_s,
        mtbf_s=_HOUR_S,
    )
    yield ""
    yield "| strategy | a failure on average, s | a run with one failure an hour, s |"
    yield "|---|---:|---:|"
    for strategy in ("adaptive", "lossy-forward", "skip", "rollback", "checkpoint-restart"):
        yield f"| {strategy} | {per_failure(strategy, of).seconds:.3f} | {per_run(strategy, of):.3f} |"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"
