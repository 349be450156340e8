"""A compute engine that computes next to nothing, but whose results still prove that everything was right.

Each layer's weight, activation and gradient is a few integers, mixed by a hash of (step, layer, micro-batch) and of
what came in. A wrong route, a lost or doubled micro-batch or a stale weight changes the final hash, as it would in a
real model; the seconds that a profile gives to each operation are spent asleep instead of computing. It serves the
simulated cluster and the timing of many workers on few cores.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from holdfast.core.placement import LayerRange
from holdfast.core.profile import Profile
from holdfast.core.progress import Part
from holdfast.core.schedule import OpKind
from holdfast.core.summing import Contribution, SumSize, Total, plain
from holdfast.errors import InternalError, LedgerError
from holdfast.protocol.auditing import CLAIMS_BYTES, Digests, pack_claims, unpack_claims
from holdfast.runtime.engine.stepped import BEFORE_ALL, SteppedStage, Work, part_of
from holdfast.runtime.engine.votes import pack_vote, unpack_vote

__all__ = ["WIDTH", "EmulatedStage"]

_Words: TypeAlias = NDArray[np.int64]

WIDTH = 8
_WORD_BYTES = 8
_AT_ONCE = nullcontext()
_ODD = 0x5851F42D4C957F2D
_LATE_STEP_S, _LATEST_S = 1e-5, 1e-3
"""How fast the expected lateness of a wake-up follows, and what it may be at most: a fiftieth of 50 ms."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a forward pass leaves for a backward one, or I for W.

    Attributes:
        layers: those that are left.
        inputs: what each of them was given.
        gradient: what going back begins with, if that is known: at the loss, and for W.
    """

    layers: LayerRange
    inputs: list[_Words]
    gradient: _Words | None


@dataclass(slots=True)
class _Watch:
    """A sample of an audit: what went in, what came out, and the message that tells of it once it is made."""

    layer: int
    microbatch: int
    words: dict[str, _Words] = field(default_factory=dict)
    message: Any = None

    @property
    def digests(self) -> Digests:
        """What that comes to."""
        found = {name: hashlib.sha256(value.tobytes()).digest() for name, value in self.words.items()}
        inputs = hashlib.sha256(found["input"] + found["gradient"]).hexdigest()
        gradients = hashlib.sha256(found["back"] + found["weight"]).hexdigest()
        return Digests(inputs=inputs, output=found["output"].hex(), gradients=gradients)


def _as_it_is(value: NDArray[Any]) -> NDArray[Any]:
    return value


class EmulatedStage(SteppedStage[_Words, bool]):
    """The stage port over integers; see :class:`holdfast.protocol.worker.Engine`.

    Args:
        layers: those that we hold or follow, ascending.
        num_layers: of the whole model.
        num_microbatches: of one step, over all pipelines.
        profile: how long each layer's operations and optimizer step take; None if they take no time (under a virtual
            clock, the driver lets it pass).
        clock: seconds that only go forward.
        sleep: lets seconds pass.
        scaled: which share of the steps has gradients that must be scaled, as clipping by the global norm does.
        sends: makes of an array what a transport carries; what is carried shares its memory.
        receives: makes an array of that.
    """

    _as_is = False  # whether gradients are scaled

    def __init__(
        self,
        *,
        layers: Sequence[int],
        num_layers: int,
        num_microbatches: int,
        profile: Profile | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        scaled: float = 0.0,
        sends: Callable[[NDArray[Any]], Any] = _as_it_is,
        receives: Callable[[Any], NDArray[Any]] = _as_it_is,
    ) -> None:
        super().__init__(layers)
        self._sends, self._receives = sends, receives
        self._profile = profile
        self._op_s: dict[tuple[OpKind, LayerRange], float] = {}
        self._update_s = {} if profile is None else {i: profile.layers[i].optimizer_s for i in layers}
        self._clock, self._sleep = clock, sleep
        self._late_s = 0.0
        self._num_layers = num_layers
        self._num_microbatches = num_microbatches
        self._sections = (WIDTH, WIDTH + 1, WIDTH + 1 + num_microbatches)
        self._weights = {layer: [_words(layer), _words(layer)] for layer in layers}
        self._live = dict.fromkeys(layers, 0)
        self._at = dict.fromkeys(layers, 0)
        self._share_scaled = scaled
        self._losses = np.zeros(num_microbatches)
        self._forget()

    def _forget(self) -> None:
        self._ran = defaultdict[int, dict[int, _Pass]](dict)  # per micro-batch, by first layer
        self._halved = defaultdict[int, dict[int, _Pass]](dict)
        self._dissent = 0
        self._watch: _Watch | None = None
        self._sums = {layer: np.zeros(WIDTH, np.int64) for layer in self.layers}
        self._counts = {layer: np.zeros(self._num_microbatches, np.int64) for layer in self.layers}
        self._losses.fill(0.0)
        self._left_out: frozenset[int] = frozenset()

    def _leave_out(self, microbatches: frozenset[int]) -> None:
        for layer, counts in self._counts.items():
            added = frozenset(np.flatnonzero(counts).tolist())
            if (layer,) in self._reduced or added.isdisjoint(microbatches):
                continue
            if not added <= microbatches:
                raise InternalError(
                    f"layer {layer}: micro-batches {sorted(added)} are in its sum, to be left out in part"
                )
            self._sums[layer], self._counts[layer] = np.zeros(WIDTH, np.int64), np.zeros_like(counts)
        for number in microbatches:
            self._ran.pop(number, None)
            self._halved.pop(number, None)
            self._losses[number] = 0.0
        self._left_out = microbatches

    def forward(
        self, step: int, microbatch: int, activation: Any, layers: LayerRange | None = None, *, adds: bool = True
    ) -> Any:
        """See StepEngine.forward."""
        layers = layers or self._all()
        with self._lasting(self._seconds_of(OpKind.F, layers)):
            return self._forward(step, microbatch, activation, layers, adds=adds)

    def _seconds_of(self, kind: OpKind, layers: LayerRange) -> float:
        if self._profile is None:
            return 0.0
        if (kind, layers) not in self._op_s:
            self._op_s[kind, layers] = self._profile.seconds_of(kind, layers)
        return self._op_s[kind, layers]

    def _forward(self, step: int, microbatch: int, activation: Any, layers: LayerRange, *, adds: bool) -> Any:
        value = _words(step, microbatch) if activation is None else self._receives(activation)
        inputs = []
        for layer in layers.indices:
            inputs.append(value)
            value = self._through(layer, value, step, microbatch)
            if adds and self._watches(layer, microbatch):
                self._watched.words |= {"input": inputs[-1], "output": value}
        ends = layers.stop == self._num_layers
        if adds:
            self._ran[microbatch][layers.start] = _Pass(layers, inputs, value if ends else None)
        return None if ends else self._sends(value)

    def backward(
        self,
        kind: OpKind,
        step: int,
        microbatch: int,
        gradient: Any,
        layers: LayerRange | None = None,
        *,
        adds: bool = True,
    ) -> Any:
        """See StepEngine.backward."""
        found, before = (self._halved, "I") if kind is OpKind.W else (self._ran, "forward pass")
        passes = found[microbatch]
        left = {start: each.layers for start, each in passes.items()}
        start, layers = part_of(f"{kind} of micro-batch {microbatch}", before, left, layers)
        with self._lasting(self._seconds_of(kind, layers)):
            return self._backward(kind, step, microbatch, gradient, passes.pop(start), layers, adds=adds)

    def _backward(
        self, kind: OpKind, step: int, microbatch: int, gradient: Any, over: _Pass, layers: LayerRange, *, adds: bool
    ) -> Any:
        given = value = over.gradient if over.gradient is not None else self._receives(gradient)
        if kind is not OpKind.I and adds and layers.stop == self._num_layers:
            self._losses[microbatch] = float(value[0]) / 2**63
        inputs = over.inputs[-len(layers.indices) :]
        for layer, taken in zip(reversed(layers.indices), reversed(inputs), strict=True):
            before, value = value, self._back(layer, value, taken, step, microbatch)
            if adds and self._watches(layer, microbatch):
                self._watched.words |= _words_of_pass(kind, before, value)
            if kind is not OpKind.I and adds and (layer,) not in self._reduced:
                self._sums[layer] += value
                self._counts[layer][microbatch] += 1
        if layers.start > over.layers.start:
            rest = LayerRange(over.layers.start, layers.start)
            passes = self._halved if kind is OpKind.W else self._ran
            next_value = value if kind is OpKind.W else None
            passes[microbatch][rest.start] = _Pass(rest, over.inputs[: len(rest.indices)], next_value)
        if kind is OpKind.I:
            self._halved[microbatch][layers.start] = _Pass(layers, inputs, given)
        return None if kind is OpKind.W or layers.start == 0 else self._sends(value)

    def evaluate(self, number: int, value: Any, layers: LayerRange) -> Any:
        """See Engine.evaluate: the score depends on the weights of all layers."""
        words = _words(BEFORE_ALL, number) if value is None else self._receives(value)
        with self._lasting(self._seconds_of(OpKind.F, layers)):
            for layer in layers.indices:
                words = self._through(layer, words, BEFORE_ALL, number)
        return {"loss": float(words[0] >> 32)} if layers.stop == self._num_layers else self._sends(words)

    def _through(self, layer: int, value: _Words, step: int, microbatch: int) -> _Words:
        """One layer's output."""
        return _mix(value, self._weight(layer), _words(step, microbatch, layer))

    def _back(self, layer: int, gradient: _Words, taken: _Words, step: int, microbatch: int) -> _Words:
        """The gradient of one layer's input, and of its weight."""
        return _mix(gradient, taken, _words(step, microbatch, layer, 1))

    def watch(self, layer: int, microbatch: int) -> None:
        """See StepEngine.watch."""
        self._watch = _Watch(layer, microbatch)

    @property
    def _watched(self) -> _Watch:
        if self._watch is None:
            raise InternalError("no sample is watched in this step")
        return self._watch

    def _watches(self, layer: int, microbatch: int) -> bool:
        return self._watch is not None and (self._watch.layer, self._watch.microbatch) == (layer, microbatch)

    def audit_message(self, times: int) -> Any:
        """See StepEngine.audit_message."""
        watch = self._watched
        if watch.message is None:
            given = watch.words["input"], watch.words["gradient"]
            again = [self._recompute(watch.layer, watch.microbatch, *given) for _ in range(times - 1)]
            claims = np.frombuffer(pack_claims([watch.digests, *again]), np.int64)
            watch.message = self._sends(np.concatenate((*given, claims)))
        return watch.message

    def audit_bytes(self, layer: int) -> int:
        """See StepEngine.audit_bytes."""
        return 2 * _WORD_BYTES * WIDTH + CLAIMS_BYTES

    def audit(
        self, layer: int, microbatch: int, message: Any, times: int
    ) -> tuple[tuple[Digests, ...], tuple[Digests, ...]]:
        """See StepEngine.audit."""
        given, gradient, claims = np.split(self._receives(message).view(np.int64), (WIDTH, 2 * WIDTH))
        ours = tuple(self._recompute(layer, microbatch, given, gradient) for _ in range(times))
        return unpack_claims(claims.tobytes(), times), ours

    def _recompute(self, layer: int, microbatch: int, given: _Words, gradient: _Words) -> Digests:
        assert self._step is not None, "a sample is computed again in its step"
        output = self._through(layer, given, self._step, microbatch)
        back = self._back(layer, gradient, given, self._step, microbatch)
        words = {"input": given, "output": output, **_words_of_pass(OpKind.B, gradient, back)}
        return _Watch(layer, microbatch, words).digests

    def _work(self) -> Work:
        counted = ((layer, tuple(np.flatnonzero(counts).tolist())) for layer, counts in self._counts.items())
        return Work(
            contexts=_parts(self._ran),
            halves=_parts(self._halved),
            counted=tuple((layer, found) for layer, found in counted if found and (layer,) not in self._reduced),
        )

    def sum_message(self, layers: tuple[int, ...]) -> Any:
        """See StepEngine.sum_message."""
        return self._sends(self._reduced[layers])

    def sum_bytes(self, layers: tuple[int, ...]) -> int:
        """See StepEngine.sum_bytes."""
        losses = self._num_microbatches if layers == (self._num_layers - 1,) else 0
        return _WORD_BYTES * (WIDTH + losses)

    def take_sum(self, layers: tuple[int, ...], message: Any) -> None:
        """See StepEngine.take_sum."""
        self._reduced[layers] = self._receives(message).view(np.int64).copy()
        self._dissent_from(layers)

    def _dissent_from(self, reduction: tuple[int, ...]) -> None:
        self._dissent = max(self._dissent, 1)

    def message(self, layers: tuple[int, ...], dissent: int) -> Contribution:
        """See StepEngine.message."""
        (layer,) = layers
        last = (self._losses.view(np.int64),) if layer == self._num_layers - 1 else ()
        return plain(self._sends(np.concatenate((self._sums[layer], [dissent], self._counts[layer], *last))))

    def message_size(self, layers: tuple[int, ...]) -> SumSize:
        """See StepEngine.message_size."""
        losses = self._num_microbatches if layers == (self._num_layers - 1,) else 0
        return SumSize(header=0, part=_WORD_BYTES * (self._sections[-1] + losses))

    def accept(self, layers: tuple[int, ...], summed: Total) -> None:
        """See StepEngine.accept."""
        (layer,) = layers
        total, dissent, counts, losses = np.split(self._receives(summed.total), self._sections)
        self._dissent += int(dissent[0])
        for microbatch, count in enumerate(counts.tolist()):
            if count != (microbatch not in self._left_out):
                raise LedgerError(layer, microbatch, count)
        if len(losses):
            losses[sorted(self._left_out)] = np.full(len(self._left_out), np.nan).view(np.int64)
        self._reduced[layers] = np.concatenate((total, losses))  # losses: of the last layer

    def vote(self) -> Any:
        """See StepEngine.vote: a mark for every own layer, its "norm", and how many owners are not ready."""
        marks = np.zeros((self._num_layers, 3))
        for (layer,), total in self._reduced.items():
            marks[layer, 0] = 1.0
            marks[layer, 1] = float(int(total[0]) % 997) + 1.0
        marks[self.layers[0], 2] = self._dissent
        return self._sends(marks)

    def pack_vote(self, vote: Any) -> bytes:
        """See StepEngine.pack_vote."""
        return pack_vote(self._receives(vote))

    def unpack_vote(self, data: bytes) -> Any:
        """See StepEngine.unpack_vote."""
        return self._sends(unpack_vote(data))

    def merge_votes(self, ours: Any, theirs: Any) -> Any:
        """See StepEngine.merge_votes."""
        return self._sends(np.maximum(self._receives(ours), self._receives(theirs)))

    def _judge(self, vote: Any) -> bool:
        """Whether the gradients of a step have to be scaled."""
        vote = self._receives(vote)
        if not bool((vote[:, 0] == 1.0).all()):
            raise InternalError(f"the verdict does not cover every layer: {vote[:, 0].tolist()}")
        return int(vote[:, 1].sum()) % 100 < 100 * self._share_scaled

    def _update(self, layer: int, verdict: bool) -> None:
        shadow = 1 - self._live[layer]
        words = _words(self._at[layer], 1) if verdict else _words(self._at[layer])
        with self._lasting(self._update_s.get(layer, 0.0)):
            self._weights[layer][shadow] = _mix(self._weight(layer), self._reduced[layer,][:WIDTH], words)

    def _swap(self, layer: int) -> None:
        self._live[layer] = 1 - self._live[layer]
        self._at[layer] += 1

    def _take_back(self, layer: int, to_step: int) -> None:
        step = self._at[layer]
        if step == to_step + 1:
            self._live[layer] = 1 - self._live[layer]
            self._at[layer] = to_step
        elif step != to_step:
            raise InternalError(f"layer {layer} is at step {step}, cannot go to {to_step}")

    def _adopt(self, layer: int, other: EmulatedStage) -> None:
        self._weights[layer], self._live[layer], self._at[layer] = (
            other._weights[layer],
            other._live[layer],
            other._at[layer],
        )

    def _steps(self) -> dict[int, int]:
        return dict(self._at)

    @property
    def whole(self) -> bool:
        """See Engine.whole: weights are exchanged, never changed in place."""
        return True

    @property
    def omitted(self) -> bool:
        """See Engine.omitted: integers are always finite."""
        return False

    def losses(self) -> list[float] | None:
        """See Engine.losses."""
        reduced = self._reduced.get((self._num_layers - 1,))
        return None if reduced is None else [x for x in reduced[WIDTH:].view(np.float64).tolist() if x == x]

    def save(self, layer: int, directory: Path) -> Path:
        """Writes the layer's digest: there is nothing else worth keeping."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"layer-{layer:04d}.txt"
        path.write_text(self.layer_digest(layer))
        return path

    def snapshot(self, layer: int, *, to_file: bool = False) -> Callable[[], bytes]:
        """See Engine.snapshot: the step and the weight."""
        words = [self._at[layer], *self._weight(layer).tolist()]
        return lambda: b" ".join(b"%d" % word for word in words)

    def restore(self, layer: int, data: bytes) -> None:
        """See Engine.restore."""
        step, *words = (int(word) for word in data.split())
        self._weights[layer] = [np.array(words, np.int64) for _ in range(2)]
        self._at[layer] = step

    def exact(self, layer: int) -> bool:
        """See Engine.exact."""
        return True

    def layer_digest(self, layer: int) -> str:
        """See Engine.layer_digest."""
        return hashlib.sha256(self._weight(layer).tobytes()).hexdigest()

    def _weight(self, layer: int) -> _Words:
        return self._weights[layer][self._live[layer]]

    def _lasting(self, seconds: float) -> AbstractContextManager[None]:
        return self._ending_after(seconds) if seconds else _AT_ONCE

    @contextmanager
    def _ending_after(self, seconds: float) -> Iterator[None]:
        """Makes what is within end so long after it began; what it takes by itself is part of that.

        It is done in the middle of that time: where many workers share few cores and all begin and end together, it is
        not in the way of their messages.
        """
        began = self._clock()
        self._sleep_until(began + seconds / 2)
        yield
        self._sleep_until(began + seconds)

    def _sleep_until(self, moment: float) -> None:
        """Sleeps until a moment, at the median: how late the system wakes us is learnt and allowed for."""
        left = moment - self._clock()
        if left <= 0:
            return
        due = moment - min(self._late_s, left / 2)
        while (left := due - self._clock()) > 0:
            self._sleep(left)
        later = self._clock() - due > self._late_s
        self._late_s = min(_LATEST_S, max(0.0, self._late_s + (_LATE_STEP_S if later else -_LATE_STEP_S)))


def _words_of_pass(kind: OpKind, gradient: _Words, found: _Words) -> dict[str, _Words]:
    """What B, I or W takes and gives: the gradient of a layer's input is that of its weight, too."""
    back = {} if kind is OpKind.W else {"gradient": gradient, "back": found}
    return back if kind is OpKind.I else {**back, "weight": found}


def _parts(passes: Mapping[int, Mapping[int, _Pass]]) -> tuple[Part, ...]:
    return tuple(sorted(Part(m, each.layers) for m, found in passes.items() for each in found.values()))


def _mix(first: _Words, *others: _Words) -> _Words:
    """Hashes integer vectors into one; wraps around, so sums of results do not depend on their order."""
    mixed = first * _ODD
    mixed ^= mixed >> 29
    for value in others:
        mixed ^= value
        mixed *= _ODD
        mixed ^= mixed >> 29
    return mixed


@lru_cache(maxsize=1 << 16)
def _words(*parts: int) -> _Words:
    """A vector for some numbers; shared by all who ask, so never to be changed."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) & 0x7FFF_FFFF_FFFF
    return _mix_constant(np.arange(1, WIDTH + 1, dtype=np.int64) * (2 * seed + 1))


def _mix_constant(value: _Words) -> _Words:
    value = value * _ODD
    return value ^ (value >> 31)
