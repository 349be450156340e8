"""Processes of one worker that make the batches of items, before they are needed."""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.core.work import WorkPhase
from holdfast.data.feeds import Asked, Feed
from holdfast.data.packing import receive, send
from holdfast.errors import ConfigError, WorkFailed
from holdfast.runtime.loop.nursery import Nursery

__all__ = ["Key", "Loaders"]

Key = tuple[int, int]
"""An item: its step as the loop counts, and its number in it."""
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raised:
    """What a process tells of an exception in somebody else's code.

    Attributes:
        kind: its class.
        text: what it says.
        trace: where it was raised, for people.
        is_config: whether it is an error of ours that a user can mend.
        item: the sample that was loaded, if one was.
        loading: whether samples were loaded: then it is told as such.
    """

    kind: str
    text: str
    trace: str = ""
    is_config: bool = False
    item: int | None = None
    loading: bool = False

    @classmethod
    def of(cls, error: BaseException) -> _Raised:
        """Returns what is told of it."""
        cause = error.__cause__ if isinstance(error, WorkFailed) and error.__cause__ is not None else error
        return cls(
            kind=type(cause).__name__,
            text=str(cause),
            trace="".join(traceback.format_exception(cause)),
            is_config=isinstance(cause, ConfigError),
            item=error.item if isinstance(error, WorkFailed) else None,
            loading=isinstance(error, WorkFailed),
        )

    def error(self) -> Exception:
        """Returns it, as it would have been raised in this process."""
        there = _InLoader(self.trace) if self.trace else None
        if self.is_config:
            ours = ConfigError(self.text)
            ours.__cause__ = there
            return ours
        theirs: Exception = type(self.kind, (Exception,), {"__module__": "builtins"})(self.text)
        theirs.__cause__ = there
        if not self.loading:
            return theirs
        failed = WorkFailed(WorkPhase.LOADING, theirs, item=self.item)
        failed.__cause__ = theirs
        return failed


class _InLoader(Exception):
    """The traceback of a loader process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(slots=True)
class _Loader:
    """One process, and the items that it has been asked for, in that order."""

    number: int
    pid: int
    link: socket.socket
    due: deque[Key] = field(default_factory=deque)
    is_new: bool = True
    """Whether it knows nothing of what others have read of a stream."""


class Loaders:
    """The processes; they are forked when the first item is asked for.

    Args:
        feed: what they make.
        seed: of the job.
        tell: told when one of them died.
    """

    def __init__(self, feed: Feed, seed: int, tell: Callable[[str], None]) -> None:
        self._feed, self._tell = feed, tell
        self._nursery = Nursery(lambda link, number: _serve(feed, seed, link, number))
        self._nursery.start()
        self._loaders: list[_Loader] = []
        self._asked: dict[Key, Asked] = {}
        self._ready: dict[Key, Any] = {}
        self._deaths: Counter[Key] = Counter()
        self._oldest = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that load."""
        return tuple(each.pid for each in self._loaders)

    @property
    def room(self) -> int:
        """How many more items may be asked for ahead."""
        return self._feed.loaders * self._feed.prefetch - len(self._asked) - len(self._ready)

    def knows(self, key: Key) -> bool:
        """Whether an item was asked for, and not taken yet."""
        return key in self._asked or key in self._ready

    def ask(self, key: Key, asked: Asked) -> None:
        """Has an item made, unless it is known."""
        if self.knows(key):
            return
        if not self._loaders:
            self._loaders = [_Loader(number, *self._nursery.spawn(number)) for number in range(self._feed.loaders)]
        self._asked[key] = asked
        self._send(min(self._loaders, key=lambda each: len(each.due)), key)

    def take(self, key: Key) -> Any:
        """Returns the batch of an item that was asked for; waits for it.

        Raises:
            WorkFailed: a sample cannot be loaded, or each process that loaded it died.
            Exception: whatever was raised elsewhere in the user's code.
        """
        while key not in self._ready:
            self.collect(None)
        found = self._ready.pop(key)
        self._deaths.pop(key, None)
        if isinstance(found, _Raised):
            raise found.error()
        return found

    def made(self, key: Key) -> Any:
        """Returns the batch of an item if it is here, which stays to be taken; None if it is not, or was not made."""
        found = self._ready.get(key)
        return None if isinstance(found, _Raised) else found

    def forget(self, before: int) -> None:
        """Nobody will take items of steps before this one."""
        self._oldest = before
        self._ready = {key: value for key, value in self._ready.items() if key[0] >= before}

    def collect(self, limit_ms: int | None = 0) -> None:
        """Takes in what is made; waits for something if ``limit_ms`` is None."""
        poll = select.poll()
        by_descriptor = {each.link.fileno(): each for each in self._loaders}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(limit_ms):
            self._receive(by_descriptor[descriptor])

    def close(self) -> None:
        """Has all processes end."""
        for each in self._loaders:
            each.link.close()
        self._loaders.clear()
        self._nursery.close()

    def _receive(self, loader: _Loader) -> None:
        try:
            key, found, news = receive(loader.link)
        except EOFError:
            self._replace(loader)
            return
        if (streamed := self._feed.streamed) is not None:
            for each in news:
                streamed.stream.learn(each)
        loader.due.remove(key)
        del self._asked[key]
        if key[0] >= self._oldest:
            self._ready[key] = found

    def _send(self, loader: _Loader, key: Key) -> None:
        link = loader.link
        loader.due.append(key)
        while loader.link is link:  # one that replaces it is asked for all that is due
            try:
                send(link, (key, self._asked[key], self._hint(loader, key)), socket.MSG_DONTWAIT)
                loader.is_new = False
                break
            except BlockingIOError:
                self.collect(None)
            except ConnectionError:
                self._replace(loader)

    def _hint(self, loader: _Loader, key: Key) -> dict[str, Any] | None:
        streamed = self._feed.streamed
        return streamed.stream.hint(self._asked[key][0]) if streamed is not None and loader.is_new else None

    def _replace(self, loader: _Loader) -> None:
        loader.link.close()
        due = [key for key in loader.due if key[0] >= self._oldest]
        for key in set(loader.due).difference(due):
            del self._asked[key]
        text = f"a loader process ({loader.pid}) has ended {self._nursery.ended(loader.pid)}"
        if due:
            self._deaths[due[0]] += 1
            if self._deaths[due[0]] >= _TRIES:
                self._give_up(due.pop(0), text)
            else:
                text += f"; item {due[0][1]} of step {due[0][0]} is loaded again"
        self._tell(text)
        loader.pid, loader.link = self._nursery.spawn(loader.number)
        loader.due.clear()
        loader.is_new = True
        for key in due:
            self._send(loader, key)

    def _give_up(self, key: Key, text: str) -> None:
        asked = self._asked.pop(key)
        samples = self._feed.source.told(asked)
        text = f"{text}, the third one over item {key[1]} of step {key[0]}, {samples}"
        self._ready[key] = _Raised(kind="LoaderDied", text=text, loading=True)


def _serve(feed: Feed, seed: int, link: socket.socket, number: int) -> None:
    """Makes what it is asked for, until nobody asks any more."""
    torch.set_num_threads(1)
    start = feed.on_start
    stream = None if feed.streamed is None else feed.streamed.stream
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            key, asked, hint = receive(link)
            try:
                if hint is not None and stream is not None:
                    stream.learn(hint)
                if start is not None:
                    start(number)
                    start = None
                answer = feed.make(asked, seed, *key)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - nobody can know what somebody else's code raises
                answer = _Raised.of(error)
            sys.stdout.flush()
            _answer(link, key, answer, [] if stream is None else stream.news())


def _answer(link: socket.socket, key: Key, answer: Any, news: Sequence[Mapping[str, Any]]) -> None:
    try:
        send(link, (key, answer, news))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        text = (
            f"hf.steps: collate: what it returns cannot be handed over by another process: {error}; expected tensors, "
            "arrays and plain values, or workers=0"
        )
        send(link, (key, _Raised(kind="ConfigError", text=text, is_config=True), news))
