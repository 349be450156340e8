"""A generation that is prepared while another one runs: all go over between two steps, and nothing is aborted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.control.membership.acting import carry_out
from holdfast.control.membership.cadence import reconsider
from holdfast.control.membership.ending import AT_ONCE, NOT_ALL_THERE, end_preempted
from holdfast.control.membership.forming import installed
from holdfast.control.membership.preparing import must_pin, prepare
from holdfast.control.membership.running import Promised, Upcoming
from holdfast.control.membership.state import (
    Decision,
    Handover,
    Improved,
    Membership,
    Phase,
    Record,
    Stay,
    Tell,
    notice,
    prefixed,
    tell_each,
)
from holdfast.control.membership.vacancies import answer_offers, closed_to_all, seat
from holdfast.control.membership.viewing import view_of
from holdfast.control.messages import CaughtUp, Joined, Left, Remark, Resume
from holdfast.core.ids import WorkerId
from holdfast.core.nodes import NodeId
from holdfast.core.placement import lacking, spared
from holdfast.core.plan import Plan, with_listeners
from holdfast.errors import InfeasiblePlan
from holdfast.planning.migration import Migration
from holdfast.planning.training import WORTHWHILE
from holdfast.recovery.actions import RecoveryPlan
from holdfast.recovery.view import ClusterView
from holdfast.strategies.answers import at_boundary
from holdfast.telemetry.events import HandingOver, Migrating, Notice, Parted, PlanImproved, Rebuilt, Synced

__all__ = [
    "change_members",
    "improves",
    "on_checkpointed",
    "on_dormant",
    "on_improved",
    "on_joined",
    "on_joined_upcoming",
    "on_left",
    "on_node_leaving",
    "on_preempted",
    "on_synced",
]


def on_joined(state: Membership, worker: WorkerId) -> Decision:
    """A member's transport of this generation stands; once all do, the next generation can be prepared."""
    state = replace(state, reports=state.reports.of_joined(worker))
    if not state.all_joined:
        return state, ()
    return prefixed((Record(event=Rebuilt(generation=state.generation)),), change_members(state))


def change_members(state: Membership) -> Decision:
    """Prepares the next generation if somebody is to come or go and nothing else is under way."""
    if state.phase is not Phase.RUNNING or state.running.upcoming is not None or not state.all_joined:
        return state, ()
    if state.grid.target is not None and _hands_over(state):  # then first of all this comes to its end
        return _hand_over(state, state.grid.target)
    state, seated = seat(state)
    return prefixed(seated, _change_members(state))


def _change_members(state: Membership) -> Decision:
    """Everybody who is to come has a place by now."""
    entering = state.roster.arriving
    if state.preempted:  # then nobody comes or goes any more
        return _come_and_go(state, frozenset(), frozenset())
    needed = _sole_owners(state)
    going = frozenset() if _stay_for_now(state) else state.going - needed.keys()
    if going:
        try:
            return _come_and_stay(state, entering, going, needed)
        except InfeasiblePlan as error:
            needed |= dict.fromkeys(going, f"others cannot do what it does ({error}): it stays")
    return _come_and_stay(state, entering, frozenset(), needed)


def _come_and_stay(
    state: Membership, entering: frozenset[WorkerId], going: frozenset[WorkerId], needed: Mapping[WorkerId, str]
) -> Decision:
    """Some who were told to go are ``needed``, and why; since they may be gone all the same, a checkpoint is made."""
    new = sorted(needed.keys() - state.roster.needed)
    more = "; a checkpoint is made, in case it cannot" if state.rules.checkpoint_every else ""
    told = tuple(notice(worker, f"asked to leave, but {needed[worker]}{more}") for worker in new)
    roster = replace(state.roster, needed=frozenset(needed))
    state = replace(state, roster=roster, pinned=None if new else state.pinned)
    return prefixed(told, _come_and_go(state, entering, going))


def _come_and_go(state: Membership, entering: frozenset[WorkerId], going: frozenset[WorkerId]) -> Decision:
    if not (entering or state.roster.entering or going or state.dormant != state.running.dormant):
        return _go_on(state) if state.grid.target is None or state.preempted else _hand_over(state, state.grid.target)
    full = frozenset(state.alive) - going  # nobody goes over before whoever is entering now has caught up
    lost = frozenset(state.grid.baseline.workers) - full
    promised = state.prospects.promised
    offer = promised.offer if promised is not None and promised.lost == lost and not entering else None
    view = replace(view_of(state, lost), entering=entering, offer=offer)
    recovery = at_boundary(view)
    assert recovery.plan is not None, "whoever is the only one to hold a layer stays"
    if kept := _too_much_for_others(state, recovery, lost):
        text = "told to rest, but others have no memory for what it does: it works on"
        state = replace(state, roster=replace(state.roster, dormant=state.roster.dormant - kept))
        return prefixed([notice(worker, text) for worker in sorted(kept)], carry_out(state, recovery))
    return carry_out(state, recovery)


def on_node_leaving(state: Membership, node: NodeId) -> Decision:
    """A node is to go: so are all its workers at once, whenever they hear of it, and nobody is started there."""
    going = state.present.intersection(state.roster.on(node)) - state.roster.leaving
    if node not in state.contact.here or (node in state.contact.leaving and not going):
        return state, ()
    text = f"node {node} was told to go: its workers leave"
    told = Tell(to=None, command=Remark(worker=None, kind=f"leaving {node.nonce}", text=text))
    state = replace(closed_to_all(state, node), roster=state.roster.told_to_go(going))
    return prefixed((Record(event=Notice(worker="coordinator", text=text)), told), change_members(state))


def _sole_owners(state: Membership) -> dict[WorkerId, str]:
    """Who of those that were told to go cannot be spared, as nobody else would hold some layer; and why."""
    if not state.going:
        return {}
    placement = state.grid.baseline.placement
    away = frozenset(state.grid.baseline.workers).difference(state.alive)
    left = placement.without(away | state.going)
    found: dict[WorkerId, str] = {}
    for worker in state.going - spared(placement, away, state.going):
        layers = ", ".join(str(layer) for layer in placement.held_layers(worker) if not left.owners(layer))
        found[worker] = f"nobody else holds layer(s) {layers}: it stays until somebody does"
    return found


def on_dormant(state: Membership, worker: WorkerId, dormant: bool) -> Decision:
    """A worker is to compute nothing, or to compute again; it holds its layers and takes part in their sums all along.

    What it would do falls to their other owners. Where there are none it works until there are.
    """
    if dormant == (worker in state.roster.dormant):
        return state, ()
    roster = state.roster.told_to_rest(worker, dormant)
    state = replace(state, roster=roster, prospects=replace(state.prospects, planned={}, promised=None))
    told = notice(worker, "told to rest, as soon as others can do what it does" if dormant else "told to work again")
    return prefixed((told,), change_members(state))


def _too_much_for_others(state: Membership, recovery: RecoveryPlan, lost: frozenset[WorkerId]) -> frozenset[WorkerId]:
    """Those who were told to rest and work by the plan all the same, though their layers have other owners."""
    return spared(state.grid.baseline.placement, lost, state.roster.dormant) - recovery.dormant


def _stay_for_now(state: Membership) -> bool:
    """Whether those who were told to go stay until others hold what they do, or it is known that nobody should."""
    if state.grid.target is not None:
        return not state.going & frozenset(state.grid.target.workers)
    return state.rules.weighs and not state.prospects.has_weighed(state.situation)


def _hands_over(state: Membership) -> bool:
    """Whether workers follow layers beside those that they hold."""
    return state.running.plan is not None and any(
        state.running.plan.placement.held_by(w) for w, _ in state.running.plan.placement.followed
    )


def _hand_over(state: Membership, target: Plan) -> Decision:
    """Layers go from worker to worker in two steps: they are followed first, and by both held until the second."""
    if why := state.prospects.why_not(target, state.absent):
        return _stay(state, why)
    if homeless := sorted(state.placed.difference(target.workers, state.roster.leaving)):
        return _stay(state, f"the one that it was to become has no place for {', '.join(map(str, homeless))}")
    if unowned := target.placement.unowned_layers(state.absent):
        names = ", ".join(map(str, unowned))
        return _stay(state, f"in the one that it was to become nobody is left to hold layer(s) {names}")
    here = state.grid.baseline.placement.without(state.absent)
    takes = lacking(here, target.placement)
    if _hands_over(state) or not takes:
        lost = state.absent.intersection(target.workers)
        return _carry_out_if_possible(state, replace(_view(state), baseline=target, lost=lost), target)
    view = replace(_view(state), target=target)
    told = tuple((str(worker), str(layers)) for worker, layers in takes)
    event = HandingOver(generation=state.generation + 1, takes=told)
    return prefixed((Record(event=event),), _carry_out_if_possible(state, view))


def _view(state: Membership) -> ClusterView:
    """Of a boundary at which nobody enters."""
    return replace(view_of(state, state.absent), entering=frozenset())


def _carry_out_if_possible(state: Membership, view: ClusterView, grid: Plan | None = None) -> Decision:
    """Nobody asked for this because of a loss: where there is no plan for it, all go on as they are."""
    try:
        recovery = at_boundary(view, grid)
    except InfeasiblePlan as error:
        return _stay(state, str(error))
    if recovery.plan is None:
        return _stay(state, "without the lost workers there is no plan for the one that it was to become")
    return carry_out(state, recovery)


def _stay(state: Membership, why: str) -> Decision:
    """Gives up the grid that was to come; whoever follows layers for it drops them at the next boundary."""
    text = f"the grid stays as it is: {why}"
    remark = Remark(worker=None, kind=text, text=text)
    said = (Record(event=Notice(worker="coordinator", text=text)), Tell(to=None, command=remark))
    state = _weighed(state.refusing(why), why)
    state = replace(state, grid=replace(state.grid, target=None))
    return prefixed(said, carry_out(state, at_boundary(_view(state))) if _hands_over(state) else change_members(state))


def _go_on(state: Membership) -> Decision:
    """Prepares a generation of the same plan if a checkpoint is due before it, or after another number of steps."""
    other = state.cadence is not None and state.cadence.wanted != state.cadence.every
    if state.running.plan is None or not (must_pin(state) or other):
        return state, ()
    return prepare(state, state.running.plan, state.running.period, frozenset(), dormant=state.running.dormant)


def on_checkpointed(state: Membership) -> Decision:
    """A checkpoint is complete: where their interval is set by what they cost, all go over to another if it pays."""
    if state.cadence is None or state.phase is not Phase.RUNNING or state.interval != state.cadence.every:
        return state, ()  # in the last case all are about to go over to another one: that comes first
    between_s = state.expected_s if state.rules.follows_failures else 0.0
    cadence = reconsider(state.cadence, between_s)
    if cadence.usual is None or cadence.wanted == cadence.every:
        return replace(state, cadence=cadence), ()
    text = (
        f"a checkpoint holds training up for {cadence.usual.stall_s * 1e3:.3g} ms and is written after "
        f"{cadence.usual.write_s * 1e3:.3g} ms, a step takes {cadence.step_s * 1e3:.3g} ms"
        f"{f', and a failure comes every {between_s / 3600:.3g} h' if between_s else ''}: "
        f"one after every {cadence.wanted} steps now, not {cadence.every}"
    )
    told = Record(event=Notice(worker="coordinator", text=text))
    return prefixed((told,), change_members(replace(state, cadence=cadence)))


def on_preempted(state: Membership, *, at_once: bool = False) -> Decision:
    """The job is to end: a checkpoint is made at the next boundary, and ends it; at once where no step can be run."""
    if at_once:
        return end_preempted(state, AT_ONCE)
    if not state.preempted:
        state = replace(state, preempted=True, pinned=None)
    if state.phase in (Phase.GATHERING, Phase.WAITING):
        return end_preempted(state, NOT_ALL_THERE)
    return change_members(state)


def improves(state: Membership, period: float | None) -> bool:
    """Whether a plan with this period is so much better than what runs that it is worth a new generation."""
    return period is not None and state.running.period is not None and period < state.running.period * (1 - WORTHWHILE)


def on_improved(state: Membership, improved: Improved) -> Decision:
    """A better plan for those who are here: all go over to it, unless something else is under way or was meanwhile."""
    if isinstance(improved.offer, Stay):
        return _go_on_as_it_is(state, improved.offer)
    coming = (
        state.grid.target is not None
        or state.roster.arriving
        or state.roster.entering
        or (state.roster.expected and isinstance(improved.offer, Migration))
    )
    offer = improved.offer
    mismatch = offer.leaving != state.going if isinstance(offer, Handover) else state.going - state.roster.needed
    busy = state.running.upcoming is not None or coming or mismatch
    running = state.phase is Phase.RUNNING and state.all_joined
    if busy or not running or improved.lost != state.absent or state.preempted:
        return state, ()
    if isinstance(offer, Migration):
        return _migrate(state, offer)
    if isinstance(offer, Handover):
        return _become(state, offer)
    if not improves(state, offer.period):
        return state, ()
    event = PlanImproved(
        generation=state.generation + 1, before=state.running.period or 0.0, period=offer.period or 0.0
    )
    return prefixed((Record(event=event),), prepare(state, offer.plan, offer.period, frozenset()))


def _go_on_as_it_is(state: Membership, stay: Stay) -> Decision:
    """Nothing better is known for who is here: whoever was told to go may do so."""
    if stay.situation != state.situation:
        return state, ()
    told = (Record(event=Notice(worker="coordinator", text=stay.why)),)
    return prefixed(told, change_members(_weighed(state, stay.why)))


def _weighed(state: Membership, why: str) -> Membership:
    return replace(state, prospects=replace(state.prospects, weighed=(state.situation, why)))


def _become(state: Membership, offer: Handover) -> Decision:
    """Layers are handed over, until the grid is as it is to become."""
    if why := state.prospects.why_not(offer.grid, state.absent):  # then nobody stays for it either
        return (state, ()) if state.prospects.has_weighed(state.situation) else change_members(_weighed(state, why))
    if not _may_become(state, offer.grid, offer.leaving):
        return state, ()
    told = (Record(event=Notice(worker="coordinator", text=offer.why)),) if offer.why else ()
    state, grown = _with_places_for_spares(state, offer.grid)
    state = replace(state, grid=replace(state.grid, target=offer.grid))
    return prefixed((*told, *grown), change_members(state))


def _with_places_for_spares(state: Membership, grid: Plan) -> Decision:
    """Spares enter for the layers that they are to have in a grid; until then they run nothing of them."""
    newcomers = sorted(state.roster.spares.intersection(grid.workers))
    if not newcomers:
        return state, ()
    rows = [(worker, layers) for worker in newcomers for layers in grid.placement.held_by(worker)]
    state = replace(
        state,
        grid=replace(state.grid, baseline=with_listeners(state.grid.baseline, rows)),
        roster=state.roster.seated(newcomers, arriving=True),
        prospects=replace(state.prospects, planned={}),
    )
    return state, tuple(notice(worker, "gets a place of its own: the grid grows") for worker in newcomers)


def _may_become(state: Membership, grid: Plan, leaving: frozenset[WorkerId]) -> bool:
    """Whether a grid has the same layers and micro-batches, a range for all who stay, and no strangers.

    Raises:
        InvalidSchedule: it is no plan.
    """
    state.maker.prove(grid, ties=state.rules.ties)
    now, then = state.grid.baseline, grid.placement
    same_work = (now.placement.num_layers, now.routes.microbatches) == (then.num_layers, grid.routes.microbatches)
    known = state.placed - leaving <= set(grid.workers) <= state.situation.spares.union(now.workers)
    return same_work and known and len(then.single_ranges) == len(grid.workers)


def _migrate(state: Membership, migration: Migration) -> Decision:
    """Workers change places: those who move drop the state that they have, and enter at their new places."""
    migrating = frozenset(worker for worker, _ in migration.moves)
    view = replace(
        view_of(state, state.absent | migrating),
        baseline=migration.baseline,
        entering=migrating,
        offer=migration.meanwhile,
    )
    event = Migrating(
        generation=state.generation + 1,
        moves=tuple((str(worker), str(place)) for worker, place in migration.moves),
        before=migration.before_s,
        meanwhile=migration.meanwhile.period or 0.0,
        period=migration.after_s,
    )
    promised = Promised(lost=state.absent, offer=migration.afterwards)
    state = replace(state, prospects=replace(state.prospects, promised=promised))
    return prefixed((Record(event=event),), carry_out(state, at_boundary(view, migration.baseline)))


def on_joined_upcoming(state: Membership, upcoming: Upcoming, joined: Joined) -> Decision:
    """A worker's transport of the prepared generation stands: it came over the boundary, or enters and waits there."""
    if joined.step is None:
        early = state.reports.joined_early | {joined.worker}
        return replace(state, reports=replace(state.reports, joined_early=early)), ()
    state, outputs = _go_over(state, upcoming, joined.step)
    return prefixed(outputs, on_joined(state, joined.worker))


def on_left(state: Membership, upcoming: Upcoming, left: Left) -> Decision:
    """A worker that was told to go has crossed the boundary, and so has everyone else."""
    return _go_over(state, upcoming, left.step)


def _go_over(state: Membership, upcoming: Upcoming, step: int) -> Decision:
    """The workers have crossed: what was prepared is what runs."""
    gone = (state.roster.leaving & frozenset(state.alive)) - frozenset(upcoming.plan.workers)
    arrived = state.roster.arriving & upcoming.entering
    state = state.departed(gone)
    promised = state.prospects.promised if upcoming.entering else None
    grid = state.grid.gone_over(upcoming.baseline)
    state = replace(
        state,
        generation=upcoming.generation,
        generations=state.generations + 1,
        grid=grid,
        roster=state.roster.gone_over(upcoming.entering).confined(grid.baseline.workers, state.grid.baseline.workers),
        running=state.running.gone_over(upcoming),
        reports=state.reports.gone_over(),
        forming=replace(state.forming, resume_step=step),
        prospects=replace(state.prospects, planned={}, promised=promised),
        doubts=state.doubts.dispelled(),
        pinned=(step, upcoming.generation) if upcoming.pins else state.pinned,
        cadence=state.cadence and replace(state.cadence, every=upcoming.checkpoint_every or state.cadence.every),
    )
    parted = (Record(event=Parted(worker=str(worker), step=step)) for worker in sorted(gone))
    running = state.running
    resume = Resume(
        generation=state.generation,
        step=step,
        repeated=running.repeated,
        ends=running.ends,
        scored=running.evaluated,
    )
    state, asked = answer_offers(state) if gone else (state, ())
    return state, (installed(state, "boundary"), *parted, *tell_each(sorted(arrived), resume), *asked)


def on_synced(state: Membership, synced: CaughtUp) -> Decision:
    """Whoever has caught up holds its state, and keeps nobody from the next boundary; others may tell of that first."""
    worker = synced.worker
    if synced.generation == state.generation and worker in state.catching_up:
        state = replace(state, roster=state.roster.caught_up(worker))
    known = {"entered": synced.entered, "step": synced.step, "bytes": synced.bytes}
    return state, (Record(event=Synced(worker=str(worker), owners=state.fewest_owners, **known)),)
