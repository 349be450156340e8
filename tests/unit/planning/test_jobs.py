"""From job files to plans."""

from dataclasses import replace

import pytest

from holdfast.config.load import parse_job
from holdfast.config.profiles import save_profile
from holdfast.core.placement import LayerRange, split_evenly
from holdfast.core.profile import GpuProfile, LayerProfile, Link, Profile
from holdfast.core.schedule import OpKind
from holdfast.core.slots import slots_of
from holdfast.errors import ConfigError
from holdfast.planning.planner import Technique
from holdfast.schedule.builders import regular_plan
from holdfast.settings.planning import (
    healthy_plan,
    plans_of,
    profile_of,
    settled,
    shapes_of,
    stages_of,
    terms_of,
    tolerated,
)


def job(*overrides, grid=None):
    tree = {
        "model": {"kind": "gpt", "layers": 3},
        "data": {"kind": "digits"},
        "grid": grid or {"pipelines": 2, "stages": 2, "microbatches": 4},
        "train": {"steps": 1},
    }
    return parse_job(tree, overrides)


def profile(*times):
    layers = (
        LayerProfile(
            name=f"layer {index}",
            forward_s=time,
            backward_input_s=time,
            backward_weight_s=2 * time,
            held_after_forward_bytes=100,
            held_after_input_bytes=40,
            boundary_bytes=0,
            parameter_bytes=1,
            optimizer_bytes=2,
        )
        for index, time in enumerate(times)
    )
    return Profile(layers=tuple(layers), link=Link(latency_s=0.01, bytes_per_s=1e9))


def kinds(plan):
    return {op.kind for _, row in plan.orders.rows for op in row}


@pytest.mark.parametrize("technique", ["1f1b", "gpipe"])
def test_what_needs_no_planner_is_cut_so_that_stages_are_equally_fast_all_the_same(technique):
    found = job(f"train.technique={technique}")
    assert terms_of(found, 5) is None
    assert healthy_plan(found, 5) == regular_plan(2, split_evenly(5, 2), 4, technique)
    cut = (LayerRange(0, 1), LayerRange(1, 5))
    assert healthy_plan(found, 5, profile(9, 1, 1, 1, 1)) == regular_plan(2, cut, 4, technique)


@pytest.mark.parametrize("technique", ["decoupled", "staggered"])
def test_the_planner_makes_the_plans_of_its_techniques(technique):
    found = job(f"train.technique={technique}")
    plan = healthy_plan(found, 5, ties=((0, 4),))
    assert kinds(plan) >= {OpKind.F, OpKind.I, OpKind.W}
    assert plan == healthy_plan(found, 5, ties=((0, 4),))
    assert plan.placement == regular_plan(2, split_evenly(5, 2), 4).placement
    terms = terms_of(found, 5, ties=((0, 4),))
    assert (terms.technique, terms.in_flight, terms.ties) == (Technique(technique), 4, ((0, 4),))


ALIKE = profile(1, 1, 1, 1, 1)
DEEP = {"pipelines": 2, "stages": 5, "microbatches": 6}


def technique_of(*overrides, known=ALIKE, grid=DEEP, **options):
    """What a job that says nothing of its technique is trained by, with how many micro-batches at once, and why."""
    found = settled(job(*overrides, grid=grid), 5, known, **options)
    assert found.plan == healthy_plan(found.job, 5, known), "of that technique"
    return found.job.train.technique, found.job.train.in_flight, found.why


def test_where_nothing_says_what_layers_cost_1f1b_is_kept():
    assert technique_of(known=None) == ("1f1b", None, "")
    assert healthy_plan(job(grid=DEEP), 5) == regular_plan(2, split_evenly(5, 5), 6, "1f1b")


def test_a_profile_decides_within_the_memory_that_1f1b_takes():
    assert technique_of() == (
        "decoupled",
        5,
        "28.1 s a step by the profile, 40.2 s by 1f1b; staggered with 10 micro-batches at once would take 27.1 s, "
        "and 609 bytes of a worker, for 508 bytes: resilience.worker_memory says how much there is",
    )


@pytest.fixture
def memory(tmp_path):
    """Overrides that give workers so much memory."""
    save_profile(ALIKE, tmp_path / "profile.json")
    return lambda limit: (f"train.profile={tmp_path / 'profile.json'}", f"resilience.worker_memory={limit}")


def test_with_more_memory_more_is_possible(memory):
    told = "a step by the profile, 40.2 s by 1f1b"
    assert technique_of(*memory(10000)) == ("staggered", 10, f"27.1 s {told}")
    assert technique_of(*memory(10000), "train.in_flight=5") == ("decoupled", 5, f"28.1 s {told}")
    assert technique_of(*memory(300))[:2] == ("decoupled", 2), "1F1B does not fit"
    assert technique_of(*memory(60))[0] == "1f1b", "nothing fits, nor does that"


@pytest.mark.parametrize("override", ["train.clip_norm=1.0", "train.loss_scale={}"])
def test_updates_that_may_be_taken_back_are_not_made_ahead(memory, override):
    assert technique_of(override, *memory(10000))[0] == "decoupled"


def test_what_is_not_worth_a_hundredth_of_a_step_is_left():
    many = {"pipelines": 2, "stages": 2, "microbatches": 100}
    assert technique_of(grid=many) == ("1f1b", None, "1.21e+03 s a step by the profile")


def test_who_waits_leaves_a_shared_processor_to_others():
    technique, _, why = technique_of(processors=2)
    assert technique == "1f1b"
    assert why == "10 workers share 2 processor(s), and who waits leaves its own to others"
    assert technique_of(processors=10)[0] == "decoupled"


@pytest.mark.parametrize("override", ["train.numerics=fast", "grid.stages=1"])
def test_where_bits_depend_on_it_or_nobody_waits_for_a_stage_there_is_nothing_to_choose(override):
    assert technique_of(override) == ("1f1b", None, "")


@pytest.mark.parametrize("technique", ["1f1b", "gpipe", "decoupled", "staggered"])
def test_what_a_job_says_itself_stands(technique):
    found = job(f"train.technique={technique}", grid=DEEP)
    assert settled(found, 5, ALIKE, processors=1).job == found


def test_all_that_is_planned_is_of_the_technique_that_was_found():
    found = plans_of(job(grid=DEEP), 5, ALIKE)
    assert found.job.train.technique == "decoupled"
    assert found.terms.technique is Technique.DECOUPLED
    assert found.terms.in_flight == 5
    assert OpKind.I in kinds(found.plan)
    assert found.why.startswith("28.1 s a step")


def test_pipelines_that_are_not_alike_are_compared_as_well(memory):
    layout = {"layout": [{"stages": [1] * 5, "microbatches": 6}, {"stages": [2, 2, 1], "microbatches": 4}]}
    assert technique_of(grid=layout)[:2] == ("decoupled", 3), "with 5 its fullest worker would be fuller than by 1F1B"
    technique, _, why = technique_of(*memory(10000), grid=layout)
    assert (technique, why) == ("staggered", "32.1 s a step by the profile, 42.1 s by 1f1b")


def test_in_flight_limits_what_a_worker_holds():
    plan = healthy_plan(job("train.technique=decoupled", "train.in_flight=1"), 5)
    for _, row in plan.orders.rows:
        held = 0
        for op in row:
            held += {OpKind.F: 1, OpKind.W: -1, OpKind.B: -1, OpKind.I: 0}[op.kind]
            assert held <= 1


def test_a_profile_says_what_layers_cost_and_so_where_the_model_is_cut(tmp_path):
    save_profile(profile(8, 1, 1, 1, 1), tmp_path / "profile.json")
    found = job("train.technique=staggered", f"train.profile={tmp_path / 'profile.json'}")
    known = profile_of(found, 5)
    assert [str(layers) for layers in stages_of(found, 5, known)[0]] == ["0:1", "1:5"]
    assert [str(layers) for layers in stages_of(found, 5)[0]] == ["0:3", "3:5"]
    terms = terms_of(found, 5, known)
    assert terms.costs.forward == (8, 1, 1, 1, 1)
    assert terms.costs.comm == (0.01,) * 4
    assert healthy_plan(found, 5, known).placement.layers_of(healthy_plan(found, 5, known).workers[0]) == (0,)


def test_a_layout_says_where_each_pipeline_is_cut():
    """The planner's technique holds there, too."""
    tree = {"layout": [{"stages": [3, 2], "microbatches": 2}, {"stages": [1, 1, 3], "microbatches": 1}]}
    found = job("train.technique=staggered", grid=tree)
    cuts = [[str(layers) for layers in stages] for stages in stages_of(found, 5)]
    assert cuts == [["0:3", "3:5"], ["0:1", "1:2", "2:5"]]
    plan = healthy_plan(found, 5)
    assert [len(plan.routes.through(worker)) for worker in plan.workers] == [2, 2, 1, 1, 1]
    assert {op.kind for _, row in plan.orders.rows for op in row} >= {OpKind.I, OpKind.W}
    assert terms_of(found, 5).in_flight == 6
    assert tolerated(found) == 1
    with pytest.raises(
        ConfigError, match=r"grid\.layout: the stages of pipeline 0 have 5 layers together, 3 \+ 2; exp"
    ):
        healthy_plan(found, 6)


def test_a_layout_of_pipelines_that_are_alike_is_planned_as_any_such_grid():
    alike = [{"stages": [3, 2], "microbatches": 4}] * 2
    regular = healthy_plan(job("train.technique=staggered"), 5)
    assert healthy_plan(job("train.technique=staggered", grid={"layout": alike}), 5) == regular


@pytest.mark.parametrize("technique", ["1f1b", "gpipe", "decoupled", "staggered"])
@pytest.mark.parametrize("stages", [1, 2])
def test_stages_of_several_gpus_are_as_many_workers(stages, technique):
    wide = ("grid.gpus_per_stage=2", "grid.workers_per_node=2")
    found = job(*wide, f"grid.stages={stages}", f"train.technique={technique}")
    plan, rows = healthy_plan(found, 5), stages_of(found, 5)
    assert slots_of(plan) is None
    assert [len(row) for row in rows] == [2 * stages] * 2
    assert len(plan.workers) == 4 * stages
    owners = plan.placement.owners_by_layer
    assert all(len(each) == 4 for each in owners)
    assert {len(plan.routes.through(worker)) for worker in plan.workers} == {2}, "they take micro-batches by turns"


def test_sharded_stages_are_one_worker_each_and_take_the_times_of_their_gpus(tmp_path):
    one = profile(4, 4, 4, 4, 4)
    both = {"2": GpuProfile(forward_s=2.0, backward_input_s=3.0, backward_weight_s=5.0)}
    save_profile(replace(one, layers=tuple(replace(each, by_gpus=both) for each in one.layers)), tmp_path / "p.json")
    named = f"train.profile={tmp_path / 'p.json'}"
    fast = ("train.numerics=fast", "grid.microbatch_size=2", named)
    found = job(*fast, "grid.gpus_per_stage=2")
    assert len(healthy_plan(found, 5).workers) == 4
    shared = profile_of(found, 5).layers[0]
    assert [shared.seconds_of(kind) for kind in (OpKind.F, OpKind.I, OpKind.W, OpKind.B)] == [2, 3, 5, 8]
    assert profile_of(job(*fast), 5).layers[0].forward_s == 4
    with pytest.raises(
        ConfigError,
        match=r"'layer 0' has no times on 3 GPUs: expected by_gpus\.3 in the profile of every layer, or no profile",
    ):
        profile_of(job(*fast, "grid.gpus_per_stage=3", "grid.microbatch_size=3"), 5)
    unlike = {"layout": [{"stages": [2, 3], "gpus": [1, 2], "microbatches": 4}]}
    with pytest.raises(ConfigError, match="stages have 1 or 2 GPUs, and the planner has one time for each layer"):
        profile_of(job(*fast, grid=unlike), 5)


def test_no_profile_is_named():
    assert profile_of(job(), 5) is None


def test_the_profile_of_another_model_is_refused(tmp_path):
    save_profile(profile(1, 1), tmp_path / "profile.json")
    with pytest.raises(ConfigError, match=r"train\.profile: .* has 2 layers, but the model has 5"):
        profile_of(job(f"train.profile={tmp_path / 'profile.json'}"), 5)


def test_a_profile_that_is_not_there():
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        profile_of(job("train.profile=nowhere.json"), 5)


def test_at_least_one_micro_batch_must_be_in_flight():
    with pytest.raises(ConfigError, match=r"train\.in_flight"):
        job("train.in_flight=0")


@pytest.mark.parametrize(
    ("grid", "tolerate", "failures"),
    [((3, 4), 0, 3), ((3, 4), 2, 2), ((2, 2), 0, 1), ((1, 4), 0, 0), ((2, 1), 0, 1), ((2, 1), 1, 1)],
)
def test_for_how_many_failures_plans_are_made_ahead(grid, tolerate, failures):
    pipelines, stages = grid
    overrides = (f"grid.pipelines={pipelines}", f"grid.stages={stages}", f"resilience.tolerate={tolerate}")
    assert tolerated(job(*overrides)) == failures


def shapes(*overrides, known=None):
    found = job("resilience.strategy=templates", "grid.pipelines=3", "train.profile=some.json", *overrides)
    return shapes_of(found, 5, known, terms_of(found, 5, known))


@pytest.mark.parametrize(
    ("overrides", "minimum"),
    [
        ((), 2),
        (("resilience.worker_memory=545",), 1),
        (("resilience.worker_memory=544",), 2),  # 418 are enough for two layers of which two micro-batches are held
        (("resilience.worker_memory=417",), 3),
        (("resilience.worker_memory=530", "resilience.commit=undo"), 1),
        (("resilience.worker_memory=529", "resilience.commit=undo"), 2),
        (("resilience.worker_memory=545", "resilience.smallest_pipeline=3"), 3),
    ],
)
def test_a_pipeline_has_as_many_workers_as_its_memory_takes(overrides, minimum):
    """A layer of three bytes takes 2 * 3, or 3, and 3 of sums; a micro-batch takes 100 in each."""
    assert shapes(*overrides, known=profile(1, 1, 1, 1, 1)).minimum == minimum


def test_with_fewer_workers_than_pipelines_take_a_job_stops_unless_it_may_go_on():
    assert (shapes().fewest, shapes().tolerate) == (2, 0)
    assert (shapes("resilience.tolerate=2").fewest, shapes("resilience.tolerate=2").tolerate) == (6, 2)
    allowed = shapes("resilience.tolerate=2", "resilience.degraded=allow")
    assert (allowed.fewest, allowed.tolerate) == (0, 2)


def test_pipelines_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"worker_memory: 107 bytes of each worker are too few .* up to 5 workers"):
        shapes("resilience.worker_memory=107", known=profile(1, 1, 1, 1, 1))
    with pytest.raises(
        ConfigError, match=r"tolerate: 2 failure\(s\) take 3 pipelines of 3 workers, but the grid has 6"
    ):
        shapes("resilience.tolerate=2", "resilience.smallest_pipeline=3")


def test_the_planner_counts_the_state_that_a_job_keeps():
    undo = ("train.technique=decoupled", "resilience.commit=undo", "resilience.worker_memory=1000")
    found = shapes(*undo, known=profile(1, 1, 1, 1, 1))
    assert found.terms.costs.state == (3 + 3,) * 5
    assert found.terms_in_memory.costs.capacity == (1000,) * 5
    assert shapes("train.technique=decoupled").terms_in_memory.costs.capacity is None
