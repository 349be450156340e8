"""The order of samples: a function of seed and epoch, whoever says it."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from holdfast.data import randomness
from holdfast.data.feeds import Feed
from holdfast.data.orders import grouped_by_length, in_sequence, sampled, shuffled, weighted
from holdfast.data.sampler import sample_indices
from holdfast.data.wanted import Wanted, feed_of
from holdfast.errors import ConfigError

DATA = TensorDataset(torch.arange(50))


def feed(tell=pytest.fail, **options) -> Feed:
    return feed_of(Wanted(**{"dataset": DATA, "seed": 3, **options}), tell)


def samples(found: Feed, items: int) -> list[int]:
    return [index for item in range(items) for index in found.source.ask(item, 0)]


def test_the_shuffle_is_that_of_jobs():
    order = shuffled(3, 50, 4)
    for item in range(30):
        assert list(order.item(item)) == sample_indices(3, *divmod(item, 6), 6, 4, 50)


def test_each_sample_comes_once_per_epoch():
    lengths = [random.Random(7).randrange(1, 100) for _ in range(50)]
    subset = SubsetRandomSampler(range(50))
    for order in (
        shuffled(3, 50, 5),
        in_sequence(50, 5),
        grouped_by_length(3, lengths, 50, 5),
        sampled(3, subset, 50, 5),
    ):
        epochs = [[index for item in range(10 * e, 10 * e + 10) for index in order.item(item)] for e in range(3)]
        assert all(Counter(epoch) == Counter(range(50)) for epoch in epochs)
        if order.item(0) != (0, 1, 2, 3, 4):
            assert epochs[0] != epochs[1] != epochs[2]


def test_what_does_not_fill_an_item_is_an_item_of_its_own_where_lengths_are_grouped():
    order = grouped_by_length(3, lambda index: index, 23, 5)
    assert order.length == 5
    assert sorted(len(order.item(item)) for item in range(5)) == [3, 5, 5, 5, 5]
    assert sorted(index for item in range(5, 10) for index in order.item(item)) == list(range(23))


def test_samples_of_like_length_share_an_item():
    lengths = [index % 10 for index in range(100)]
    order = grouped_by_length(3, torch.tensor(lengths), 100, 10)
    for item in range(20):
        assert len({lengths[index] for index in order.item(item)}) == 1


def test_weights_say_how_often_a_sample_is_drawn():
    order = weighted(3, [0, 1, 0, 3, 0, 0], 6, 1)
    drawn = Counter(index for item in range(6000) for index in order.item(item))
    assert set(drawn) == {1, 3}
    assert 2.7 < drawn[3] / drawn[1] < 3.3
    assert order.item(9) == weighted(3, np.array([0, 1, 0, 3, 0, 0]), 6, 1).item(9)


@pytest.mark.parametrize("weights", [[1.0] * 49, [0.0] * 50, [-1.0] + [1.0] * 49, [float("nan")] * 50, ["a"] * 50])
def test_weights_that_say_nothing_are_refused(weights):
    with pytest.raises(ConfigError, match="weights: expected"):
        feed(size=4, weights=weights)


def test_an_item_larger_than_the_dataset_is_refused():
    feed(size=50)
    for options in ({}, {"shuffle": False}, {"weights": [1.0] * 50}, {"group_by_length": [1] * 50}):
        with pytest.raises(ConfigError, match="an item of 51 samples is larger than the dataset, which has 50"):
            feed(size=51, **options)


class Own(Sampler):
    """A user's sampler: draws from torch, numpy and random, and knows its epoch."""

    def __init__(self, count=20):
        self.count, self.epoch = count, -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield self.epoch
        yield random.randrange(50)
        yield int(np.random.randint(50))
        for _ in range(self.count - 3):
            yield torch.randint(50, ())


def test_a_samplers_order_depends_on_seed_and_epoch_alone():
    order, again = sampled(3, Own(), 50, 5), sampled(3, Own(), 50, 5)
    torch.rand(7)
    assert again.item(8) == order.item(8), "epoch 2, though nobody has read epoch 1"
    assert [order.item(4 * epoch)[0] for epoch in range(6)] == list(range(6))
    assert order.item(1) != order.item(5) != sampled(4, Own(), 50, 5).item(5)


def test_reading_a_sampler_draws_nothing():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    sampled(3, Own(), 50, 5).item(9)
    assert expected == (torch.rand(1), random.random(), np.random.rand())


class Counting(Sampler):
    def __init__(self):
        self.times = 0

    def __iter__(self):
        self.times += 1
        return iter([(self.times + index) % 50 for index in range(50)])


class Growing(Own):
    def __iter__(self):
        return iter(range(20 + self.epoch // 5))


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0


class Words(Sampler):
    def __iter__(self):
        return iter(["a", "b"])


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        (Counting(), "Counting gives another order when it is read again"),
        (Endless(), "Endless does not come to an end"),
        (Words(), "Words gives a str; expected numbers"),
        (SubsetRandomSampler([]), "SubsetRandomSampler gives nothing"),
    ],
)
def test_a_sampler_that_says_no_order_is_refused(sampler, text):
    with pytest.raises(ConfigError, match=text):
        feed(size=2, sampler=sampler)


def test_a_sampler_of_which_epochs_differ_in_length_is_refused():
    order = sampled(3, Growing(), 50, 5)
    order.item(4 * 4)
    with pytest.raises(ConfigError, match="Growing gives 21 in epoch 5, and 20 in epoch 0"):
        order.item(4 * 5)


# --- DataLoader -------------------------------------------------------------------------------------------------------


def test_a_dataloader_says_it_all():
    def collate(batch):
        return batch

    started = []

    def start(number):
        info = get_worker_info()
        started.append((number, info.id, info.num_workers, info.dataset is DATA))

    loader = DataLoader(
        DATA, batch_size=4, shuffle=True, num_workers=2, prefetch_factor=3, collate_fn=collate, worker_init_fn=start
    )
    found = feed(dataset=loader)
    assert (found.num_samples, found.loaders, found.prefetch) == (4, 2, 3)
    assert (found.collate, found.dataset) == (collate, DATA)
    found.on_start(1)
    assert started == [(1, 1, 2, True)], "it finds the dataset of its process"
    assert get_worker_info() is None, "samples do not: none depends on who loads it"
    assert samples(found, 9) == samples(feed(size=4), 9)
    other = feed(dataset=loader, size=5, loaders=0, prefetch=1)
    assert (other.num_samples, other.loaders, other.prefetch) == (5, 0, 1)


def test_a_dataloaders_order():
    weights = [float(index % 3) for index in range(50)]
    for loader, expected in (
        (DataLoader(DATA, batch_size=4), {"shuffle": False}),
        (DataLoader(DATA, batch_size=4, sampler=SequentialSampler(DATA)), {"shuffle": False}),
        (DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA)), {"shuffle": True}),
        (DataLoader(DATA, batch_size=4, sampler=Own()), {"sampler": Own()}),
        (
            DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler(weights, 30)),
            {"sampler": WeightedRandomSampler(weights, 30)},
        ),
    ):
        assert samples(feed(dataset=loader), 30) == samples(feed(size=4, **expected), 30)


def test_a_generator_of_a_dataloader_is_the_seed_of_its_order():
    loaders = [
        DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))
        for seed in (5, 5, 6)
    ]
    one, same, other = (samples(feed(dataset=loader), 9) for loader in loaders)
    assert one == same != other
    assert one != samples(feed(size=4), 9)


def test_drop_last_leaves_the_rest_of_each_epoch_out():
    kept, dropped = (feed(dataset=DataLoader(DATA, batch_size=8, drop_last=drop)) for drop in (False, True))
    assert samples(kept, 7)[-8:] == [48, 49, 0, 1, 2, 3, 4, 5]
    assert samples(dropped, 7)[-8:] == list(range(8))
    assert dropped.source.length == 48


class Batches(Sampler):
    """A user's batch sampler: batches of 3, 2 and 1."""

    def __iter__(self):
        order = torch.randperm(6).tolist()
        yield from (order[:3], order[3:5], order[5:])


def test_a_users_batch_sampler_makes_the_items():
    found = feed(dataset=DataLoader(DATA, batch_sampler=Batches()))
    assert [len(found.source.ask(item, 0)) for item in range(6)] == [3, 2, 1, 3, 2, 1]
    assert sorted(samples(found, 3)) == list(range(6))
    assert (found.source.length, found.source.size, found.num_samples) == (3, 1, 3)
    with pytest.raises(ConfigError, match="Batches makes the batches by itself; leave size out"):
        feed(dataset=DataLoader(DATA, batch_sampler=Batches()), size=4)


def test_a_batch_sampler_of_torch_is_read_as_its_settings():
    batches = BatchSampler(RandomSampler(DATA), 8, drop_last=True)
    found = feed(dataset=DataLoader(DATA, batch_sampler=batches))
    assert samples(found, 6) == samples(feed(dataset=DataLoader(DATA, 8, shuffle=True, drop_last=True)), 6)
    assert samples(found, 6) == samples(feed(sampler=batches), 6)


def test_without_batches_each_sample_is_one():
    found = feed(dataset=DataLoader(DATA, batch_size=None))
    assert found.source.ask(7, 0) == (7,)
    assert found.make((7,), 3, 0, 7) == [torch.tensor(7)]


def test_a_distributed_sampler_is_replaced_and_that_is_told():
    told = []
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1)
    found = feed(told.append, dataset=DataLoader(DATA, batch_size=4, sampler=sampler))
    assert samples(found, 25) == samples(feed(size=4), 25)
    assert len(told) == 1
    assert "DistributedSampler is replaced" in told[0]

    assert samples(feed(told.append, size=4, sampler=sampler), 25) == samples(feed(size=4), 25)
    assert len(told) == 2


class Theirs(DistributedSampler):
    pass


class TheirBatches(BatchSampler):
    pass


def test_what_is_made_of_a_distributed_sampler_is_refused():
    ranked, plain = (kind(DATA, num_replicas=2, rank=1) for kind in (Theirs, DistributedSampler))
    for loader, name in (
        (DataLoader(DATA, batch_size=4, sampler=ranked), "Theirs"),
        (DataLoader(DATA, batch_sampler=TheirBatches(plain, 4, False)), "TheirBatches"),
    ):
        with pytest.raises(ConfigError, match=f"{name} gives each rank its own samples"):
            feed(dataset=loader)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "size: expected the samples of an item"),
        ({"size": 2, "shuffle": True, "weights": [1.0] * 50}, "expected one order, got weights and shuffle"),
        ({"size": 2, "loaders": -1}, "workers: expected a whole number from 0, got -1"),
        ({"size": 2, "group_by_length": [1, 2]}, "group_by_length: expected 50 numbers"),
        ({"dataset": DataLoader(DATA), "weights": [1.0] * 50}, "weights: a DataLoader says the order"),
        ({"dataset": 5, "size": 1}, "a int has no length"),
    ],
)
def test_what_contradicts_is_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        feed(**options)


# --- streams ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Ten samples an epoch, of which some are drawn."""

    def __init__(self, length=10):
        self.epoch, self.length, self.begun = 0, length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.begun += 1
        for place in range(10):
            yield self.epoch, place, random.random(), torch.rand(2)


class Sized(Stream):
    def __len__(self):
        return self.length


def taken(found: Feed, item: int, oldest: int = 0):
    return found.source.read(found.source.ask(item, oldest))


@pytest.mark.parametrize("kind", [Stream, Sized])
def test_a_streams_samples_are_the_same_whoever_reads_them_in_whichever_order(kind):
    one, other = (feed(dataset=kind(), size=4) for _ in range(2))
    everything = [sample for item in range(15) for sample in taken(one, item, item)]
    assert [(epoch, place) for epoch, place, *_ in everything] == [divmod(i, 10) for i in range(60)]
    assert len({str(sample) for sample in everything}) == 60
    for item in (9, 12, 10, 3, 14):
        torch.rand(3), random.random()
        assert str(taken(other, item, min(item, 10))) == str(everything[4 * item : 4 * item + 4])


def test_what_is_kept_of_a_stream_is_not_read_again():
    stream = Stream()
    found = feed(dataset=stream, size=2)
    before = stream.begun
    for item, oldest in ((8, 5), (6, 5), (5, 5), (9, 6), (6, 6)):
        taken(found, item, oldest)
    assert stream.begun == before + 2, "two epochs, each once"
    taken(found, 1)
    assert stream.begun == before + 3


def test_a_joiner_begins_with_the_epoch_where_lengths_are_known():
    stream = Sized()
    found = feed(dataset=stream, size=2)
    before = stream.begun
    assert taken(found, 30)[0][:2] == (6, 0)
    assert stream.begun == before + 1


class Stateful:
    """Goes on where it was, unless its state is loaded."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at % 10 < 9:
            self.at += 1
            yield self.at
        self.at += 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_stream_with_a_state_is_set_back():
    one, other = feed(dataset=Stateful(), size=3), feed(dataset=Stateful(), size=3)
    everything = [taken(one, item, item) for item in range(9)]
    assert taken(other, 7, 7) == everything[7]
    assert taken(other, 2) == everything[2]


class Long(IterableDataset):
    """Two hundred samples an epoch, of which some are drawn; counts those that are read."""

    def __init__(self):
        self.at, self.epoch, self.read = 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        while self.at < 200:
            self.at += 1
            self.read += 1
            yield self.epoch, self.at, random.random(), torch.rand(2), float(np.random.rand())
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "told": torch.tensor([self.at])}

    def load_state_dict(self, state):
        assert state["told"].item() == state["at"]
        self.at = state["at"]


class Unsized(IterableDataset):
    """It has no state: others begin with the epoch."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        for place in range(200):
            self.read += 1
            yield place, random.random()


def handed(hint):
    """A mark as it comes through a file."""
    assert hint is not None
    return json.loads(json.dumps(hint))


@pytest.mark.parametrize("item", [34, 64, 100, 149, 150, 171, 330])
def test_whoever_is_told_a_mark_reads_no_more_than_what_is_behind_it(item):
    one, long = feed(dataset=Long(), size=2), Long()
    everything = [taken(one, each, each) for each in range(item)]
    hint = handed(one.source.hint(item))
    other = feed(dataset=long, size=2)
    other.source.stream.learn(hint)
    before = long.read
    everything.append(taken(one, item, item))
    torch.rand(3), random.random()
    assert str(taken(other, item, item - 1)) == str(everything[item])
    assert long.read - before <= 2 * (32 + 1) + 4
    assert [str(taken(other, each, each - 1)) for each in range(item + 1, item + 80)] == [
        str(taken(one, each, each - 1)) for each in range(item + 1, item + 80)
    ], "it goes on like the other one, over the ends of epochs"
    assert str(taken(other, 2)) == str(everything[2]), "what was before can be had, too"


def test_without_a_state_others_begin_with_the_epoch():
    one, stream = feed(dataset=Unsized(), size=2), Unsized()
    for item in range(250):
        taken(one, item, item)
    hint = handed(one.source.hint(250))
    assert (hint["place"], hint["epoch"]) == (400, 2)
    other = feed(dataset=stream, size=2)
    other.source.stream.learn(hint)
    before = stream.read
    assert str(taken(other, 250, 249)) == str(taken(one, 250, 249))
    assert stream.read - before == 102


class Buffered(Long):
    """Keeps some samples back, of which its state tells nothing."""

    def __iter__(self):
        held = []
        for sample in super().__iter__():
            held.append(sample)
            if len(held) == 8:
                yield held.pop(random.randrange(8))
        yield from held


class Forgets(Long):
    """Its state is right at first, and not later."""

    def load_state_dict(self, state):
        self.at = state["at"] - (state["at"] > 100)


def test_a_state_that_leads_elsewhere_is_told_and_is_of_no_use():
    told = []
    one = feed(told.append, dataset=Buffered(), size=2)
    assert "leads to other samples than came there" in told.pop()
    everything = [taken(one, item, item) for item in range(60)]
    assert one.source.hint(60) is None
    assert str(taken(feed(lambda text: None, dataset=Buffered(), size=2), 59)) == str(everything[59])

    one, other = feed(dataset=Forgets(), size=2), feed(told.append, dataset=Forgets(), size=2)
    everything = [taken(one, item, item) for item in range(70)]
    other.source.stream.learn(handed(one.source.hint(70)))
    assert not told
    assert str(taken(other, 69, 68)) == str(everything[69])
    assert "its state of sample 128 leads to other samples" in told.pop()


def test_a_mark_of_another_stream_or_seed_is_not_taken():
    one = feed(dataset=Long(), size=2)
    for item in range(40):
        taken(one, item, item)
    hint = handed(one.source.hint(40))
    assert hint["place"] == 64
    told = []
    other = feed(told.append, dataset=Long(), size=2, seed=8)
    other.source.stream.learn(hint)
    assert other.source.hint(40) is None
    assert "other samples, length or seed; it is read from its beginning" in told.pop()


class Incomparable(Long):
    def __iter__(self):
        return ((sample, lambda: None) for sample in Long.__iter__(self))


def test_samples_that_cannot_be_compared_have_no_marks():
    told = []
    found = feed(told.append, dataset=Incomparable(), size=2)
    assert "its samples cannot be compared, so whoever joins, or resumes, reads it from its beginning" in told.pop()
    for item in range(40):
        taken(found, item, item)
    assert found.source.hint(40) is None


class Opaque(Long):
    def state_dict(self):
        return {"at": self.at, "told": torch.tensor([self.at]), "bytes": b""}


def test_a_state_that_cannot_be_handed_to_others_is_told():
    told = []
    one = feed(told.append, dataset=Opaque(), size=2)
    assert len(told) == 1
    assert "its state holds a bytes; expected" in told[0]
    assert "reads it from its beginning" in told[0]
    for item in range(40):
        taken(one, item, item)
    assert one.source.hint(40) is None


class Unseeded(IterableDataset):
    def __init__(self):
        self.random = random.Random(1)

    def __iter__(self):
        return (self.random.random() for _ in range(10))


class Ends(Sized):
    def __iter__(self):
        return iter(range(10))


class Empty(IterableDataset):
    def __iter__(self):
        return iter(())


def test_a_stream_that_cannot_be_read_again_is_refused():
    for stream, text in (
        (Unseeded(), "Unseeded has other samples when it is read again"),
        ((i for i in range(10)), "a generator can be read once only"),
        (Empty(), "Empty is empty in epoch"),
    ):
        with pytest.raises(ConfigError, match=text):
            feed(dataset=stream, size=2)
    with pytest.raises(ConfigError, match="Ends has a length of 12, and 10 samples came in epoch 0"):
        taken(feed(dataset=Ends(12), size=2), 5)
    with pytest.raises(ConfigError, match="shuffle: the samples of a Stream have no numbers"):
        feed(dataset=Stream(), size=2, shuffle=True)


def test_what_does_not_become_of_a_streams_loader_is_told():
    told = []
    found = feed(told.append, dataset=DataLoader(Stream(), batch_size=2, num_workers=2, drop_last=True))
    assert (found.loaders, found.num_samples) == (1, 2)
    assert len(told) == 2
    assert "not 2" in told[0]
    assert "drop_last" in told[1]


def test_a_torch_that_knows_an_accelerator_which_is_not_here_seeds_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.6 for CUDA says it."""

    def raises() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    randomness._knows_accelerator.cache_clear()
    try:
        randomness.seed_all(3, 1)
        once = torch.rand(2)
        randomness.seed_all(3, 1)
        assert torch.equal(torch.rand(2), once)
    finally:
        randomness._knows_accelerator.cache_clear()
