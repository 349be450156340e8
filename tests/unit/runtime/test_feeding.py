"""Loader processes: the same batches as without, whatever is guessed, and whoever dies."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from tests.processes import lives
from tests.waiting import LIMIT_S, until

from holdfast.data.feeds import Feed, Indexed
from holdfast.data.orders import shuffled
from holdfast.data.wanted import Wanted, feed_of
from holdfast.errors import ConfigError, WorkFailed
from holdfast.runtime.loop.feeding import Feeding

MICROBATCHES = 6


class Noisy:
    """Draws from all generators, and does worse if it is told to."""

    scale = 1.0

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if self.folder is not None and (self.folder / f"die-{index}").exists():
            os._exit(7)
        if self.folder is not None and (self.folder / "close").exists():
            (self.folder / "close").unlink()
            os.closerange(3, 1024)
            signal.pause()
        if self.folder is not None and (self.folder / f"raise-{index}").exists():
            raise ValueError(f"sample {index} is not to my taste")
        if self.folder is not None:
            (self.folder / f"{os.getpid()}-{index}-{time.monotonic_ns()}.read").touch()
        return index, torch.randn(3), random.random(), np.random.rand()


def feeding(dataset, loaders, steps=6, **options):
    feed = Feed(source=Indexed(dataset, shuffled(3, 48, 2)), num_samples=2, loaders=loaders, **options)
    loop = SimpleNamespace(feed=feed, seed=3, microbatches=MICROBATCHES, steps=steps)
    return closing(Feeding(loop, "0.0"))


def drawn():
    return torch.rand(2), random.random(), np.random.rand()


def all_of(fed, items):
    return [(fed.load(*item), drawn()) for item in items]


EVERYTHING = [(step, number) for step in range(6) for number in range(MICROBATCHES)]
SHARES = {
    "all": EVERYTHING,
    "some": [(step, number) for step in range(6) for number in (2, 3)],
    "another one from step 3 on": [(s, n) for s in range(6) for n in ((0, 1) if s < 3 else (4, 2, 5))],
    "more in step 3": [(s, n) for s in range(6) for n in ((4, 5) if s != 3 else (4, 5, 0, 1))],
    "nothing in between": [(s, n) for s in (0, 1, 4, 5) for n in (1, 2)],
    "the step before once more": [(0, 0), (0, 1), (1, 0), (0, 4), (1, 1), (2, 0), (2, 1)],
}


@pytest.mark.parametrize("share", SHARES)
def test_batches_and_what_is_drawn_behind_them_are_those_of_loading_in_place(share):
    with feeding(Noisy(), 0) as place:
        expected = all_of(place, SHARES[share])
    with feeding(Noisy(), 2) as ahead:
        found = all_of(ahead, SHARES[share])
    assert str(found) == str(expected)


def test_what_a_batch_draws_is_not_what_its_item_draws():
    with feeding(Noisy(), 0) as fed:
        batch = fed.load(0, 0)
        assert batch[1][0][:2].tolist() != torch.randn(2).tolist()


def test_loading_runs_ahead_in_other_processes(tmp_path):
    with feeding(Noisy(tmp_path), 2, prefetch=3) as fed:
        first = fed.load(0, 0)[0].tolist()
        until(lambda: len(list(tmp_path.glob("*.read"))) >= 2 * 6)  # nobody else asks meanwhile
        reads = [path.name.split("-") for path in tmp_path.glob("*.read")]
        assert len(reads) == 2 * 6, "2 processes, 3 items each, 2 samples each"
        assert {int(pid) for pid, *_ in reads} == set(fed.pids)
        assert os.getpid() not in fed.pids
        assert set(first) < {int(index) for _, index, _ in reads}


def test_a_process_that_is_killed_costs_its_batch_alone(capfd):
    with feeding(Noisy(), 0) as place:
        expected = all_of(place, EVERYTHING)
    with feeding(Noisy(), 2) as fed:
        found, struck = [], set()
        for item in EVERYTHING:
            found += all_of(fed, [item])
            if item[0] in (1, 3) and item[1] == 2:
                struck.add(fed.pids[0])
                os.kill(fed.pids[0], signal.SIGKILL)
        assert not struck & set(fed.pids)
    assert str(found) == str(expected)
    assert len(struck) == 2
    assert capfd.readouterr().err.count("has ended by signal 9") == 2


def test_the_death_of_what_forks_them_costs_no_more(capfd):
    with feeding(Noisy(), 0) as place:
        expected = all_of(place, EVERYTHING)
    with feeding(Noisy(), 2) as fed:
        found = all_of(fed, EVERYTHING[:8])
        nursery = psutil.Process(fed.pids[0]).parent()
        assert nursery is not None
        assert nursery.ppid() == os.getpid()
        before, loaders = psutil.Process().children(), [psutil.Process(pid) for pid in fed.pids]
        nursery.kill()
        until(lambda: not any(map(lives, loaders)), "their end, with what had forked them")
        found += all_of(fed, EVERYTHING[8:])
        assert len(set(psutil.Process().children()) - set(before)) == 1, "another one, and only one"
    assert str(found) == str(expected)
    assert "has ended with what had forked it" in capfd.readouterr().err


def test_a_process_that_cannot_be_heard_any_more_is_ended(tmp_path, capfd):
    with feeding(Noisy(), 0) as place:
        expected = all_of(place, EVERYTHING[:6])
    (tmp_path / "close").touch()
    with feeding(Noisy(tmp_path), 2) as fed:
        found = all_of(fed, EVERYTHING[:6])
    assert str(found) == str(expected)
    assert capfd.readouterr().err.count("has ended by signal 9; item") == 1


def test_whoever_dies_three_times_over_one_item_is_an_error_that_names_it(tmp_path, capfd):
    dataset = Noisy(tmp_path)
    with feeding(dataset, 2) as fed:
        asked = fed._asked(1, 4)
        (tmp_path / f"die-{asked[1]}").touch()
        all_of(fed, EVERYTHING[:10])
        with pytest.raises(WorkFailed) as caught:
            fed.load(1, 4)
    text = f"exit code 7, the third one over item 4 of step 1, samples {asked[0]}, {asked[1]}"
    assert text in str(caught.value)
    assert caught.value.phase == "loading"
    assert capfd.readouterr().err.count("item 4 of step 1 is loaded again") == 2


def test_an_exception_comes_out_with_its_traceback(tmp_path):
    with feeding(Noisy(tmp_path), 2) as fed:
        asked = fed._asked(1, 4)
        (tmp_path / f"raise-{asked[1]}").touch()
        all_of(fed, EVERYTHING[:10])  # it was raised meanwhile, perhaps, and nobody has asked for it
        with pytest.raises(WorkFailed, match=f"loading of item {asked[1]}: ValueError: sample {asked[1]}") as caught:
            fed.load(1, 4)
    trace = str(caught.value.__cause__.__cause__)
    assert "test_feeding.py" in trace
    assert "__getitem__" in trace


@pytest.mark.parametrize(
    ("collate", "error", "text"),
    [
        (lambda samples: lambda: samples, ConfigError, "collate: what it returns cannot be handed over"),
        (lambda samples: 1 / 0, Exception, "division by zero"),
    ],
)
def test_what_goes_wrong_in_collate_is_told(collate, error, text):
    with feeding(Noisy(), 1, collate=collate) as fed, pytest.raises(error, match=text):
        fed.load(0, 0)


def test_they_end_with_whoever_has_them():
    with feeding(Noisy(), 2) as fed:
        fed.load(0, 0)
        processes = [psutil.Process(pid) for pid in fed.pids]
        processes.append(processes[0].parent())
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert not alive


def test_they_end_with_a_process_that_is_killed():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with feeding(Noisy(), 2) as fed:
                fed.load(0, 0)
                os.write(writer, " ".join(map(str, fed.pids)).encode())
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    processes = [psutil.Process(int(each)) for each in os.read(reader, 100).split()]
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert len(processes) == 2
    assert not alive


def test_signals_to_the_whole_group_do_not_end_them():
    with feeding(Noisy(), 1) as fed:
        fed.load(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(fed.pids[0], number)
        before = fed.pids
        all_of(fed, EVERYTHING[1:])
        assert fed.pids == before


def test_a_dataset_that_is_changed_while_processes_load_it_is_refused():
    """They have it as it was when they were forked: the change would never be seen."""
    for loaders in (0, 2):
        noisy = Noisy()
        with feeding(noisy, loaders) as fed:
            fed.check_unchanged()
            noisy.scale = 0.5
            if loaders:
                with pytest.raises(ConfigError, match=r"Noisy\.scale was changed from 1\.0 to 0\.5.*workers=0"):
                    fed.check_unchanged()
            else:
                fed.check_unchanged()


def test_each_starts_by_what_the_user_says(tmp_path):
    def start(number):
        (tmp_path / f"start-{number}-{os.getpid()}").touch()

    with feeding(Noisy(), 2, on_start=start) as fed:
        all_of(fed, EVERYTHING[:8])
        assert {path.name for path in tmp_path.iterdir()} == {f"start-{n}-{pid}" for n, pid in enumerate(fed.pids)}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ((place, random.random()) for place in range(20))


def test_a_stream_is_the_same_read_ahead():
    texts = []
    for loaders in (0, 1):
        feed = feed_of(Wanted(dataset=Stream(), size=3, seed=3, loaders=loaders), pytest.fail)
        with closing(Feeding(SimpleNamespace(feed=feed, seed=3, microbatches=6, steps=6), "0.0")) as fed:
            texts.append(str([all_of(fed, items) for items in SHARES.values()]))
    assert texts[0] == texts[1]
