"""The batch of each item that runs, made where it runs, or ahead by processes that guess what will."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from operator import itemgetter
from typing import Any

from holdfast.data.feeds import Asked
from holdfast.data.randomness import seed_all
from holdfast.devices.device import HOST, Device
from holdfast.errors import ConfigError
from holdfast.runtime.loop.hosting import Loop
from holdfast.runtime.loop.loaders import Key, Loaders
from holdfast.runtime.loop.moving import mover

__all__ = ["Feeding", "sampling"]


class Feeding:
    """Gives a worker the batches of its items.

    The guess is that it runs the numbers that it had in the step before, in that order. A wrong one costs time: what
    was not guessed is loaded once it is asked for, and what was guessed in vain is dropped when its step is over.

    Args:
        loop: whose items they are.
        worker: who this is, for messages.
        device: that computes with the batches.
    """

    def __init__(self, loop: Loop, worker: str = "", device: Device = HOST) -> None:
        self._loop = loop
        self._move = mover(loop.feed, device)
        self._moved: dict[Key, Any] = {}  # ahead
        self._step = 0
        self._ran: list[int] = []  # in this step
        self._share: tuple[int, ...] = ()  # of the last step with items of ours
        self._worker = worker
        self._loaders = Loaders(loop.feed, loop.seed, self._tell) if loop.feed.loaders else None
        self._settings = self._settings_now()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that load ahead."""
        return () if self._loaders is None else self._loaders.pids

    def load(self, step: int, number: int) -> Any:
        """Returns the batch of an item, and seeds all generators for its computation, however much loading has drawn.

        Args:
            step: as the loop counts.
            number: of the item in it.

        Raises:
            WorkFailed: a sample cannot be loaded.
            Exception: whatever else the user's code raised.
        """
        self._go_to(step)
        asked = self._asked(step, number)
        if self._loaders is None:
            batch = self._loop.feed.make(asked, self._loop.seed, step, number)
        else:
            batch = self._taken(self._loaders, (step, number), asked)
        if self._move is not None:
            batch = self._placed(self._move, (step, number), batch)
        seed_all(self._loop.seed, step, number)
        return batch

    def check_unchanged(self) -> None:
        """Checks that the dataset is as the processes that load have it: they were forked when the loop began.

        Raises:
            ConfigError: one of its settings is another now; it names it.
        """
        if self._loaders is None:
            return
        kind, now = type(self._loop.feed.dataset), self._settings_now()
        before = {name: self._settings.get(name, getattr(kind, name, now[name])) for name in now}
        if changed := [name for name in now if now[name] != before[name]]:
            name = changed[0]
            raise ConfigError(
                f"{kind.__name__}.{name} was changed from {before[name]!r} to {now[name]!r} "
                "between two steps, and the processes that load its samples have it as it was when the loop began; "
                "expected hf.steps(..., workers=0), or num_workers=0 in the DataLoader, or what changes made of the "
                "sample's number"
            )

    def _settings_now(self) -> dict[str, object]:
        """What the dataset has of plain values, for others to set."""
        held = getattr(self._loop.feed.dataset, "__dict__", {}).items()
        return {name: v for name, v in held if not name.startswith("_") and isinstance(v, bool | int | float | str)}

    def close(self) -> None:
        """Ends the processes."""
        if self._loaders is not None:
            self._loaders.close()

    def _taken(self, loaders: Loaders, key: Key, asked: Asked) -> Any:
        self._ran.append(key[1])
        loaders.ask(key, asked)
        loaders.collect()
        for likely in self._likely():
            if loaders.room <= 0:
                break
            if not loaders.knows(likely):
                loaders.ask(likely, self._asked(*likely))
        return loaders.take(key)

    def _placed(self, move: Callable[[Any], Any], key: Key, batch: Any) -> Any:
        """A batch where it is computed with, to which the next one is copied meanwhile, if it is loaded."""
        batch = self._moved.pop(key) if key in self._moved else move(batch)
        if self._loaders is not None:
            for following in itertools.islice(self._likely(), 1):
                if following not in self._moved and (loaded := self._loaders.made(following)) is not None:
                    self._moved[following] = move(loaded)
        return batch

    def _go_to(self, step: int) -> None:
        if step == self._step:
            return
        self._step = step
        self._share, self._ran = tuple(self._ran) or self._share, []
        self._moved = {key: batch for key, batch in self._moved.items() if key[0] >= step}
        if self._loaders is not None:
            self._loaders.forget(step)

    def _asked(self, step: int, number: int) -> Asked:
        each = self._loop.microbatches
        return self._loop.feed.source.ask(step * each + number, max(0, self._step - 1) * each)

    def _likely(self) -> Iterator[Key]:
        """The items that will probably be asked for, the first ones first."""
        numbers = self._share or range(self._ran[0], self._loop.microbatches)  # a worker's numbers are neighbours
        yield from ((self._step, number) for number in numbers if number not in self._ran)
        for step in range(self._step + 1, self._loop.steps):
            yield from ((step, number) for number in self._share)

    def _tell(self, text: str) -> None:
        _say(f"worker {self._worker}: {text}")


@contextmanager
def sampling(loop: Loop) -> Iterator[Callable[[int], Any]]:
    """Yields what returns one sample by its number, with all generators seeded alike each time.

    Where the script prepares its loader processes, one of these loads it: there may be no samples without that.
    """
    feed = loop.feed
    if not feed.loaders or feed.on_start is None:

        def read(index: int) -> Any:
            seed_all(index)
            return feed.dataset[index]

        yield read
        return
    one = replace(feed, loaders=1, collate=itemgetter(0))
    with closing(Loaders(one, loop.seed, _say)) as loaders:

        def have_read(index: int) -> Any:
            loaders.ask((0, index), (index,))
            return loaders.take((0, index))

        yield have_read


def _say(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)
