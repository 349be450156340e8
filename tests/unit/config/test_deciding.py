"""What of a job decides its bits: everything but what is named as not doing so."""

import copy
import math

import msgspec
import pytest

from holdfast.config.deciding import GLOBAL_BATCH, SUMS, compare, covers, deciding
from holdfast.config.job import Job
from holdfast.config.load import parse_job

JOB = {
    "model": {"kind": "gpt", "layers": 1, "width": 8, "heads": 2},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 2, "stages": 1, "microbatches": 6},
    "train": {"steps": 20},
}
OWN = {"kind": "python", "target": "a:b", "arguments": {"x": 1, "deep": {"y": [1, 2]}}}


def job(*overrides, **sections):
    return parse_job({**copy.deepcopy(JOB), **sections}, overrides)


def told(saved, wanted):
    found, unknown = compare(deciding(saved), wanted)
    assert unknown == ()
    return [each.told("the checkpoint") for each in found]


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "grid.stages=3",
        "grid.workers_per_node=2",
        "train.technique=staggered",
        "train.in_flight=9",
        "train.steps=30",
        "resilience.commit=undo",
        "resilience.tolerate=1",
        "resilience.spares=2",
        "checkpoint.every=9",
        "control.hang_s=9",
        "cluster.start_s=9",
        "train.audit_every=10",
        "data.path=/elsewhere",
        "model.checkpoint_activations=true",
    ],
)
def test_what_decides_no_bit_may_change(override):
    assert told(job(), job(override)) == []


def test_of_devices_their_kind_counts():
    assert told(job("train.device=cuda"), job("train.device=cuda:3")) == []
    assert told(job("train.device=own.py:A"), job("train.device=own.py:A")) == []
    assert told(job("train.device=own.py:A"), job("train.device=own.py:B")) == [
        "train.device: expected own.py:A, as in the checkpoint, got own.py:B"
    ]
    assert told(job(), job("train.device=cuda:3")) == ["train.device: expected cpu, as in the checkpoint, got cuda"]


def test_another_grid_of_the_same_batch_is_the_same():
    assert told(job(), job("grid.pipelines=3", "grid.microbatches=4")) == []
    assert told(job(), job("grid.pipelines=3")) == [f"{GLOBAL_BATCH}: expected 12, as in the checkpoint, got 18"]


def test_chunks_count_unless_they_are_those_that_nobody_says():
    assert told(job(), job("train.sum_chunks=4")) == []
    assert told(job(), job("train.sum_chunks=3")) == [
        "train.sum_chunks: expected null, as in the checkpoint, got 3",
    ]


def test_exact_sums_of_a_checkpoint_that_does_not_tell_are_others():
    """They were those of whole numbers then."""
    for numerics, expected in (
        (
            "exact",
            [
                f"{SUMS}: expected whole numbers of 64 bits, as in the checkpoint, "
                "got float32, in the order of the micro-batches"
            ],
        ),
        ("fast", []),
    ):
        made = job(f"train.numerics={numerics}")
        found, _ = compare({path: value for path, value in deciding(made).items() if path != SUMS}, made)
        assert [each.told("the checkpoint") for each in found] == expected


def test_every_other_key_of_every_section_counts():
    """One that is added to the job file counts, unless it is named as one that does not."""
    values = deciding(job(train={"steps": 20, "numerics": "fast"}, optimizer={"schedule": "cosine"}))
    for section in ("model", "optimizer", "train", "grid"):
        struct = getattr(job(), section)
        keys = {f"{section}.{field.name}" for field in msgspec.structs.fields(struct)}
        assert keys - set(values) <= {
            "model.checkpoint_activations",
            "optimizer.schedule_arguments",  # each of them is a key of its own
            "grid.workers",  # it is told as the layout that was found
            "grid.global_microbatches",
            "grid.workers_per_node",
            "train.audit_every",
            "train.compare_every",
            "train.time_limit",
            "train.epochs",
        }
    counted = {path.partition(".")[0] for path in values}
    assert counted >= {field.name for field in msgspec.structs.fields(Job)} - {
        "name",
        "evaluate",
        "resilience",
        "checkpoint",
        "logging",
        "cluster",
        "control",
        "track",
        "resume",
    }


def test_in_fast_numerics_the_grid_and_the_order_of_work_count():
    fast = "train.numerics=fast"
    assert told(job(fast), job(fast, "grid.pipelines=3", "grid.microbatches=4")) == [
        "grid.pipelines: expected 2, as in the checkpoint, got 3",
        "grid.microbatches: expected 6, as in the checkpoint, got 4",
    ]
    assert told(job(fast), job(fast, "train.technique=gpipe")) == [
        "train.technique: expected 1f1b, as in the checkpoint, got gpipe"
    ]
    assert told(job(fast), job()) == ["train.numerics: expected fast, as in the checkpoint, got exact"]
    assert told(job(), job(fast)) == ["train.numerics: expected exact, as in the checkpoint, got fast"]


def layout(*pipelines):
    return {"layout": [{"stages": list(stages), "microbatches": count} for stages, count in pipelines]}


def test_a_grid_is_the_same_however_it_is_written():
    """Two pipelines of 3 layers (a block, embedding and head); the first stages have what is left over."""
    fast = "train.numerics=fast"
    alike, cut = job(fast, grid=layout(([3], 6), ([3], 6))), job(fast, grid=layout(([2, 1], 6), ([2, 1], 6)))
    assert told(job(fast), alike) == told(alike, job(fast)) == []
    assert told(job(fast, "grid.stages=2"), cut) == told(cut, job(fast, "grid.stages=2")) == []
    assert told(cut, job(fast)) == ["grid.stages: expected 2, as in the checkpoint, got 1"]


@pytest.mark.parametrize("unlike", [layout(([1, 2], 6), ([1, 2], 6)), layout(([2, 1], 6), ([3], 6))])
def test_a_grid_that_only_a_layout_can_say_is_another(unlike):
    fast = "train.numerics=fast"
    assert told(job(fast, grid=unlike), job(fast, grid=unlike)) == []
    assert any(each.startswith("grid.layout: ") for each in told(job(fast, "grid.stages=2"), job(fast, grid=unlike)))
    assert any(each.startswith("grid.layout: ") for each in told(job(fast, grid=unlike), job(fast, "grid.stages=2")))


def test_where_a_profile_cuts_nobody_knows_whether_a_layout_is_the_same():
    options = ("train.numerics=fast", "train.technique=decoupled", "train.profile=p.json")
    (found,) = told(job(*options), job(*options, grid=layout(([3], 6), ([3], 6))))
    assert found.startswith("grid.layout: ")


def test_what_a_scheduler_is_called_with_counts_and_the_number_of_steps_does_not():
    made = ("optimizer.schedule=torch.optim.lr_scheduler:StepLR", "optimizer.schedule_arguments={step_size: 3}")
    assert told(job(*made), job(*made, "train.steps=99")) == []
    assert told(job(*made), job(*made, "optimizer.schedule_arguments.step_size=4")) == [
        "optimizer.schedule_arguments.step_size: expected 3, as in the checkpoint, got 4"
    ]


def test_a_schedule_that_falls_makes_the_number_of_steps_count():
    cosine = "optimizer.schedule=cosine"
    assert told(job(cosine), job(cosine, "train.steps=30")) == [
        "train.steps: expected 20, as in the checkpoint, got 30"
    ]
    assert told(job(), job(cosine)) == ["optimizer.schedule: expected constant, as in the checkpoint, got cosine"]


def test_ones_own_function_is_compared_argument_by_argument():
    changed = {**OWN, "target": "a:c", "arguments": {"x": 1.0, "deep": {"y": [1, 3]}, "new": None}}
    assert told(job(model=OWN), job(model=OWN)) == []
    assert told(job(model=OWN), job(model=changed)) == [
        "model.target: expected a:b, as in the checkpoint, got a:c",
        "model.arguments.x: expected 1, as in the checkpoint, got 1.0",
        "model.arguments.deep.y: expected [1,2], as in the checkpoint, got [1,3]",
        "model.arguments.new: expected nothing, as in the checkpoint, got null",
    ]
    assert told(job(model=OWN), job(model={**OWN, "arguments": {"x": 1}})) == [
        "model.arguments.deep.y: expected [1,2], as in the checkpoint, got nothing"
    ]


def test_arguments_from_python_can_be_anything():
    values = deciding(job(model={**OWN, "arguments": {"x": (1, 2), "y": frozenset([1]), "z": print}}))
    assert values["model.arguments.x"] == [1, 2]
    assert values["model.arguments.z"] == repr(print)


def test_what_json_cannot_tell_apart_counts():
    """Numbers beyond it are none of null, keys that are no text are others than text, and a set has one order."""
    found = [None, math.inf, -math.inf, math.nan, {1: 2}, {"1": 2}]
    values = [deciding(job(model={**OWN, "arguments": {"x": each}})) for each in found]
    assert len({repr(sorted(each.items(), key=str)) for each in values}) == len(found)
    assert (
        told(job(model={**OWN, "arguments": {"x": math.nan}}), job(model={**OWN, "arguments": {"x": math.nan}})) == []
    )
    names = [f"name{index}" for index in range(20)]
    several = [deciding(job(model={**OWN, "arguments": {"x": set(each)}})) for each in (names, names[::-1])]
    assert several[0]["model.arguments.x"] == several[1]["model.arguments.x"] == sorted(names)


def test_of_another_kind_only_the_kind_is_told():
    assert told(job(), job(model=OWN)) == ["model.kind: expected gpt, as in the checkpoint, got python"]


def test_a_key_that_was_not_there_had_its_default():
    saved = {path: value for path, value in deciding(job()).items() if path != "optimizer.eps"}
    assert compare(saved, job()) == ((), ())
    (found,), _ = compare(saved, job("optimizer.eps=0.5"))
    assert found.told("the checkpoint") == "optimizer.eps: expected 1e-8, as in the checkpoint, got 0.5"


def test_a_key_of_a_later_version_cannot_be_compared():
    assert compare({**deciding(job()), "optimizer.new": 1}, job()) == ((), ("optimizer.new",))


def test_names_cover_what_is_below_them():
    assert covers(["model"], "model.dropout")
    assert covers(["model.dropout"], "model.dropout")
    assert not covers(["model.drop"], "model.dropout")
    assert not covers([], "model.dropout")
