"""Plans the remainder of an interrupted step: what is to be run again, by whom, and in which order.

What a step still needs follows from what the survivors kept, layer by layer and micro-batch by micro-batch. A gradient
that is in no living sum is computed again from the nearest message that somebody has; whatever lies between the two is
run again only to make that message, and counts for nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from holdfast.core.ids import MicroBatch, WorkerId
from holdfast.core.instructions import Payload
from holdfast.core.lower import lower_step
from holdfast.core.placement import LayerRange
from holdfast.core.plan import Plan
from holdfast.core.profile import Costs, unit_costs
from holdfast.core.progress import Logged, Part, StepProgress
from holdfast.core.proof import prove_steps
from holdfast.core.remainder import Remainder, rest_of_step
from holdfast.core.routes import Route
from holdfast.core.schedule import Op, OpKind
from holdfast.core.step_plan import Piece, Resent, Standing
from holdfast.core.whole_step import whole_steps
from holdfast.errors import InfeasiblePlan, InternalError
from holdfast.schedule.engine import Schedule, StartRules, ranked, simulate
from holdfast.schedule.evaluate import evaluate
from holdfast.schedule.operations import Operations, as_graph, tails

__all__ = ["logged_bytes", "plan_remainder", "progress_at"]

_Pair = tuple[int, int]


def plan_remainder(
    plan: Plan,
    progress: Mapping[WorkerId, StepProgress],
    *,
    ties: tuple[tuple[int, ...], ...] = (),
    costs: Costs | None = None,
    begun: Iterable[_Pair] = (),
    left_out: Iterable[int] = (),
    proves: bool = True,
) -> Remainder:
    """Returns what is left of a step, as the survivors of a loss finish it.

    It is a pure function of what they keep and of the plan that runs from now on: another loss is answered by the same
    function of fewer reports. Visits that the loss leaves alone go on where they are; those that it takes are run where
    the plan leads them.

    Args:
        plan: of the workers that are left; nobody follows layers in it.
        progress: what each of them kept, all of the same step.
        ties: tuples of layers that share weights.
        costs: costs per layer, by which operations are scheduled; None: all alike.
        begun: (layer, micro-batch) pairs that the lost are known to have run forward.
        left_out: micro-batches that are not to count where they do not count yet; what is kept of them is dropped.
        proves: whether it is proved right, as whatever is run has to be.

    Raises:
        InfeasiblePlan: more forward passes would be kept at once than the plan itself keeps on some worker.
        InvalidSchedule: what they tell contradicts itself.

    Cost: linear in pairs of layers and micro-batches that are open; milliseconds for a dozen workers.
    """
    steps = {each.step for each in progress.values()}
    if len(steps) != 1:
        raise InternalError(f"the remainder of one step was asked for, and the reports are of steps {sorted(steps)}")
    without = frozenset(left_out)
    progress = {worker: _without(each, without) for worker, each in progress.items()} if without else progress
    standing = _standing(plan, progress, ties)
    whole = _Whole.of(plan, progress, ties, standing)
    needs = [_Need(whole, route) for route in plan.routes.by_index if route.microbatch.number not in without]
    tasks, resent = _Tasks(), defaultdict[WorkerId, list[Resent]](list)
    for need in needs:
        _Wiring(need, whole, tasks, resent).run()
    scheduled = _schedule(tasks, whole, plan, costs or unit_costs(plan.placement.num_layers))
    known = frozenset(begun)
    rests = tuple(
        rest_of_step(
            each,
            pieces=scheduled.rows.get(each.worker, ()),
            resent=tuple(sorted(resent[each.worker])),
            standing=standing,
            left_out=without,
        )
        for each in whole_steps(plan, ties)
    )
    if proves:
        prove_steps(map(lower_step, rests), progress)
    return Remainder(
        step=steps.pop(),
        steps=rests,
        standing=standing,
        redone=tuple(sorted(pair for need in needs for pair in need.redone(known))),
        regenerated=tuple(sorted(pair for need in needs for pair in need.regenerated)),
        lasts=scheduled.lasts,
        left_out=tuple(sorted(without)),
    )


def _without(progress: StepProgress, numbers: frozenset[int]) -> StepProgress:
    """What is kept of other micro-batches than these."""
    counted = ((layer, tuple(m for m in found if m not in numbers)) for layer, found in progress.counted)
    logged = (replace(each, numbers=tuple(m for m in each.numbers if m not in numbers)) for each in progress.logged)
    return replace(
        progress,
        contexts=tuple(each for each in progress.contexts if each.number not in numbers),
        halves=tuple(each for each in progress.halves if each.number not in numbers),
        counted=tuple(each for each in counted if each[1]),
        logged=tuple(each for each in logged if each.numbers),
    )


def logged_bytes(plan: Plan, sizes: Sequence[int], *, staggered: bool = False) -> dict[WorkerId, int]:
    """Returns how much of what it hands on a worker keeps at most, in bytes; it is sorted by worker.

    Args:
        plan: whose steps are run.
        sizes: bytes of what each layer hands on of one micro-batch.
        staggered: whether a step is settled while the next one runs, so that two are kept.
    """
    kept = dict.fromkeys(plan.workers, 0)
    for route in plan.routes.routes:
        for visit in route.visits:
            ends = (each for each in (visit.layers.start, visit.layers.stop) if 0 < each < len(sizes))
            kept[visit.worker] += sum(sizes[end - 1] for end in ends)
    return {worker: size * (1 + staggered) for worker, size in kept.items()}


def progress_at(
    plan: Plan, costs: Costs, elapsed: float, step: int = 0, lost: Collection[WorkerId] = ()
) -> dict[WorkerId, StepProgress]:
    """Returns how far a step has come by its plan, before any sum is complete; operations under way are ended.

    Args:
        plan: that runs.
        costs: costs per layer.
        elapsed: since the step began, in the units of the costs.
        step: which.
        lost: workers that tell nothing.
    """
    done = defaultdict[WorkerId, list[Op]](list)
    for span in evaluate(plan, costs).spans:
        if span.start < elapsed:
            done[span.worker].append(span.op)
    visits = {(visit.worker, each.microbatch): visit.layers for each in plan.routes.routes for visit in each.visits}
    return {
        worker: _after([(op, visits[worker, op.microbatch]) for op in done[worker]], step, plan.placement.num_layers)
        for worker in plan.workers
        if worker not in lost
    }


def _after(ops: list[tuple[Op, LayerRange]], step: int, num_layers: int) -> StepProgress:
    """What a worker keeps that has run these operations."""
    ran = {kind: {(op.microbatch.number, layers) for op, layers in ops if op.kind is kind} for kind in OpKind}
    back = ran[OpKind.B] | ran[OpKind.I]
    counted = defaultdict[int, list[int]](list)
    for number, layers in sorted(ran[OpKind.B] | ran[OpKind.W]):
        for layer in layers.indices:
            counted[layer].append(number)
    sent = [(Payload.ACTIVATION, layers.stop, number) for number, layers in ran[OpKind.F]]
    sent += [(Payload.GRADIENT, layers.start, number) for number, layers in back]
    logged = defaultdict[tuple[Payload, int], list[int]](list)
    for payload, boundary, number in sorted(sent):
        if 0 < boundary < num_layers:
            logged[payload, boundary].append(number)
    return StepProgress(
        step=step,
        contexts=tuple(sorted(Part(*each) for each in ran[OpKind.F] - back)),
        halves=tuple(sorted(Part(*each) for each in ran[OpKind.I] - ran[OpKind.W])),
        counted=tuple(sorted((layer, tuple(numbers)) for layer, numbers in counted.items())),
        logged=tuple(Logged(payload, at, tuple(numbers)) for (payload, at), numbers in logged.items()),
    )


def _standing(
    plan: Plan, progress: Mapping[WorkerId, StepProgress], ties: tuple[tuple[int, ...], ...]
) -> tuple[Standing, ...]:
    """The reductions that somebody has completed, and who has yet to hear of it."""
    members = plan.placement.members_by_layer
    complete = {worker: frozenset(each.complete) for worker, each in progress.items()}
    found = []
    for layers in (*((layer,) for layer in range(plan.placement.num_layers)), *ties):
        taking_part = sorted({worker for layer in layers for worker in members[layer]})
        holders = [worker for worker in taking_part if layers in complete.get(worker, ())]
        if holders:
            takers = tuple(worker for worker in taking_part if worker not in holders)
            found.append(Standing(layers=layers, holder=holders[0], takers=takers))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """What concerns all micro-batches.

    Attributes:
        num_layers: of the model.
        open: layers of which some reduction does not stand.
        counted: in whose sums a pair of an open layer is.
        contexts: per micro-batch, what was run forward and not backward, and where.
        halves: likewise, of I's without their W.
        logs: who can send a message.
        reached: per micro-batch, how far its forward pass had come, as far as anybody living knows.
        split: whether backward passes are run as I and W.
        most: forward passes that a worker may keep at once.
    """

    num_layers: int
    open: frozenset[int]
    counted: Mapping[_Pair, WorkerId]
    contexts: Mapping[int, list[tuple[LayerRange, WorkerId]]]
    halves: Mapping[int, list[tuple[LayerRange, WorkerId]]]
    logs: Mapping[tuple[Payload, int, int], list[WorkerId]]
    reached: Mapping[int, int]
    split: bool
    most: Mapping[WorkerId, int]

    @classmethod
    def of(
        cls,
        plan: Plan,
        progress: Mapping[WorkerId, StepProgress],
        ties: tuple[tuple[int, ...], ...],
        standing: tuple[Standing, ...],
    ) -> _Whole:
        stand = {each.layers for each in standing}
        units = (*((layer,) for layer in range(plan.placement.num_layers)), *ties)
        logs = defaultdict[tuple[Payload, int, int], list[WorkerId]](list)
        counted: dict[_Pair, WorkerId] = {}
        for worker in sorted(progress):
            for each in progress[worker].logged:
                for number in each.numbers:
                    logs[each.payload, each.boundary, number].append(worker)
            counted |= {(layer, m): worker for layer, found in progress[worker].counted for m in found}
        return cls(
            num_layers=plan.placement.num_layers,
            open=frozenset(layer for layers in units if layers not in stand for layer in layers),
            counted=counted,
            contexts=_by_microbatch(progress, lambda each: each.contexts),
            halves=_by_microbatch(progress, lambda each: each.halves),
            logs=logs,
            reached=_reached(progress, plan.placement.num_layers),
            split=any(op.kind is OpKind.I for _, row in plan.orders.rows for op in row),
            most=_most_kept(plan, progress),
        )


def _reached(progress: Mapping[WorkerId, StepProgress], num_layers: int) -> dict[int, int]:
    """What lies behind a layer is there only if the layer was run forward; and a backward pass only if all were."""
    found = defaultdict[int, int](int)
    for each in progress.values():
        for logged in each.logged:
            forward = logged.payload is Payload.ACTIVATION
            for number in logged.numbers:
                found[number] = max(found[number], logged.boundary if forward else num_layers)
        for part in each.contexts:
            found[part.number] = max(found[part.number], part.layers.stop)
        found |= dict.fromkeys((part.number for part in each.halves), num_layers)
        found |= {number: num_layers for _, numbers in each.counted for number in numbers}
    return dict(found)


def _by_microbatch(
    progress: Mapping[WorkerId, StepProgress], parts_of: Callable[[StepProgress], tuple[Part, ...]]
) -> Mapping[int, list[tuple[LayerRange, WorkerId]]]:
    found = defaultdict[int, list[tuple[LayerRange, WorkerId]]](list)
    for worker in sorted(progress):
        for part in parts_of(progress[worker]):
            found[part.number].append((part.layers, worker))
    return found


def _most_kept(plan: Plan, progress: Mapping[WorkerId, StepProgress]) -> dict[WorkerId, int]:
    """As many as the worker keeps in a whole step of the plan, and at least what it has now and one more."""
    most = {}
    for worker, row in plan.orders.rows:
        kept = peak = 0
        for op in row:
            kept += {OpKind.F: 1, OpKind.I: 0}.get(op.kind, -1)
            peak = max(peak, kept)
        now = progress.get(worker)
        most[worker] = max(peak, 1 + (len(now.contexts) + len(now.halves) if now is not None else 0))
    return most


@dataclass(slots=True)
class _Task:
    """A piece before its place in an order is known; pieces that must be over before it can begin.

    Attributes:
        closes: whether nothing is left behind it of the forward pass over which it, and others, go back.
    """

    worker: WorkerId
    op: Op
    layers: LayerRange
    adds: bool = True
    closes: bool = False
    source: WorkerId | None = None
    targets: set[WorkerId] = field(default_factory=set)
    waits_for: list[int] = field(default_factory=list)

    @property
    def piece(self) -> Piece:
        targets = tuple(sorted(self.targets))
        return Piece(op=self.op, layers=self.layers, adds=self.adds, source=self.source, targets=targets)


class _Tasks(list[_Task]):
    """All of them; each is known by its place."""

    def put(self, task: _Task) -> int:
        """Adds one and returns its place."""
        self.append(task)
        return len(self) - 1


class _Need:
    """What one micro-batch still needs.

    Attributes:
        microbatch: it.
        led: where the plan leads it, per layer.
        kept: per layer of a forward pass that was kept, over which layers and by whom.
        backward: layers to run backward, and whether that adds to sums.
        forward: layers to run forward first.
    """

    def __init__(self, whole: _Whole, route: Route) -> None:
        self._whole, self.microbatch = whole, route.microbatch
        self._number = number = route.microbatch.number
        self.led = {layer: visit.worker for visit in route.visits for layer in visit.layers.indices}
        self.kept: dict[int, tuple[LayerRange, WorkerId]] = {}
        for part, worker in whole.contexts.get(number, ()):
            self.kept |= {layer: (part, worker) for layer in part.indices if layer not in self.kept}
        self._halved = {layer for part, _ in whole.halves.get(number, ()) for layer in part.indices}
        self.backward: dict[int, bool] = {}
        self.forward: set[int] = set()
        missing = (layer for layer in whole.open if (layer, number) not in whole.counted and layer not in self._halved)
        for layer in sorted(missing, reverse=True):
            self._want_backward(layer, adds=True)

    @property
    def regenerated(self) -> Iterator[_Pair]:
        """Pairs that are run again for a message alone."""
        for layer in sorted(self.forward | self.backward.keys()):
            if not self.backward.get(layer, False) or (layer in self.forward and layer in self.kept):
                yield layer, self._number

    def redone(self, begun: frozenset[_Pair]) -> Iterator[_Pair]:
        """Pairs that were run before and are run again: told so, or something of a layer behind them is known."""
        reached = self._whole.reached.get(self._number, 0)
        for layer in sorted(self.forward - self.kept.keys()):
            if self.backward.get(layer, False) and (layer < reached or (layer, self._number) in begun):
                yield layer, self._number

    def _want_backward(self, layer: int, *, adds: bool) -> None:
        """A layer is run backward; of a forward pass that was kept, all layers behind it are, too."""
        while True:
            known = self.backward.get(layer)
            self.backward[layer] = adds or bool(known)
            if known is not None:
                return
            part = self.kept[layer][0] if layer in self.kept else None
            if part is None:
                self._want_forward(layer)
            inside = part is not None and layer + 1 < part.stop
            if layer + 1 == self._whole.num_layers or (not inside and self.there(Payload.GRADIENT, layer + 1)):
                return
            layer, adds = layer + 1, False

    def _want_forward(self, layer: int) -> None:
        while layer not in self.forward:
            self.forward.add(layer)
            if layer == 0 or self.there(Payload.ACTIVATION, layer):
                return
            layer -= 1

    def there(self, payload: Payload, boundary: int) -> list[WorkerId]:
        """Returns who can send a message."""
        return self._whole.logs.get((payload, boundary, self._number), [])

    def worker_of(self, layer: int) -> WorkerId:
        """Returns who runs a layer backward."""
        return self.kept[layer][1] if layer in self.kept else self.led[layer]


class _Wiring:
    """Makes pieces of what one micro-batch needs, and says where each gets what it takes."""

    def __init__(self, need: _Need, whole: _Whole, tasks: _Tasks, resent: Mapping[WorkerId, list[Resent]]) -> None:
        self._need, self._whole, self._tasks, self._resent = need, whole, tasks, resent
        self._microbatch = need.microbatch
        self._made: dict[tuple[Payload, int], int] = {}  # the piece that makes a message
        self._passes: dict[int, int] = {}  # per layer, the piece that makes a forward pass to go back over
        self._over: list[int] = []  # the pieces over one forward pass that let go of it: B and W

    def run(self) -> None:
        """Adds all pieces, and what is sent out of logs for them."""
        need = self._need
        anew = need.backward.keys() - need.kept.keys()
        for piece in _runs(sorted(need.forward), lambda i: (need.led[i], i in anew)):
            self._forward(piece, adds=piece.start in anew)
        above: tuple[object, int] | None = None
        pieces = list(_runs(sorted(need.backward), self._kind_of_backward))
        for at, piece in reversed(list(enumerate(pieces))):
            above = self._backward(piece, above)
            if not at or self._pass_over(pieces[at - 1].start) != above[0]:
                self._close(piece.start)
        for part, worker in self._whole.halves.get(self._microbatch.number, ()):
            if not self._whole.open.isdisjoint(part.indices):
                self._tasks.put(_Task(worker, Op(OpKind.W, self._microbatch), part, closes=True))

    def _kind_of_backward(self, layer: int) -> object:
        return self._need.worker_of(layer), self._need.backward[layer], self._pass_over(layer)

    def _forward(self, piece: LayerRange, *, adds: bool) -> None:
        at = self._tasks.put(_Task(self._need.led[piece.start], Op(OpKind.F, self._microbatch), piece, adds=adds))
        self._made[Payload.ACTIVATION, piece.stop] = at
        self._passes |= dict.fromkeys(piece.indices, at) if adds else {}
        self._connect(at, Payload.ACTIVATION, piece.start)

    def _close(self, first: int) -> None:
        """The last piece over a forward pass gives its place back: a W behind all others, if there is one.

        Not of a pass that was kept and is not gone back over to its first layer.
        """
        *others, last = sorted(self._over, key=lambda at: (self._tasks[at].op.kind is OpKind.W, at))
        self._over.clear()
        kept = self._need.kept.get(first)
        if kept is None or kept[0].start == first:
            self._tasks[last].closes = True
            self._tasks[last].waits_for += others if self._tasks[last].op.kind is OpKind.W else ()

    def _backward(self, piece: LayerRange, above: tuple[object, int] | None) -> tuple[object, int]:
        """Adds a backward piece; those over one forward pass come one after another, from its last layers on."""
        adds, worker = self._need.backward[piece.start], self._need.worker_of(piece.start)
        split = self._whole.split and adds
        op = Op(OpKind.I if split else OpKind.B, self._microbatch)
        at = self._tasks.put(_Task(worker, op, piece, adds=adds))
        self._made[Payload.GRADIENT, piece.start] = at
        over = self._pass_over(piece.start)
        if piece.start in self._passes:
            self._tasks[at].waits_for.append(self._passes[piece.start])
        if above is not None and above[0] == over:
            self._tasks[at].waits_for.append(above[1])
        self._connect(at, Payload.GRADIENT, piece.stop)
        if split:
            weights = self._tasks.put(_Task(worker, Op(OpKind.W, self._microbatch), piece, waits_for=[at]))
        self._over.append(weights if split else at)
        return over, at

    def _pass_over(self, layer: int) -> object:
        """What tells the forward pass that is gone back over from others: it was kept, or is made by a piece."""
        return self._need.kept.get(layer) or self._passes[layer]

    def _connect(self, at: int, payload: Payload, boundary: int) -> None:
        """Says where a piece gets what it takes."""
        if boundary in (0, self._whole.num_layers):
            return
        task, there = self._tasks[at], self._need.there(payload, boundary)
        if task.worker in there:
            return
        if there:
            task.source = there[0]
            message = Resent(payload=payload, microbatch=self._microbatch, boundary=boundary, target=task.worker)
            self._resent[there[0]].append(message)
            return
        producer = self._made.get((payload, boundary))
        if producer is None:
            raise InternalError(f"nobody makes {payload} of micro-batch {self._microbatch} at boundary {boundary}")
        task.waits_for.append(producer)
        if self._tasks[producer].worker != task.worker:
            task.source = self._tasks[producer].worker
            self._tasks[producer].targets.add(task.worker)


def _runs(layers: list[int], alike: Callable[[int], object]) -> Iterator[LayerRange]:
    """Ranges of layers one after another that are alike."""
    for _, run in groupby(enumerate(layers), key=lambda each: (each[1] - each[0], alike(each[1]))):
        found = [layer for _, layer in run]
        yield LayerRange(found[0], found[-1] + 1)


@dataclass(frozen=True, slots=True)
class _Scheduled:
    rows: dict[WorkerId, tuple[Piece, ...]]
    lasts: float


_URGENCY = {OpKind.B: 0, OpKind.I: 0, OpKind.F: 1, OpKind.W: 2}


def _schedule(tasks: _Tasks, whole: _Whole, plan: Plan, costs: Costs) -> _Scheduled:
    """Puts pieces in order: a worker that is free takes a backward piece if one is ready, else a forward one, else W.

    Of several that are ready it takes that behind which most is to come, or that of the first micro-batch. Or everybody
    keeps to the order of the plan, without what is done already: that never takes longer than the whole step. The best
    of the three is taken.

    Raises:
        InfeasiblePlan: forward passes wait that nobody may keep any more.
    """
    work = _Work(tasks, whole, costs)
    positions = _positions(tasks, plan)
    keys = ([-tail for tail in tails(work.operations)], [task.op.microbatch.index for task in tasks])
    tries = [work.by_urgency(key) for key in keys]
    tries += [work.in_order(positions)] if positions is not None else []
    found = [each for each in tries if len(each.sequence) == len(tasks)]
    if not found:
        raise InfeasiblePlan("the remainder of the step would keep more forward passes at once than the plan does")
    best = min(found, key=work.lasts)
    return _Scheduled(work.rows(best), work.lasts(best))


def _positions(tasks: _Tasks, plan: Plan) -> list[int] | None:
    """Where the plan has each piece in its worker's order; None if it has some nowhere."""
    places: dict[tuple[WorkerId, str, MicroBatch], int] = {}
    for worker, row in plan.orders.rows:
        for at, op in enumerate(row):
            for kind in {OpKind.B: "IBW", OpKind.I: "IB"}.get(op.kind, op.kind.value):
                places[worker, kind, op.microbatch] = at
    found = [places.get((task.worker, task.op.kind.value, task.op.microbatch)) for task in tasks]
    return None if None in found else [at for at in found if at is not None]


class _Work:
    """The pieces as operations that the engine schedules; those whose place nobody has are not in its schedules."""

    def __init__(self, tasks: _Tasks, whole: _Whole, costs: Costs) -> None:
        self._tasks, self._costs = tasks, costs
        self._workers = sorted({task.worker for task in tasks})
        kept = Counter(worker for each in (*whole.contexts.values(), *whole.halves.values()) for _, worker in each)
        self._places = [whole.most[worker] - kept[worker] for worker in self._workers]
        number = {worker: at for at, worker in enumerate(self._workers)}
        self._worker = [number[task.worker] for task in tasks]
        self._known: dict[tuple[OpKind, LayerRange], float] = {}
        self._lengths = [self._length(task) for task in tasks]
        self._edges: list[tuple[int, int, float]] = []
        self._late: list[tuple[int, float]] = []
        for at, task in enumerate(tasks):
            message_s, elsewhere = self._message(task), False
            for before in dict.fromkeys(task.waits_for):
                apart = tasks[before].worker != task.worker
                self._edges.append((before, at, message_s if apart else 0.0))
                elsewhere = elsewhere or apart
            if task.source is not None and not elsewhere:  # it was logged, and is sent as all begin
                self._late.append((at, message_s))
        self.operations = self._with()

    def _with(self, *more: tuple[int, int, float]) -> Operations:
        """All pieces, with edges besides."""
        return as_graph(
            worker=self._worker,
            length=self._lengths,
            opens=[task.op.kind is OpKind.F and task.adds for task in self._tasks],
            closes=[task.closes for task in self._tasks],
            edges=(*self._edges, *more),
            late=self._late,
        )

    def by_urgency(self, key: Sequence[float]) -> Schedule:
        """Backward pieces first, then forward ones, then W; each by a key."""
        urgency = sorted(range(len(key)), key=lambda at: (_URGENCY[self._tasks[at].op.kind], key[at], at))
        return simulate(self.operations, StartRules(urgency=urgency, rank=ranked(urgency), places=self._places))

    def in_order(self, positions: Sequence[int]) -> Schedule:
        """Each worker in an order of its own."""
        order = sorted(range(len(positions)), key=lambda at: (self._worker[at], positions[at], at))
        chain = [(one, other, 0.0) for one, other in pairwise(order) if self._worker[one] == self._worker[other]]
        return simulate(self._with(*chain), StartRules(urgency=order, rank=ranked(order), places=self._places))

    def lasts(self, schedule: Schedule) -> float:
        """When the last piece ends."""
        ends = (schedule.starts[at] + length for at, length in enumerate(self._lengths))
        return float(max(ends, default=0.0))

    def rows(self, schedule: Schedule) -> dict[WorkerId, tuple[Piece, ...]]:
        """The pieces of every worker, in order."""
        rows = zip(self._workers, schedule.rows, strict=True)
        return {worker: tuple(self._tasks[at].piece for at in row) for worker, row in rows}

    def _length(self, task: _Task) -> float:
        key = (task.op.kind, task.layers)
        if key not in self._known:
            of = self._costs.of(task.layers)
            lengths = {OpKind.F: of.forward, OpKind.I: of.input_apart, OpKind.W: of.weight, OpKind.B: of.backward}
            self._known[key] = lengths[task.op.kind]
        return self._known[key]

    def _message(self, task: _Task) -> float:
        """How long what a piece takes is on its way from another worker."""
        if task.source is None:
            return 0.0
        boundary = task.layers.start if task.op.kind is OpKind.F else task.layers.stop
        return self._costs.comm[boundary - 1]
