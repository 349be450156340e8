"""Two owners of a layer have computed, or hold, other bits: who is wrong, and what becomes of the step and of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from holdfast.control.membership.ending import end_job
from holdfast.control.membership.losses import on_lost
from holdfast.control.membership.recovering import recover
from holdfast.control.membership.state import Decision, Membership, Output, Phase, Record, Tell, notice, prefixed
from holdfast.control.messages import Audited, Computed, Remark, Weighed
from holdfast.core.ids import WorkerId
from holdfast.recovery.audit import AuditFinding, Claim, Judgement, judge
from holdfast.telemetry.events import Notice

__all__ = ["is_news", "on_audited", "on_weighed"]


def is_news(state: Membership, report: Audited) -> bool:
    """Whether nobody has told yet that a step is disputed: who found that says so again with what it holds.

    Steps that were done can be run again, from a checkpoint; what was found before that is of the past.
    """
    present = report.generation >= state.generation or report.step > state.last_step
    return present and not report.agreed and report.step != state.audits.disputed


def on_audited(state: Membership, report: Audited) -> Decision:
    """An auditor has computed something else than the runner; or the same, in a step that is disputed already.

    At first it is one word against another: the step is run again whole, and all owners compute the sample, several
    times. What they all say is judged.
    """
    if state.phase not in (Phase.FORMING, Phase.RUNNING):
        return state, ()
    if is_news(state, report):
        return _dispute(state, report)
    known = state.audits.told  # of a step that may be committed by now: then all agree, and somebody was wrong before
    if report in known or report.step not in {state.audits.disputed, *(each.step for each in known)}:
        return state, ()
    state = replace(state, audits=replace(state.audits, told=(*state.audits.told, report)))
    return _judge(state) if _all_have_told(state, report) else (state, ())


def _dispute(state: Membership, report: Audited) -> Decision:
    audits = replace(state.audits, disputed=report.step, told=(report,))
    text = (
        f"{_place(report)}: got {_difference(report.claims)} that worker {report.runner}, which ran it, has otherwise"
    )
    told = notice(report.worker, f"{text}; the step is run again, and all owners of the layer compute it")
    return prefixed((told,), recover(replace(state, audits=audits)))


def _all_have_told(state: Membership, report: Audited) -> bool:
    """Whether every other owner has told of this attempt."""
    if report.generation != state.generation or state.phase is not Phase.RUNNING:
        return False
    assert state.running.plan is not None, "steps are run by a plan"
    owners = frozenset(state.running.plan.placement.owners(report.layer))
    return {each.worker for each in _attempt(state)} >= owners - {report.runner}


def _attempt(state: Membership) -> tuple[Audited, ...]:
    return tuple(each for each in state.audits.told if each.generation == state.generation)


def _judge(state: Membership) -> Decision:
    """All owners have told of this attempt: it alone decides, and tells who was wrong in the one before."""
    attempt, before = _attempt(state), [each for each in state.audits.told if each.generation != state.generation]
    claims = _claims(attempt)
    state = replace(state, audits=replace(state.audits, told=()))
    of_inputs = judge(tuple(Claim(worker=each.worker, inputs="", result=each.inputs) for each in claims), ())
    if of_inputs.finding is not AuditFinding.AGREED:
        return _follow(state, attempt[0], of_inputs, (), "input")
    found = judge(tuple(_claim(each) for each in claims), ())
    earlier = [each for each in _claims(before) if found.right and _is_wrong(each, of_inputs.right, found.right)]
    what = _difference((*claims, *earlier))
    return _follow(state, attempt[0], found, tuple(dict.fromkeys(each.worker for each in earlier)), what)


def _claims(reports: Iterable[Audited]) -> tuple[Computed, ...]:
    """The runner's claims, which every auditor passes on, count once."""
    found, known = list[Computed](), set[tuple[int, WorkerId]]()
    for report in reports:
        if (report.generation, report.runner) not in known:
            found += (each for each in report.claims if each.worker == report.runner)
            known.add((report.generation, report.runner))
        found += (each for each in report.claims if each.worker == report.worker)
    return tuple(found)


def _claim(each: Computed) -> Claim:
    return Claim(worker=each.worker, inputs=each.inputs, result=each.output + each.gradients)


def _is_wrong(each: Computed, inputs: str | None, right: str) -> bool:
    """Whether a claim of an earlier attempt is; of other inputs, nobody knows."""
    return each.inputs == inputs and _claim(each).result != right


def _follow(
    state: Membership, sample: Audited, judgement: Judgement, earlier: tuple[WorkerId, ...], what: str
) -> Decision:
    """What a judgement over an attempt comes to; ``earlier``: who was wrong in the one before."""
    match judgement.finding:
        case AuditFinding.UNSTEADY:
            return _unsteady(state, sample)
        case AuditFinding.UNDECIDED:
            names = ", ".join(sorted({str(each.worker) for each in sample.claims}))
            detail = f"{_place(sample)}: workers {names} each get their own {what}, again and again"
            return _undecided(state, detail)
    state, told = _strike(state, (*earlier, *judgement.wrong), f"{_place(sample)}: wrong {what}")
    if state.audits.strikes.leaving or judgement.finding is AuditFinding.AGREED:
        return prefixed(told, _expel(state))
    return prefixed(told, recover(state))


def _strike(state: Membership, wrong: Iterable[WorkerId], what: str) -> Decision:
    """Everyone who was wrong once more, in order; one may be named twice."""
    told: list[Output] = []
    for worker in wrong:
        strikes = state.audits.strikes.add((worker,))
        told.append(notice(worker, f"{what} (found wrong {_times(dict(strikes.counts)[worker])})"))
        state = replace(state, audits=replace(state.audits, strikes=strikes))
    return state, tuple(told)


def _expel(state: Membership) -> Decision:
    """Whoever has been wrong twice is told to leave."""
    leaving = state.audits.strikes.leaving
    return on_lost(state, dict.fromkeys(leaving, "computes wrong results, as audits have found twice"))


def _unsteady(state: Membership, sample: Audited) -> Decision:
    """Nobody is to blame. Replicas stay alike all the same, as each micro-batch counts once: so the job goes on."""
    layers = tuple(sorted({*state.audits.unsteady, sample.layer}))
    text = (
        f"layer {sample.layer} does not repeat: step {sample.step}, micro-batch {sample.microbatch}, gave other bits "
        "each time, on several workers. It is not audited any more, and after a loss the job ends in other bits than "
        "without one. Draw from torch's default generator, which is seeded, instead of numpy's or a device's own"
    )
    told = (
        Record(event=Notice(worker="coordinator", text=text)),
        Tell(to=None, command=Remark(worker=None, kind=f"unsteady-{sample.layer}", text=text)),
    )
    return prefixed(told, recover(replace(state, audits=replace(state.audits, unsteady=layers))))


def _undecided(state: Membership, detail: str) -> Decision:
    """It is not known whose state is right, so none is saved as if it were."""
    return end_job(state, "error", f"ReplicaDiverged: {detail}; nobody can tell who is right", "")


def _parted(
    state: Membership, step: int, wrong: Mapping[WorkerId, Iterable[int]], undecided: Iterable[int]
) -> Decision:
    """Workers of a script have other bits than others: what all have trained since may be wrong."""
    numbers = {*undecided, *(each for found in wrong.values() for each in found)}
    parts = [f"what came of an item of step {step - 1} that two workers ran"] if -1 in numbers else []
    if buckets := sorted(numbers - {-1}):
        parts.append(f"weights or optimizer state before step {step} (buckets {', '.join(map(str, buckets))})")
    who = f": worker(s) {', '.join(map(str, sorted(wrong)))} against all others" if wrong else ""
    detail = (
        f"ReplicaDiverged: workers have other bits, of {' and of '.join(parts)}{who}; something in the loop depends on "
        "the process or the time, such as a generator of its own or hf.is_first; expected draws from torch's, numpy's "
        "or random's own generator, and the same between two steps everywhere. What was trained since the last "
        "checkpoint is not saved"
    )
    return end_job(state, "error", detail, "")


def _place(sample: Audited) -> str:
    return f"audit of step {sample.step}, layer {sample.layer}, micro-batch {sample.microbatch}"


def _difference(claims: Iterable[Computed]) -> str:
    """In what claims differ, for people."""
    said = tuple(claims)
    if len({each.inputs for each in said}) > 1:
        return "input"
    return "output" if len({each.output for each in said}) > 1 else "gradient"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def on_weighed(state: Membership, report: Weighed) -> Decision:
    """A worker has told digests of its layers; once all have that hold any, as they are before a step, they count.

    Others may have told of later steps by then: what one worker says overtakes what another does.
    """
    told_of = {**state.audits.weighed.get(report.step, {}), report.worker: report}
    weighed = {**state.audits.weighed, report.step: told_of}
    state = replace(state, audits=replace(state.audits, weighed=weighed))
    if state.phase is not Phase.RUNNING or not told_of.keys() >= set(state.full):
        return state, ()
    wrong, undecided = _compared({worker: dict(told_of[worker].digests) for worker in state.full})
    later = {} if wrong or undecided else {step: each for step, each in weighed.items() if step > report.step}
    state = replace(state, audits=replace(state.audits, weighed=later))
    if state.rules.sampling is not None and not state.rules.sampling.layers and (wrong or undecided):
        return _parted(state, report.step, wrong, undecided)
    if undecided:
        detail = f"before step {report.step} the owners of layer(s) {', '.join(map(str, undecided))} hold other weights"
        return _undecided(state, detail)
    if not wrong:
        return replace(state, audits=replace(state.audits, weigh=False)), ()
    state = replace(state, audits=replace(state.audits, weigh=True))
    told: tuple[Output, ...] = ()
    for worker, layers in wrong.items():
        what = f"wrong weights of layer(s) {', '.join(map(str, layers))} before step {report.step}"
        state, more = _strike(state, (worker,), what)
        told += more
    return prefixed(told, _expel(state) if state.audits.strikes.leaving else recover(state))


def _compared(
    digests: Mapping[WorkerId, Mapping[int, str]],
) -> tuple[dict[WorkerId, list[int]], list[int]]:
    """Returns who holds other bits than most owners, of which layers, and the layers of which nobody can tell."""
    wrong: dict[WorkerId, list[int]] = {}
    undecided = []
    for layer in sorted({layer for held in digests.values() for layer in held}):
        found = {worker: held[layer] for worker, held in sorted(digests.items()) if layer in held}
        ((most, count), *others) = Counter(found.values()).most_common()
        if not others:
            continue
        if count == others[0][1]:
            undecided.append(layer)
            continue
        for worker, digest in found.items():
            if digest != most:
                wrong.setdefault(worker, []).append(layer)
    return wrong, undecided
