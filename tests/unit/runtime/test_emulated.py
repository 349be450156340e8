"""What an emulated stage takes, and what its hash notices."""

import numpy as np
import pytest

from holdfast.core.placement import LayerRange
from holdfast.core.profile import LayerProfile, Link, Profile, uniform_profile
from holdfast.core.schedule import OpKind
from holdfast.core.summing import SumSize, add_up
from holdfast.errors import LedgerError
from holdfast.runtime.engine.emulated import EmulatedStage


class Time:
    """A clock that only sleeping moves, and only by as much as one sleep may."""

    def __init__(self, longest_s=1e9):
        self.now = 0.0
        self._longest_s = longest_s

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += min(seconds, self._longest_s)

    def of(self, work, *arguments):
        start = self.now
        work(*arguments)
        return self.now - start


def layer(scale, **changes):
    return LayerProfile(
        name="x",
        forward_s=1.0 * scale,
        backward_input_s=2.0 * scale,
        backward_weight_s=4.0 * scale,
        optimizer_s=8.0 * scale,
        held_after_forward_bytes=0,
        held_after_input_bytes=0,
        boundary_bytes=0,
        parameter_bytes=0,
        optimizer_bytes=0,
        **changes,
    )


PROFILE = Profile(
    layers=(layer(1.0), layer(10.0, split_s=5.0), layer(100.0, backward_s=550.0, split_s=50.0)),
    link=Link(latency_s=0.0, bytes_per_s=1.0),
)


def stage(time, layers=(0, 3), profile=PROFILE):
    return EmulatedStage(
        layers=range(*layers),
        num_layers=3,
        num_microbatches=1,
        profile=profile,
        clock=time.clock,
        sleep=time.sleep,
    )


@pytest.mark.parametrize("longest_s", [1e9, 0.7])
def test_operations_take_the_sums_over_the_layers_held(longest_s):
    time = Time(longest_s)
    made = stage(time)
    assert time.of(made.forward, 0, 0, None) == pytest.approx(111.0)
    assert time.of(made.backward, OpKind.I, 0, 0, None) == pytest.approx(222.0)
    assert time.of(made.backward, OpKind.W, 0, 0, None) == pytest.approx(444.0)
    made.forward(0, 0, None)
    assert time.of(made.backward, OpKind.B, 0, 0, None) == pytest.approx(6.0 + 55.0 + 550.0), (
        "less what splitting costs"
    )


def test_a_worker_with_some_of_the_layers_takes_theirs():
    time = Time()
    made = stage(time, (1, 2))
    assert time.of(made.forward, 0, 0, np.zeros(8, np.int64)) == pytest.approx(10.0)


def test_what_an_operation_takes_by_itself_is_part_of_its_time():
    slow = Time()

    def clock():
        slow.now += 0.01
        return slow.now

    made = EmulatedStage(
        layers=range(3), num_layers=3, num_microbatches=1, profile=PROFILE, clock=clock, sleep=slow.sleep
    )
    assert slow.of(made.forward, 0, 0, None) == pytest.approx(111.0, abs=0.05)


@pytest.mark.parametrize(("late_s", "left_s"), [(0.0004, 0.0), (0.005, 0.004)], ids=["learnt", "at most 1 ms"])
def test_late_wake_ups_are_allowed_for(late_s, left_s):
    late = Time()

    def sleep(seconds):
        late.sleep(seconds + late_s)

    made = EmulatedStage(
        layers=range(3), num_layers=3, num_microbatches=1, profile=PROFILE, clock=late.clock, sleep=sleep
    )
    took = [late.of(made.forward, 0, 0, None) - 111.0 for _ in range(200)]
    assert took[0] == pytest.approx(late_s, abs=2e-5)
    assert took[-1] == pytest.approx(left_s, abs=2e-5)


def finish(made):
    for index in range(3):
        made.accept((index,), add_up([made.message((index,), 0)]))
    made.conclude(np.array([[1.0, 1.0, 0.0]] * 3))
    for index in range(3):
        made.update(index)
        made.swap(index)
    return [made.layer_digest(index) for index in range(3)]


def test_the_optimizer_takes_its_time_at_the_update():
    time = Time()
    made = stage(time)
    made.forward(0, 0, None)
    made.backward(OpKind.B, 0, 0, None)
    assert time.of(finish, made) == pytest.approx(888.0)


def test_a_follower_spends_nothing_on_updates():
    time = Time()
    made = stage(time)
    made.follow(made.layers, 0)
    assert time.of(made.update, 0) == 0.0


def end(*ops, value=None):
    made = stage(Time(), profile=None)
    made.begin(0)
    made.forward(0, 0, value)
    for op in ops:
        made.backward(op, 0, 0, None)
    return finish(made)


def test_split_and_fused_end_in_the_same_bits():
    assert end(OpKind.I, OpKind.W) == end(OpKind.B)


@pytest.mark.parametrize("before", [(), (OpKind.I,)])
def test_parts_of_an_operation_take_their_share_and_end_in_the_same_bits(before):
    time = Time()
    made, kind = stage(time), OpKind.W if before else OpKind.B
    made.begin(0)
    made.forward(0, 0, None)
    for op in before:
        made.backward(op, 0, 0, None)
    value, took = None, []
    for layer in (2, 1, 0):
        began = time.now
        value = made.backward(kind, 0, 0, value, LayerRange(layer, layer + 1))
        took.append(time.now - began)
    assert took == pytest.approx([400.0, 40.0, 4.0] if before else [550.0, 55.0, 6.0])
    assert finish(made) == end(OpKind.B)


def test_what_comes_in_changes_the_hash():
    assert end(OpKind.B, value=np.ones(8, np.int64)) != end(OpKind.B)


def test_a_dropped_w_is_stopped_by_the_ledger():
    with pytest.raises(LedgerError):
        end(OpKind.I)


def test_no_message_is_longer_than_was_said():
    made = EmulatedStage(layers=(0, 3), num_layers=4, num_microbatches=5)
    for layer in (0, 3):
        (part,) = made.message((layer,), 0).parts
        assert SumSize(header=0, part=part.nbytes) == made.message_size((layer,))


def test_a_profile_does_not_change_the_bits():
    made = stage(Time())
    made.begin(0)
    made.forward(0, 0, None)
    made.backward(OpKind.B, 0, 0, None)
    assert finish(made) == end(OpKind.B)
    assert uniform_profile(3).seconds_of(OpKind.B, LayerRange(0, 3)) == 0.0
