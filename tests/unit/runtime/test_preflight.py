"""What is found out about a run before any of its processes that train is started, as values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace as replace_struct
from tests.processes import NODE

from holdfast import parse_job
from holdfast.core.faults import Fault
from holdfast.core.ids import WorkerId
from holdfast.core.profile import uniform_profile
from holdfast.errors import ConfigError, InternalError
from holdfast.recovery.choice import Way
from holdfast.runtime.launch.briefing import Briefing
from holdfast.runtime.launch.ports import ports_of
from holdfast.runtime.launch.preflight import Machine, decide, going_on, preflight
from holdfast.runtime.launch.request import RunRequest
from holdfast.runtime.node.entries import COORDINATOR
from holdfast.runtime.specs import Found, ResumeFrom, emulated_probe

TREE = {
    "model": {"kind": "gpt", "layers": 4, "width": 8, "heads": 2},
    "data": {"kind": "text", "path": "stdlib"},
    "grid": {"pipelines": 2, "stages": 2, "microbatches": 2},
    "train": {"steps": 9},
}
PROFILE = uniform_profile(4, forward_s=0.1)
CERTIFICATES = {"tls": {"ca": "a", "cert": "b", "key": "c"}}

NONCE = 16 * "0"


def request(*faults, sections=(), **options):
    return RunRequest(
        job=parse_job(TREE | dict(sections)),
        run_dir=Path("runs/one"),
        faults=tuple(map(Fault.parse, faults)),
        emulate=PROFILE,
        **options,
    )


def probed(run):
    return Machine(probed=emulated_probe(run.job, PROFILE), profile=PROFILE)


@pytest.mark.parametrize(("gpus", "spares", "fits"), [(4, 0, True), (5, 1, True), (3, 0, False), (4, 1, False)])
def test_each_worker_needs_a_gpu_or_all_share_one(gpus, spares, fits):
    sections = {"train": {"steps": 9, "device": "cuda"}, "resilience": {"spares": spares}}
    run = request(sections=sections)
    machine = replace(probed(run), probed=replace(probed(run).probed, gpus=("one",) * gpus))
    errors = [str(error) for error in preflight(run, machine).errors]
    told = (
        f"there are {4 + spares} workers here and {gpus} visible GPUs; expected as many, or cuda:0, which all of them "
        "share"
    )
    assert errors == ([] if fits else [f"train.device: cuda is a GPU for each worker, and {told}"])
    shared = request(sections=sections | {"train": {"steps": 9, "device": "cuda:0"}})
    assert preflight(shared, machine).errors == ()


@pytest.mark.parametrize(
    ("device", "told"), [("cuda", ["0", "1", "2", "3", "4"]), ("cuda:1", ["1"] * 5), ("cpu", [""] * 5)]
)
def test_workers_are_told_their_device_for_life(device, told):
    sections = {"train": {"steps": 9, "device": device}, "resilience": {"spares": 1}}
    run = request(sections=sections)
    machine = replace(probed(run), probed=replace(probed(run).probed, gpus=("one",) * 5))
    brief = briefing(run, machine)
    workers = [*enumerate((*brief.planned.plan.workers, *brief.job.spares))]
    specs = [
        brief.worker(worker, NODE, NONCE, begins=begins, place=place)
        for begins in (True, False)
        for place, worker in workers
    ]
    assert [spec.device.partition(":")[2] for spec in specs] == told * 2
    assert {spec.device.partition(":")[0] for spec in specs} == {device.partition(":")[0]}


def test_all_that_is_wrong_is_found_and_the_first_is_told():
    run = request("kill:2.0@1", "kill-node:9@1", "kill:0.0@1", "kill:0.1@9", accept=("train.sed",))
    found = preflight(run, Machine())
    assert [str(error) for error in found.errors[:3]] == [
        "--fault kill:2.0@1:start: there is no worker 2.0; workers are 0.0 to 1.1",
        "--fault kill-node:9@1:start: there is no node 9; nodes are 0 to 3",
        "--fault kill:0.1@9:start: the last step is 8",
    ]
    (wrong,) = found.errors[3:]
    assert "did you mean train.seed?" in str(wrong)
    assert found.planned is None
    with pytest.raises(ConfigError, match=r"there is no worker 2\.0"):
        found.check()


def test_a_fault_in_an_evaluation_needs_one():
    evaluate = {"every": 4, "data": {"kind": "text", "path": "stdlib"}}
    faults = [f"kill:0.0@{step}:evaluate" for step in (0, 3, 4, 8, 9)]
    errors = preflight(request(*faults, sections={"evaluate": evaluate}), Machine()).errors
    assert [str(error) for error in errors] == [
        f"--fault kill:0.0@{step}:evaluate: the state before step {step} is not evaluated (evaluate.every)"
        for step in (0, 3)
    ]
    assert len(preflight(request(*faults), Machine()).errors) == len(faults)


@pytest.mark.parametrize("options", [{"isolate": True}, {"faults": (Fault.parse("partition:0.0@1"),)}])
def test_networks_of_their_own_have_no_certificates(options):
    run = request(sections={"control": CERTIFICATES})
    assert preflight(run, Machine()).errors == ()
    (error,) = preflight(replace(run, **options), Machine()).errors
    assert str(error).startswith("control.tls: cannot be used with partition faults")


@pytest.mark.parametrize(("slots", "refused"), [(None, False), (4, False), (3, True)])
def test_a_group_of_workers_is_struck_where_all_of_them_are(slots, refused):
    """Else those of it that are elsewhere would live on, and nobody be told."""
    errors = preflight(request("kill-node:0@1", slots=slots), Machine()).errors
    assert [str(error).startswith("--fault kill-node:0@1:start: strikes workers") for error in errors] == [
        True
    ] * refused


def test_before_the_probe_nothing_is_planned_and_after_it_all_is():
    run = request("kill:0.0@1")
    assert preflight(run, Machine()).planned is None
    found = preflight(run, probed(run))
    found.check()
    assert len(found.planned.plan.workers) == 4
    assert found == preflight(run, probed(run)), "it is a function of what it is told"


def test_what_the_probe_warns_of_is_among_the_findings():
    run = request()
    machine = probed(run)
    machine = replace(machine, probed=replace(machine.probed, warnings=("it is slow",)))
    assert preflight(run, machine).warnings == ("it is slow",)


def test_that_gradients_could_be_sent_in_fewer_parts_is_among_the_findings():
    grid = {"pipelines": 3, "stages": 1, "microbatches": 4}
    run = request(sections={"grid": grid}.items())
    told = "sums: some workers send gradients in 3 parts; train.sum_chunks: 3 has all send 1 (other bits, the same on"
    (warning,) = preflight(run, probed(run)).warnings
    assert warning.startswith(told)
    run = request(sections={"grid": grid, "train": {"steps": 9, "sum_chunks": 3}}.items())
    assert preflight(run, probed(run)).warnings == ()


def test_a_grid_that_cannot_be_planned_is_a_finding():
    fits = request()
    machine = probed(fits)
    run = replace(fits, job=replace_struct(fits.job, grid=replace_struct(fits.job.grid, stages=5)))
    found = preflight(run, machine)
    assert len(found.errors) == 1
    assert found.planned is None


FOUND = Found(url="file:///old", step=4, rejected=())


def test_a_run_goes_on_from_what_was_found():
    asked = ResumeFrom(url="runs/old", step=None)
    run = going_on(request("kill:0.0@5", resume=asked), FOUND)
    assert (run.resume.url, run.resume.step) == ("file:///old", 4)
    assert going_on(request(resume=asked), None).resume is None
    assert going_on(request(), FOUND).resume is None


def test_faults_of_steps_that_are_over_are_refused_unless_it_is_the_same_command_again():
    asked = ResumeFrom(url="runs/old", step=None)
    with pytest.raises(ConfigError, match="the run goes on from step 4, earlier ones are not run again"):
        going_on(request("kill:0.0@3", resume=asked), FOUND)
    again = going_on(request("kill:0.0@3", "kill:0.0@4", resume=replace(asked, auto=True)), FOUND)
    assert [str(fault) for fault in again.faults] == ["kill:0.0@4:start"]
    assert going_on(request("kill:0.0@+3s", resume=asked), FOUND).faults, "counted from the first step that is run"
    assert not going_on(request("kill:0.0@+3s", resume=replace(asked, auto=True)), FOUND).faults


def briefing(run, machine=None):
    machine = machine or probed(run)
    findings = preflight(run, machine)
    decision = decide(run, machine, findings)
    return Briefing(
        request=run,
        job=decision.job,
        probed=machine.probed,
        planned=findings.planned,
        token="00" * 32,
        job_id="j",
        store="",
        host=run.job.control.host,
        events=run.events,
        address="127.0.0.1:1",
    )


def test_a_checkpoint_to_go_on_from_decides_with():
    alone = request(sections={"grid": TREE["grid"] | {"pipelines": 1}, "logging": {"use": "off"}})
    machine = probed(alone)
    findings = preflight(alone, machine)
    ways = [
        decide(replace(alone, resume=resume), machine, findings).choice.way
        for resume in (None, ResumeFrom(url="file:///old", step=4))
    ]
    assert ways == [Way.STOP, Way.CHECKPOINT]


def test_what_processes_are_told_agrees():
    told = briefing(request())
    coordinator = told.coordinator(NODE)
    workers = [told.worker(worker, NODE, NONCE, begins=True, place=0) for worker in coordinator.plan.workers]
    assert {(each.plan, each.events, each.checkpoints, each.rules) for each in workers} == {
        (coordinator.plan, coordinator.events, coordinator.checkpoints, coordinator.rules)
    }
    assert len({coordinator.token, *(each.token for each in workers)}) == 5, "each has a share of its own"


def test_who_comes_later_is_told_of_no_checkpoint():
    run = going_on(request(resume=ResumeFrom(url="runs/old", step=None)), FOUND)
    told = briefing(run)
    worker = told.planned.plan.workers[0]
    assert [told.worker(worker, NODE, NONCE, begins=begins, place=0).resume for begins in (True, False)] == [
        run.resume,
        None,
    ]


def ports(run):
    return ports_of(briefing(run), NODE, "starts processes", "the log", None)


def test_a_job_without_faults_has_nothing_around_its_ports():
    ours = ports(request())
    assert (ours.workers, ours.entry, ours.coordinator.around) == ("starts processes", COORDINATOR, ())
    group = SimpleNamespace()
    ours.around(group)
    assert vars(group) == {}
    with pytest.raises(InternalError, match="node 1 is to be cut off"):
        ours.cut(1)


def test_faults_are_put_around_the_ports_of_a_job_that_has_some():
    ours = ports(request("kill:0.0@1", "kill-coordinator@2"))
    assert len(ours.coordinator.around) == 1
    brief = briefing(request())
    group = SimpleNamespace(spec_of=lambda who, nonce, begins: brief.worker(who, NODE, nonce, begins=begins, place=0))
    ours.around(group)
    around = [group.spec_of(WorkerId(0, stage), NONCE, True).around for stage in range(2)]
    assert [[len(each.args[0].faults) for each in one] for one in around] == [[1], [0]]


@pytest.mark.parametrize(
    ("slots", "control", "found"),
    [
        (None, {}, ("sqlite", 1)),
        (4, {}, ("/runs/one/decisions", 3)),
        (4, {"store": "sqlite"}, ("sqlite", 1)),
        (4, {"store": "etcd://here:1", "coordinators": 5, "port": 7000}, ("etcd://here:1", 5)),
        (None, {"store": "/shared", "coordinators": 2}, ("/shared", 2)),
    ],
)
def test_where_others_can_come_there_are_three_coordinators_that_see_what_is_decided(slots, control, found):
    run = replace(request(sections={"control": control}, slots=slots), run_dir=Path("/runs/one"))
    assert (run.store, run.coordinators) == found
    assert preflight(run, Machine()).errors == ()


@pytest.mark.parametrize(
    ("slots", "control", "may"), [(None, {}, False), (4, {"store": "sqlite"}, False), (4, {}, True)]
)
def test_a_machine_may_leave_if_others_could_lead(slots, control, may):
    run = replace(request(sections={"control": control}, slots=slots), leaves=True)
    assert [str(error)[:15] for error in preflight(run, Machine()).errors] == ["--notice leave:"] * (not may)


@pytest.mark.parametrize("control", [{"coordinators": 2}, {"coordinators": 2, "store": "/shared", "port": 7000}])
def test_several_coordinators_see_one_store_and_have_a_port_each(control):
    (error,) = preflight(request(sections={"control": control}), Machine()).errors
    assert str(error).startswith("control.coordinators: 2 need a control.store that others see: etcd://HOST:PORT")
