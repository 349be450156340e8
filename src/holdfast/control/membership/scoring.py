"""Evaluations: what workers tell of micro-batches is put together, and what is lost with somebody is run again.

Nobody waits for it. A worker tells of its part before it goes on, and tells it again to whoever leads next, until it
hears that the whole is kept. What was lost with it is evaluated once more by others, where they go back to that state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from holdfast.control.membership.state import Decision, Membership, Output, Phase, Record, Tell, tell_each
from holdfast.control.messages import Remark, Scored, ScoresKept
from holdfast.core.evaluation import Best, Evaluating
from holdfast.core.ids import Interval, intervals
from holdfast.strategies.registry import strategy_named
from holdfast.telemetry.events import Evaluated, Notice

__all__ = ["tell_scores", "begun_from", "on_scored", "scores_kept", "unevaluated"]


def on_scored(state: Membership, scored: Scored) -> Decision:
    """A worker has evaluated micro-batches; once all of an evaluation are told of, so is the whole."""
    evaluating, step = state.rules.evaluating, scored.step
    if evaluating is None or step <= state.running.evaluated or not evaluating.due(step, state.num_steps):
        return state, ()
    rows = {
        number: {name: value for name, value in zip(scored.names, values, strict=False) if value is not None}
        for number, values in scored.rows
        if 0 <= number < evaluating.microbatches
    }
    return tell_scores(replace(state, scores={**state.scores, step: {**state.scores.get(step, {}), **rows}}))


def tell_scores(state: Membership, *, over: bool = False, before: int = 0) -> Decision:
    """What is whole is told, and kept; nothing more comes of what lies before that: it is told as far as it was heard.

    Not while workers are awaited that may have more to tell. ``over``: nothing more comes of any; ``before``: of those
    of the states before earlier steps.
    """
    evaluating = state.rules.evaluating
    if evaluating is None or (state.phase is Phase.REATTACHING and not over):
        return state, ()
    scores, last = dict(state.scores), state.num_steps
    if over and state.running.evaluated < last:
        scores.setdefault(last, {})
    whole = [step for step, rows in scores.items() if over or step < before or len(rows) == evaluating.microbatches]
    if not whole:
        return state, ()
    newest, best, ends, told = max(whole), state.running.best, state.running.ends, list[Output]()
    for step in sorted(each for each in scores if each <= newest):
        event = _told(step, scores[step], evaluating.microbatches)
        best = _better(best, event, evaluating)
        told.append(Record(event=msgspec.structs.replace(event, best=bool(best) and best[-1].step == step)))
        if ends is None and (ends := _ends(state, step, best)) is not None:
            told += _early(ends, best, evaluating)
    left = {step: rows for step, rows in scores.items() if step > newest}
    state = replace(state, running=replace(state.running, evaluated=newest, best=best, ends=ends), scores=left)
    return state, (*told, *tell_each(state.alive, scores_kept(state)))


def scores_kept(state: Membership) -> ScoresKept:
    """Returns what workers are to know of evaluations."""
    early = state.rules.evaluating is not None and state.rules.evaluating.patience
    return ScoresKept(step=state.running.evaluated, ends=state.running.ends if early else None)


def _ends(state: Membership, step: int, best: tuple[Best, ...]) -> int | None:
    """Before which step the job ends early; None if it does not, as far as is known."""
    assert state.rules.evaluating is not None
    ends = state.rules.evaluating.ends(step, best[-1].step if best else 0)
    return ends if ends is not None and ends < state.num_steps else None


def _early(ends: int, best: tuple[Best, ...], evaluating: Evaluating) -> tuple[Output, ...]:
    """That the job ends early is told to the log and to people."""
    since = f"was not better than before step {best[-1].step}" if best else "was told by none"
    text = f"ends early, before step {ends}: {evaluating.best} {since} in {evaluating.patience} evaluations"
    return (
        Record(event=Notice(worker="coordinator", text=text)),
        Tell(to=None, command=Remark(worker=None, kind="early", text=text)),
    )


def _better(best: tuple[Best, ...], event: Evaluated, evaluating: Evaluating) -> tuple[Best, ...]:
    """The best states once one more was evaluated, by all micro-batches."""
    score = dict(event.scores).get(evaluating.best)
    if score is None or event.microbatches < event.of or (best and best[-1].step == event.step):
        return best
    if best and not evaluating.is_better(score, best[-1].score):
        return best
    return (*best[-1:], Best(step=event.step, score=score))


def _told(step: int, rows: Mapping[int, Mapping[str, float]], of: int) -> Evaluated:
    """The means over what was heard of, in any order; each score's over the micro-batches that have it."""
    by_name: dict[str, list[float]] = {}
    for number in sorted(rows):
        for name, value in rows[number].items():
            by_name.setdefault(name, []).append(value)
    means = tuple((name, _mean(values)) for name, values in by_name.items())
    return Evaluated(step=step, scores=means, microbatches=len(rows), of=of)


def _mean(values: list[float]) -> float | None:
    try:
        mean = math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # of what is finite each; of infinities of both signs
        return None
    return mean if math.isfinite(mean) else None


def begun_from(state: Membership, step: int) -> Decision:
    """Returns it once all go on from the state before a step: what was evaluated of later ones, comes again.

    So does what was evaluated of this one, where those who live may hold another state than they did. Of earlier ones
    nothing more comes: whoever could still tell of them has.
    """
    last = step if strategy_named(state.rules.strategy).exact else max(step - 1, 0)
    best = tuple(each for each in state.running.best if each.step <= last or last == step)
    state = replace(
        state,
        running=replace(state.running, evaluated=min(state.running.evaluated, last), best=best),
        scores={each: rows for each, rows in state.scores.items() if each <= last},
    )
    evaluating = state.rules.evaluating
    if evaluating is not None and evaluating.patience:
        missed = range(state.running.evaluated + 1, step)
        due: dict[int, dict[int, dict[str, float]]] = {
            each: {} for each in missed if evaluating.due(each, state.num_steps) and each not in state.scores
        }
        return tell_scores(replace(state, scores={**due, **state.scores}), before=step)
    return state, ()


def unevaluated(state: Membership, step: int) -> tuple[Interval, ...]:
    """Returns by which micro-batches the state before a step is yet to be evaluated, as far as was heard."""
    evaluating = state.rules.evaluating
    if evaluating is None or not evaluating.due(step, state.num_steps) or step <= state.running.evaluated:
        return ()
    known = state.scores.get(step, {})
    return intervals(number for number in range(evaluating.microbatches) if number not in known)
