"""A device that computes late, made of torch's hook for devices written in Python; it needs no hardware.

What is called is queued on a stream, as on a GPU, and runs when the host waits, in an order that is drawn among all
that streams and marks allow. Memory holds no numbers until it is written. Two operations of which no mark says which is
first, on the same memory, are a race, and raise in every order: vector clocks are compared, not results.

Its numbers are the CPU's bits: each operation is the CPU's, and random ones draw when they are called.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from holdfast.devices.device import HOST
from holdfast.devices.fresh import host_memory
from holdfast.devices.pairs import Group, MakeGroup, Work
from holdfast.devices.queued import Queued
from holdfast.runtime.tensors import settle_thread

__all__ = ["MACHINE", "NAME", "Late", "LateTensor", "Mark", "Race", "Stream", "running"]

NAME = "late"
_ATEN = torch.ops.aten
_ASKS = {_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default}
"""What needs to know numbers, and waits for them."""

_KEPT = 4
"""Streams that there are always; others are those of one test."""

_Clock = dict["Stream", int]
"""Of each stream, how many of its operations are surely over."""


class Race(AssertionError):
    """Two operations touch the same memory, and nothing says which is first."""


class Mark:
    """Behind all that was on a stream when it was set; with the names of torch's events."""

    def __init__(self, clock: _Clock) -> None:
        self.clock = clock
        self.passed = False
        self.passed_at = 0.0

    def query(self) -> bool:
        """Whether it has passed; so who asks has waited for it, if it has."""
        MACHINE.go_on()
        if self.passed:
            MACHINE.wait(self)
        return self.passed

    def synchronize(self) -> None:
        """The host waits for it."""
        MACHINE.wait(self)


class Stream:
    """Operations that run one after the other; with the names of torch's streams."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Mark | _Wait | Callable[[], None]] = deque()
        self.clock: _Clock = {}

    def __repr__(self) -> str:
        return self.name

    def record_event(self) -> Mark:
        """Sets a mark behind all that is queued."""
        return MACHINE.mark(self)

    def wait_event(self, mark: Mark) -> None:
        """What is queued from now on waits for the mark."""
        MACHINE.after(self, mark)


class _Wait:
    """In a stream: what is behind it runs when the mark has passed."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark


class _Uses:
    """Of one allocation: which operations have written and read it last, and who may still use it once it is freed."""

    def __init__(self, home: Stream, order: int) -> None:
        self.home, self.order = home, order
        self.written: tuple[Stream, int, str] | None = None
        self.read: dict[Stream, tuple[int, str]] = {}
        self.held: set[Stream] = set()


class Machine:
    """The device: its streams, and what the host knows of them.

    Attributes:
        order: by which operations run.
        first: the stream on which threads queue unless they say otherwise.
        races: found where nothing can be raised, when memory is freed; the next operation raises them.
        ran: how many operations have run.
    """

    def __init__(self) -> None:
        self.order = 0
        self.races: list[str] = []
        self.ran = 0
        self._lock = threading.RLock()
        self._local = threading.local()
        self._streams: list[Stream] = []
        self._random = random.Random(0)
        self.first = self.stream("compute")

    def stream(self, name: str) -> Stream:
        """Returns a further stream."""
        made = Stream(name)
        self._streams.append(made)
        return made

    def reset(self, order: int) -> None:
        """Runs all that is queued, and draws what comes from now on in another order."""
        with self._lock:
            self.run_until(lambda: not any(stream.queue for stream in self._streams))
            del self._streams[_KEPT:]
            self.races.clear()
            self.order = order
            self._random.seed(order)

    def drop(self) -> None:
        """Forgets all that is queued, as whoever queued it has failed."""
        with self._lock:
            for stream in self._streams:
                stream.queue.clear()
            self.races.clear()
            self.order = -1

    @property
    def _host(self) -> _Clock:
        """What this thread has waited for; one thread does not know what another one has seen."""
        return getattr(self._local, "host", {})

    @property
    def current(self) -> Stream:
        """On which this thread queues."""
        return getattr(self._local, "stream", self.first)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Queues what this thread calls on another stream."""
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def mark(self, stream: Stream | None = None) -> Mark:
        """Sets a mark behind all that is on the stream."""
        with self._lock:
            stream = stream or self.current
            mark = Mark(_merged(stream.clock, self._host))
            stream.queue.append(mark)
            return mark

    def after(self, stream: Stream, mark: Mark) -> None:
        """What is queued on the stream from now on waits for the mark."""
        with self._lock:
            stream.clock = _merged(stream.clock, mark.clock)
            stream.queue.append(_Wait(mark))

    def wait(self, mark: Mark) -> None:
        """The host waits for the mark."""
        with self._lock:
            self.run_until(lambda: mark.passed)
            self._local.host = _merged(self._host, mark.clock)

    def go_on(self) -> None:
        """Time goes by: some operations run."""
        with self._lock:
            until = self.ran + self._random.choice((0, 0, 1, 30))
            self.run_until(lambda: self.ran >= until or not any(map(_is_ready, self._streams)))

    def hold(self, tensor: Tensor, stream: Stream) -> None:
        """Says that memory is still used by what is on that stream now, though it may be freed where it was made."""
        assert isinstance(tensor, LateTensor), "it is in the host's memory"
        tensor.memory.uses.held.add(stream)

    def finish(self, stream: Stream | None = None) -> None:
        """The host waits for all that is on the stream."""
        self.wait(self.mark(stream))

    def queue(
        self, name: str, run: Callable[[], None], *, reads: Sequence[_Uses] = (), writes: Sequence[_Uses] = ()
    ) -> None:
        """Queues an operation on the current stream.

        Raises:
            Race: it reads or writes what another one writes, or writes what another one reads, at the same time.
        """
        with self._lock:
            if self.races:
                raise Race(f"order {self.order}: {self.races[0]}")
            stream = self.current
            stream.clock = _merged(stream.clock, self._host)
            now = stream.clock[stream] = stream.clock.get(stream, 0) + 1
            for memory in (*reads, *writes):
                self._ordered(name, memory.written)
            for memory in writes:
                for other, (at, reader) in memory.read.items():
                    self._ordered(name, (other, at, reader))
                memory.written, memory.read = (stream, now, name), {}
            for memory in reads:
                memory.read[stream] = (now, name)
            stream.queue.append(run)

    def _ordered(self, name: str, before: tuple[Stream, int, str] | None) -> None:
        if before is None:
            return
        other, at, what = before
        if other is not self.current and self.current.clock.get(other, 0) < at:
            raise Race(
                f"order {self.order}: {name} on {self.current} uses memory at the same time as {what} on {other}"
            )

    def freed(self, memory: _Uses, raw: Tensor) -> None:
        """Memory goes to the next one who asks for it where it was made: what is there now is over for others."""
        if memory.order != self.order:  # of somebody else, who has failed
            return
        with self._lock:
            used = [(other, at, what) for other, (at, what) in memory.read.items()]
            used += [memory.written] if memory.written is not None else []
            known = _merged(memory.home.clock, self._host)
            for other, at, what in used:
                if other is not memory.home and other not in memory.held and known.get(other, 0) < at:
                    self.races.append(f"memory of {memory.home} was freed before {what} on {other} has used it")
            if not memory.held and any(other is not memory.home for other, _, _ in used):
                memory.home.queue.append(lambda: _spoil(raw))

    def run_until(self, there: Callable[[], bool]) -> None:
        """Runs operations, in an order that is drawn, until something is so.

        Raises:
            AssertionError: nothing can run, and it is not so: streams wait for each other.
        """
        if not getattr(self._local, "settled", False):  # whoever waits runs the operations of others, too
            self._local.settled = True
            settle_thread()
        while not there():
            ready = [stream for stream in self._streams if _is_ready(stream)]
            assert ready, "all streams wait for each other"
            stream = self._random.choice(ready) if len(ready) > 1 else ready[0]
            for _ in range(self._random.choice((1, 8))):
                if there() or not _is_ready(stream):
                    break
                self._run(stream.queue.popleft())

    def _run(self, entry: Mark | _Wait | Callable[[], None]) -> None:
        if isinstance(entry, Mark):
            entry.passed, entry.passed_at = True, time.monotonic()
        elif not isinstance(entry, _Wait):
            with torch.no_grad():
                entry()
            self.ran += 1


def _is_ready(stream: Stream) -> bool:
    return bool(stream.queue) and not (isinstance(stream.queue[0], _Wait) and not stream.queue[0].mark.passed)


def _merged(one: _Clock, other: _Clock) -> _Clock:
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in {**one, **other}}


MACHINE = Machine()
_OUT, _BACK, _BESIDE = (MACHINE.stream(name) for name in ("out", "back", "beside"))


class _Memory:
    """An allocation: whose tensors are all gone is freed."""

    def __init__(self, raw: Tensor) -> None:
        self.uses = _Uses(MACHINE.current, MACHINE.order)
        weakref.finalize(self, MACHINE.freed, self.uses, raw).atexit = False


@contextmanager
def running(order: int) -> Iterator[None]:
    """Within it operations run in one order, and those of a backward pass are called by the thread that begins it.

    Raises:
        Race: behind it, if memory was freed too early.
    """
    MACHINE.reset(order)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    except BaseException:
        MACHINE.drop()
        raise
    races = MACHINE.races[:]
    MACHINE.reset(order)
    if races:
        raise Race(f"order {order}: {races[0]}")


class LateTensor(torch.Tensor):
    """A tensor in the device's memory; `raw` holds its numbers once they are computed."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    raw: Tensor
    memory: _Memory

    @staticmethod
    def __new__(cls, raw: Tensor, memory: _Memory | None = None) -> LateTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        made.memory = memory or _Memory(raw)
        return made

    def __init__(self, raw: Tensor, memory: _Memory | None = None) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{NAME}({tuple(self.shape)}, {self.dtype})"

    @property  # type: ignore[override]
    def data(self) -> LateTensor:
        """The same memory; another tensor of the same shape may be put in its place."""
        return LateTensor(self.raw, self.memory)

    @data.setter
    def data(self, other: LateTensor) -> None:
        assert (self.shape, self.dtype) == (other.shape, other.dtype), "torch would take it, and this does not"
        self.raw, self.memory = other.raw, other.memory

    def data_ptr(self) -> int:
        """Where the numbers are to be."""
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        """The numbers, as of any tensor; torch refuses classes of others."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, dict(kwargs or {}))


def _spoil(raw: Tensor) -> None:
    """Fills memory with what nobody has computed."""
    if raw.dtype.is_floating_point:
        raw.fill_(float("nan"))
    elif raw.dtype is not torch.bool:
        raw.fill_(0x5A)


def _mapped(each: Callable[[Any], Any], values: Any) -> Any:
    """The same lists, tuples and dictionaries of other values."""
    if isinstance(values, (tuple, list)):
        return type(values)([_mapped(each, value) for value in values])
    if isinstance(values, dict):
        return {name: _mapped(each, value) for name, value in values.items()}
    return each(values)


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from _leaves(value)
    elif isinstance(values, dict):
        yield from _leaves(tuple(values.values()))
    else:
        yield values


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, LateTensor) else value


def _scalar(value: Any) -> Any:
    """The host's numbers go to the device by value, at once; more than one of them has to be copied there."""
    if isinstance(value, Tensor) and not isinstance(value, LateTensor):
        if value.dim():
            raise RuntimeError(f"expected all tensors on {NAME}, but found one of {tuple(value.shape)} on the host")
        return value.clone()
    return value


def _called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Queues an operation; see LateTensor."""
    if func is _ATEN._to_copy.default:
        return _copied(args[0], kwargs)
    if func is _ATEN.copy_.default:
        at_once = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return _copy(args[0], args[1], at_once=at_once)
    if func in _ASKS:
        MACHINE.queue(func.__name__, lambda: None, reads=_uses((args, kwargs)))
        MACHINE.finish()
        return func(*_mapped(_raw, args), **_mapped(_raw, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = "cpu"
    return _queued(func, _mapped(_scalar, args), _mapped(_scalar, kwargs))


def _uses(values: Any) -> list[_Uses]:
    return [each.memory.uses for each in _leaves(values) if isinstance(each, LateTensor)]


def _copied(source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    target = torch.device(kwargs.get("device") or source.device)
    raw = torch.empty_like(_raw(source), dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format"))
    _spoil(raw)
    made = LateTensor(raw) if target.type == NAME else raw
    there = source.device.type == target.type
    return _copy(made, source, at_once=not (there or kwargs.get("non_blocking", False)))


def _copy(target: Tensor, source: Tensor, *, at_once: bool) -> Tensor:
    """Copies within the device, to it or from it; what is in the host's memory is read, or is there, only then."""
    into, out_of = _raw(target), _raw(source)
    if not isinstance(target, LateTensor):
        _spoil(into)
    MACHINE.queue("copy", lambda: into.copy_(out_of), reads=_uses([source]), writes=_uses([target]))
    if at_once and isinstance(target, LateTensor) != isinstance(source, LateTensor):
        MACHINE.finish()
    return target


def _queued(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    schema = func._schema
    given, named = _mapped(_raw, args), _mapped(_raw, kwargs)
    if any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns):
        base = next(each for each in args if isinstance(each, LateTensor))  # a view: the same memory
        return _placed(func(*given, **named), base.memory)
    run = _drawn(func, given, named)
    if func is _ATEN.native_batch_norm.default:  # its schema does not say what it changes
        MACHINE.queue("running statistics", lambda: None, writes=_uses(args[3:5]))
    changed = [
        args[place] if place < len(args) else kwargs.get(each.name)
        for place, each in enumerate(schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    if changed:
        MACHINE.queue(func.__name__, run, reads=_uses((args, kwargs)), writes=_uses(changed))
        return None if not schema.returns else changed[0] if len(schema.returns) == 1 else tuple(changed)
    shapes = _shapes(func, given, named)
    if shapes is None:
        MACHINE.queue(func.__name__, lambda: None, reads=_uses((args, kwargs)))
        MACHINE.finish()
        return _placed(run(), None)
    made = _mapped(_room, shapes)
    rooms = [each.raw for each in _leaves(made) if isinstance(each, LateTensor)]

    def fill() -> None:
        found = [each for each in _leaves(run()) if isinstance(each, Tensor)]
        for room, each in zip(rooms, found, strict=True):
            room.copy_(each)

    MACHINE.queue(func.__name__, fill, reads=_uses((args, kwargs)), writes=_uses(made))
    return made


_KNOWN: dict[Any, Any] = {}
"""Of an operation and what it is given: what shapes come out."""


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns, of no numbers; None if that goes by the numbers that it is given."""
    key = (func, repr(_mapped(_form, (args, kwargs))))
    if key not in _KNOWN:
        try:
            shapes = func(*_mapped(_shape, args), **_mapped(_shape, kwargs))
            if func._schema.arguments[-1].name == "output_mask":  # which of them the CPU makes
                shapes = tuple(each if made else None for each, made in zip(shapes, args[-1], strict=True))
            elif func is _ATEN.native_batch_norm.default and not args[5]:  # who does not train keeps nothing
                shapes = (shapes[0], *(each.new_empty(0) for each in shapes[1:]))
            _KNOWN[key] = shapes
        except NotImplementedError:
            _KNOWN[key] = None
    return _KNOWN[key]


def _form(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _placed(found: Any, memory: _Memory | None) -> Any:
    return _mapped(lambda each: LateTensor(each, memory) if isinstance(each, Tensor) else each, found)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, (torch.device, str)) and str(value) == "cpu" else value


def _room(shape: Any) -> Any:
    if not isinstance(shape, Tensor):
        return shape
    raw = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
    _spoil(raw)
    return LateTensor(raw)


def _drawn(func: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    """What an operation does later: one that draws random numbers draws them now, as the host's generators say."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return lambda: func(*args, **kwargs)
    state = torch.get_rng_state()
    blank = _mapped(lambda each: torch.zeros_like(each) if isinstance(each, Tensor) else each, (args, kwargs))
    func(*blank[0], **blank[1])  # so that the next one draws what comes behind

    def run() -> Any:
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_rng_state(now)

    return run


class _Works:
    """One group of the device: numbers go by way of the host, once what was queued before has run.

    Who calls, waits for nothing, and knows of nothing that another thread has waited for.
    """

    def __init__(self, inner: Group) -> None:
        self._inner = inner
        self._leaving = ThreadPoolExecutor(max_workers=1)

    def send(self, tensor: Tensor) -> _Sent:
        """See Group."""
        here = host_memory(tensor.nbytes)
        here.copy_(tensor, non_blocking=True)
        mark = MACHINE.mark()

        def leave() -> None:
            mark.synchronize()
            self._inner.send(here).wait()

        return _Sent(self._leaving.submit(leave))

    def recv(self, tensor: Tensor) -> _Come:
        """See Group."""
        here = host_memory(tensor.nbytes)
        return _Come(tensor, here, self._inner.recv(here))

    def abort(self) -> None:
        """Nothing waits on the device."""


@dataclass(frozen=True)
class _Sent:
    left: Future[None]

    def wait(self) -> None:
        """See Work."""
        self.left.result()


@dataclass(frozen=True)
class _Come:
    into: Tensor
    here: Tensor
    work: Work

    def wait(self) -> None:
        """See Work."""
        self.work.wait()
        with MACHINE.on(_BESIDE):
            self.into.copy_(self.here, non_blocking=True)
            MACHINE.finish()


class Late(Queued):
    """The machine as a device of Holdfast."""

    def __init__(self) -> None:
        self.torch = torch.device(NAME, 0)
        super().__init__(compute=MACHINE.first, out=_OUT, back=_BACK, beside=_BESIDE)

    def settle(self) -> None:
        """What the host computes is repeatable; each process runs in an order of its own, or in the one it is told."""
        if not MACHINE.order:
            MACHINE.reset(int(os.environ.get("HOLDFAST_LATE_ORDER") or random.SystemRandom().randrange(1 << 32)))

    def seed(self, value: int) -> None:
        """Operations draw from the host's generator."""
        torch.default_generator.manual_seed(value)

    def memory(self, size: int) -> Tensor:
        """Of no numbers."""
        made = host_memory(size)
        made.fill_(0x5A)
        return made

    def pair(self, host: str) -> MakeGroup:
        """By gloo, from device to device."""
        inner = HOST.pair(host)
        return lambda store, rank, limit_s: _Works(inner(store, rank, limit_s))

    @property
    def _current(self) -> Stream:
        return MACHINE.current

    def _mark(self, stream: Any) -> Mark:
        return stream.record_event()

    def _on(self, stream: Any) -> AbstractContextManager[None]:
        return MACHINE.on(stream)

    def _hold(self, tensor: Tensor, stream: Any) -> None:
        MACHINE.hold(tensor, stream)

    def _timed(self) -> Mark:
        return MACHINE.mark(self._compute)

    def _between_s(self, first: Any, last: Any) -> float:
        return last.passed_at - first.passed_at

    @property
    def identity(self) -> str:
        """There is one."""
        return NAME


class _Backend:
    """What torch asks of the module of a device."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_rng_state(device: object = None) -> Tensor:
        """The host's generators are the device's."""
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The host's generators are the device's."""


def _empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> LateTensor:
    return _room(torch.empty(size, dtype=dtype, device="meta"))


def _empty_strided(size: Any, stride: Any, *, dtype: torch.dtype | None = None, **_: Any) -> LateTensor:
    return _room(torch.empty_strided(size, stride, dtype=dtype, device="meta"))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    return _copy(target, source, at_once=not non_blocking)


def _lowered(operation: Any) -> Callable[..., Any]:
    """Within autocast an operation is one of numbers of fewer bits."""
    within = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(within):
            return operation(
                *[each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point() else each for each in args],
                **kwargs,
            )

    return run


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())  # type: ignore[no-untyped-call]
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
_LIBRARY.impl("_to_copy", lambda source, **kwargs: _copied(source, kwargs), "PrivateUse1")
for _name in ("conv2d", "linear", "matmul"):
    _LIBRARY.impl(_name, _lowered(getattr(_ATEN, _name)), "AutocastPrivateUse1")
_OTHERS = torch.library.Library("_", "IMPL")
_OTHERS.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
