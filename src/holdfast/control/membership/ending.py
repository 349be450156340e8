"""How the job ends: what lives is written, compared, and everyone told; or something failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast.control.membership.state import Decision, Membership, Output, Phase, Tell, tell_each
from holdfast.control.messages import Ended, Failure, Hello, Save, Saved, Shutdown
from holdfast.core.ids import WorkerId

__all__ = [
    "AT_ONCE",
    "NOT_ALL_THERE",
    "end_if_saved",
    "end_job",
    "end_preempted",
    "on_failure",
    "on_saved",
    "save",
    "tell_the_end",
]

NOT_ALL_THERE = "not all workers are there"
AT_ONCE = "it was told to end at once"


def save(state: Membership, step: int, votes: tuple[bytes, ...] = ()) -> Decision:
    """Asks the first living owner of each layer to write it, and everyone for the digests of what they hold."""
    state = replace(state, phase=Phase.SAVING, forming=replace(state.forming, resume_step=step))
    owned = _owners(state)
    if state.past_lost:
        lost = tuple(layer for layer, owners in owned.items() if not owners)
        state = replace(state, forming=replace(state.forming, lost_layers=lost))

    def share_of(worker: WorkerId) -> Save:
        layers = tuple(layer for layer, owners in owned.items() if owners and owners[0] == worker)
        return Save(generation=state.generation, step=step, layers=layers, directory=state.rules.directory, votes=votes)

    return state, tuple(Tell(to=worker, command=share_of(worker)) for worker in state.full)


def _owners(state: Membership) -> dict[int, tuple[WorkerId, ...]]:
    """Who holds each layer: by the plan, or as all have said if it is not known who has changed places since."""
    placement = state.grid.baseline.placement.without(state.absent)
    layers = range(placement.num_layers)
    if not state.past_lost:
        return {layer: placement.owners(layer) for layer in layers}
    held = {worker: dict(state.reports.statuses[worker].layer_steps) for worker in state.full}
    return {layer: tuple(worker for worker, steps in held.items() if layer in steps) for layer in layers}


def on_saved(state: Membership, message: Saved) -> Decision:
    """A worker has written its share."""
    saved = {**state.reports.saved, message.worker: dict(message.digests)}
    return end_if_saved(replace(state, reports=replace(state.reports, saved=saved)))


def end_if_saved(state: Membership) -> Decision:
    """Ends the job when all survivors have saved, and no manifest is being written any more."""
    if (
        state.phase is not Phase.SAVING
        or not set(state.reports.saved) >= set(state.full)
        or state.checkpoints.committing
    ):
        return state, ()
    diverged = _diverged(state.reports.saved)
    if state.exceptions.blame:
        return end_job(state, "program", _with_saved(state, diverged), state.rules.directory)
    if diverged:
        detail = f"owners of layer(s) {', '.join(map(str, diverged))} hold different bits"
        if state.rules.sampling is not None and not state.rules.sampling.layers:
            detail += ": what a script changes between two steps must be the same in all workers"
        return end_job(state, "error", detail, state.rules.directory)
    if state.past_lost:
        return end_job(state, "forgotten", state.past_lost, state.rules.directory)
    if state.forming.lost_layers:
        names = ", ".join(map(str, state.forming.lost_layers))
        return end_job(state, "lost", f"no living worker holds layer(s) {names}", state.rules.directory)
    if state.forming.too_few:
        return end_job(state, "too-few", state.forming.too_few, state.rules.directory)
    return end_job(state, "done", "", state.rules.directory)


def _with_saved(state: Membership, diverged: Sequence[int]) -> str:
    """Returns what is wrong with the program, and behind its first line what became of the layers."""
    what, _, trace = state.exceptions.blame.partition("\n")
    saved = f"the state before step {state.forming.resume_step} is saved in {state.rules.directory}"
    if state.forming.lost_layers:
        saved += (
            f", but for layer(s) {', '.join(map(str, state.forming.lost_layers))}, of which nobody holds that state"
        )
    if diverged:
        saved += f"; owners of layer(s) {', '.join(map(str, diverged))} hold different bits"
    return f"{what}\n{saved}\n{trace}".rstrip()


def _diverged(saved: Mapping[WorkerId, Mapping[int, str]]) -> list[int]:
    """The layers of which not all owners hold the same bits."""
    seen: dict[int, str] = {}
    return sorted(
        {
            layer
            for digests in saved.values()
            for layer, digest in digests.items()
            if seen.setdefault(layer, digest) != digest
        }
    )


def on_failure(state: Membership, failure: Failure) -> Decision:
    """A worker met an error that no other grid would mend."""
    outcome = "user-error" if failure.user_fault else "error"
    detail = failure.error if failure.user_fault else f"worker {failure.worker}: {failure.error}\n{failure.traceback}"
    return end_job(state, outcome, detail.rstrip(), state.rules.directory)


def end_preempted(state: Membership, detail: str = "") -> Decision:
    """Ends the job because the agent was told to; ``detail`` says why there is no checkpoint of its last steps."""
    if not detail:
        state = replace(state, forming=replace(state.forming, resume_step=state.checkpoints.newest))
    return end_job(state, "preempted", detail, "")


def end_job(state: Membership, outcome: str, detail: str, directory: str) -> Decision:
    """Ends the job and tells everyone; ``directory`` is where its last layers are, empty if nowhere."""
    ended = Ended(
        outcome=outcome,
        detail=detail,
        step=max(state.forming.resume_step, state.last_step + 1)
        if outcome in ("error", "user-error")
        else state.forming.resume_step,
        directory=directory,
        generations=state.generations,
        lost_layers=state.forming.lost_layers,
        members=tuple(sorted(state.full)),
    )
    roster = state.roster.not_awaiting(state.roster.expected)
    state = replace(state, phase=Phase.ENDED, ended=ended, roster=roster)
    return state, (
        *tell_each(sorted(state.present | state.roster.kept | state.roster.spares), Shutdown(reason=outcome)),
        Tell(to=None, command=ended),
    )


def tell_the_end(state: Membership, event: object) -> tuple[Output, ...]:
    """Returns what tells whoever comes after the end of it."""
    match event:
        case Hello(worker=None, process=process) if state.ended is not None:
            return (Tell(to=None, node=process.node, command=state.ended),)
        case Hello(worker=worker, process=process):
            return (Tell(to=worker, process=process, command=Shutdown(reason="the job has ended")),)
    return ()
