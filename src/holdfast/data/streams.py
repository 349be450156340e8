"""Samples that come one behind the other: every reader reads all of them, and keeps those that it needs.

A reader leaves *marks* behind, at most ``every`` samples apart if the stream has a state: from the newest one, whoever
reads in its stead reads on, such as a loader process in the place of one that died. A mark decides no sample, only how
many are read in vain: those behind it are compared with what came there the first time, and a mark that leads elsewhere
is dropped.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from holdfast.core.work import WorkPhase, working
from holdfast.data.marks import StreamMark
from holdfast.data.packing import bits_of
from holdfast.data.randomness import Draws, apart, seed_all
from holdfast.errors import ConfigError

__all__ = ["Stream"]

_COMPARED = 4
_FOLLOWING = 3
"""Samples behind a mark by which it is known again."""


class Stream:
    """All epochs of an iterable, read as one sequence of samples.

    Each epoch is read under a seed of its own, whatever is drawn between two samples, after ``set_epoch`` if the
    iterable has it. One with ``state_dict`` and ``load_state_dict`` is set back to where it was to be read anew.

    Args:
        source: what is read.
        seed: of all epochs.
        every: samples between two marks.
        tell: told where marks are of no use.

    Raises:
        ConfigError: it is read once and then gone, or has other samples when it is read again.
    """

    def __init__(self, source: Any, seed: int, every: int, tell: Callable[[str], None]) -> None:
        self._source, self._seed, self._every, self._tell = source, seed, every, tell
        self._stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        state = copy.deepcopy(source.state_dict()) if self._stateful else None
        self._beginning = StreamMark(place=0, epoch=0, epoch_from=0, state=state)
        self.length = _length_of(source)
        self._kept: deque[Any] = deque()
        self._first = 0  # the place of what is kept first
        self._epoch, self._epoch_from = 0, 0
        self._reader: Iterator[Any] | None = None
        self._draws: Draws | None = None
        self._marks: tuple[StreamMark, ...] = ()  # by their places
        self._left: tuple[StreamMark, list[bytes | None]] | None = None  # the newest one, and what has come behind it
        self._news: list[StreamMark] = []
        self._identity: str | None = None
        self._leads = self._stateful  # marks within an epoch are of use
        self._check()

    @property
    def name(self) -> str:
        """What kind of iterable it is."""
        return type(self._source).__name__

    def __len__(self) -> int:
        """Samples of an epoch, as far as that is known: 0 if not."""
        return self.length or 0

    def take(self, first: int, count: int, oldest: int) -> list[Any]:
        """Returns samples by their place; epochs are counted through.

        Args:
            first: place of the first one.
            count: how many.
            oldest: nothing before this place is likely to be asked for any more; it is read again if it is.

        Raises:
            ConfigError: an epoch has no samples, or not as many as the stream says.
            WorkFailed: the stream raised.
        """
        oldest = min(oldest, first)
        ahead = self._nearest(first).place > self._place <= oldest
        if self._reader is None or first < self._first or ahead:
            self._go_to(first)
        self.forget(oldest)
        missing = first + count - self._first - len(self._kept)
        if missing > 0:
            self._read(missing, oldest)
        begin = first - self._first
        return list(islice(self._kept, begin, begin + count))

    def forget(self, before: int) -> None:
        """Nothing before this place is likely to be asked for any more."""
        while self._kept and self._first < before:
            self._kept.popleft()
            self._first += 1
        behind = sum(each.place <= before for each in self._marks)
        self._marks = self._marks[max(0, behind - 1) :]

    # --- marks --------------------------------------------------------------------------------------------------------

    def hint(self, before: int) -> dict[str, Any] | None:
        """Returns the newest mark up to a place, in the form of JSON, for others; None: none is known."""
        known = [each for each in self._marks if each.place <= before]
        return next(iter(self._told(known[-1:])), None)

    def news(self) -> list[dict[str, Any]]:
        """Returns the marks that were made since it was asked for last."""
        news, self._news = self._news, []
        return self._told(news)

    def learn(self, told: Mapping[str, Any]) -> None:
        """Takes a mark that was told by whoever reads the same; one of another stream, or seed, is none of ours."""
        if self._identity is None:
            return
        if told.get("of") == self._identity:
            self._keep(StreamMark.read(told))
        else:
            self._tell(
                f"hf.steps: the stream {self.name}: the state is of one with other samples, length or seed; it is read "
                "from its beginning"
            )

    def _told(self, marks: Sequence[StreamMark]) -> list[dict[str, Any]]:
        if self._identity is None:
            return []
        try:
            return [{**each.told(f"hf.steps: the stream {self.name}"), "of": self._identity} for each in marks]
        except ConfigError as error:
            self._identity = None
            self._tell(f"{error}; whoever joins, or resumes, reads it from its beginning")
            return []

    def _keep(self, mark: StreamMark) -> None:
        others = [each for each in self._marks if each.place != mark.place]
        self._marks = tuple(sorted((*others, mark), key=lambda each: each.place))

    def _leave(self, draws: Draws | None) -> None:
        """Leaves a mark where the reader is; it is kept once a few samples behind it have come."""
        state = copy.deepcopy(self._source.state_dict()) if self._stateful else None
        mark = StreamMark(place=self._place, epoch=self._epoch, epoch_from=self._epoch_from, state=state, draws=draws)
        self._left = mark, []

    def _is_due(self) -> bool:
        if not self._leads or self._left is not None:
            return False
        last = max((each.place for each in self._marks if each.place <= self._place), default=0)
        return self._place - last >= self._every

    def _came(self, sample: Any) -> None:
        if self._left is None:
            return
        mark, following = self._left
        following.append(_bits(sample))
        if len(following) == _FOLLOWING:
            self._left = None
            if (digest := _digest(following)) is not None:
                sealed = replace(mark, following=digest)
                self._keep(sealed)
                self._news.append(sealed)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _nearest(self, place: int) -> StreamMark:
        """The last place up to this one from which it can be read."""
        found = [self._beginning, *(each for each in self._marks if each.place <= place)]
        if self.length and not self._stateful:
            epoch = place // self.length
            found.append(StreamMark(place=epoch * self.length, epoch=epoch, epoch_from=epoch * self.length))
        return max(found, key=lambda each: each.place)

    def _go_to(self, place: int) -> None:
        """Begins to read at the last place up to this one from which it leads to the samples that were there."""
        while not self._read_from(mark := self._nearest(place)):
            self._marks = tuple(each for each in self._marks if each is not mark)
            self._tell(
                f"hf.steps: the stream {self.name}: its state of sample {mark.place} leads to other samples than came "
                "there; it is read from an earlier place"
            )

    def _read_from(self, mark: StreamMark) -> bool:
        """Begins to read at a mark; returns whether that has led there."""
        self._kept.clear()
        self._left, self._first = None, mark.place
        self._epoch, self._epoch_from = mark.epoch, mark.epoch_from
        with apart():
            if mark.draws is None:
                self._set_back(mark)
                self._begin()
            else:
                with working(WorkPhase.LOADING):
                    self._set_epoch()
                    self._set_back(mark)
                    self._reader, self._draws = iter(self._source), mark.draws
        if mark.following is None:
            return True
        self._read(_FOLLOWING, 0)
        return _digest([_bits(each) for each in self._kept]) == mark.following

    def _set_back(self, mark: StreamMark) -> None:
        if self._stateful:
            with working(WorkPhase.LOADING):
                self._source.load_state_dict(copy.deepcopy(mark.state))

    def _set_epoch(self) -> None:
        if callable(getattr(self._source, "set_epoch", None)):
            self._source.set_epoch(self._epoch)

    def _begin(self) -> None:
        """Begins to read an epoch, and leaves the generators as they are then."""
        seed_all(self._seed, self._epoch)
        with working(WorkPhase.LOADING):
            self._set_epoch()
            self._reader = iter(self._source)
        self._draws = Draws.now()

    def _read(self, missing: int, oldest: int) -> None:
        with apart():
            assert self._draws is not None, "it has begun"
            self._draws.restore()
            for _ in range(missing):
                if self._is_due():
                    with working(WorkPhase.LOADING, item=self._place):
                        self._leave(Draws.now())
                self._kept.append(self._next())
                self._came(self._kept[-1])
                self.forget(oldest)
            self._draws = Draws.now()

    def _next(self) -> Any:
        for _ in range(2):
            assert self._reader is not None, "it has begun"
            with working(WorkPhase.LOADING, item=self._place):
                try:
                    return next(self._reader)
                except StopIteration:
                    pass
            self._end_epoch()
        raise ConfigError(f"hf.steps: the stream {self.name} is empty in epoch {self._epoch}")

    @property
    def _place(self) -> int:
        return self._first + len(self._kept)

    def _end_epoch(self) -> None:
        found = self._place - self._epoch_from
        if self.length is not None and found != self.length:
            raise ConfigError(
                f"hf.steps: the stream {self.name} has a length of {self.length}, and {found} samples came in epoch "
                f"{self._epoch}"
            )
        self._epoch, self._epoch_from = self._epoch + 1, self._place
        if self._stateful or self.length is None:
            with working(WorkPhase.LOADING, item=self._place):
                self._leave(None)
        self._begin()

    # --- what it is ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if isinstance(self._source, Iterator):
            raise ConfigError(
                f"hf.steps: a {self.name} can be read once only, and what a lost worker has read is read again; "
                "expected an object whose __iter__ begins anew"
            )
        if self.length == 0:
            raise ConfigError("hf.steps: the dataset is empty")
        first, again = ([_bits(each) for each in self._try(_COMPARED)] for _ in range(2))
        if first != again:
            raise ConfigError(
                f"hf.steps: the stream {self.name} has other samples when it is read again under the same seed; "
                "expected one that draws from torch, numpy or random alone (webdataset: shuffle(1000, rng=random)), or "
                "that set_epoch(epoch) seeds, or with state_dict and load_state_dict"
            )
        digest = _digest(first)
        if digest is not None:
            self._identity = hashlib.sha256(f"{self._seed} {self.length} {digest}".encode()).hexdigest()
        elif self._stateful or self.length is None:
            self._tell(
                f"hf.steps: the stream {self.name}: its samples cannot be compared, so whoever joins, or resumes, "
                "reads it from its beginning"
            )
        if self._leads:
            self._try_mark()
        self._reader, self._first = None, 0  # what it has opened must not be shared with a process that is forked
        self._kept.clear()
        self._marks, self._left = (), None
        self._news.clear()

    def _try(self, count: int) -> list[Any]:
        self._go_to(0)
        return self.take(0, min(count, self.length or count), 0)

    def _try_mark(self) -> None:
        """Whether its state in the middle of an epoch leads to what came there, and can be told."""
        self._try(_COMPARED - _FOLLOWING)
        with apart():
            self._leave(self._draws)
        self.take(0, min(_COMPARED, self.length or _COMPARED), 0)
        if not self._news:
            self._leads = False
            return
        mark = self._news[-1]
        self._leads = self._read_from(mark)
        if not self._leads:
            self._tell(
                f"hf.steps: the stream {self.name}: its state_dict in the middle of an epoch leads to other samples "
                "than came there; whoever joins, or resumes, reads the epoch from its start"
            )
        self._told([mark])


def _length_of(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def _bits(sample: Any) -> bytes | None:
    try:
        return bits_of(sample)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None  # it can be read, but not compared


def _digest(samples: Sequence[bytes | None]) -> str | None:
    """A digest of what samples are; None if one of them cannot be compared."""
    digest = hashlib.sha256()
    for each in samples:
        if each is None:
            return None
        digest.update(hashlib.sha256(each).digest())
    return digest.hexdigest()
