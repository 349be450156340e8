"""The process that makes plans while training runs."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S, until

from holdfast.core.ids import WorkerId
from holdfast.core.placement import split_evenly
from holdfast.core.profile import parse_costs, unit_costs
from holdfast.core.slots import slots_of
from holdfast.planning.library import PlanLibrary
from holdfast.planning.planner import Solver, Technique, make_plan
from holdfast.planning.training import Terms, grid_of_slots, looked_up, planned_grid, regular_grid
from holdfast.runtime.main.library import fill_library
from holdfast.runtime.node.entries import LIBRARY
from holdfast.runtime.node.forks import ForkedProcess
from holdfast.runtime.specs import LibrarySpec
from holdfast.telemetry.events import LibraryFilled, Notice, read_events

TERMS = Terms(technique=Technique.DECOUPLED, costs=unit_costs(4), in_flight=4)
PLAN = planned_grid(regular_grid(3, split_evenly(4, 2), 3, TERMS), (), TERMS, at_once=False).plan


@pytest.fixture
def spec(tmp_path):
    return LibrarySpec(
        plan=PLAN, terms=TERMS, failures=2, folder=str(tmp_path / "plans"), events=str(tmp_path / "events.jsonl")
    )


def has_plans(spec):
    library, grid = PlanLibrary(Path(spec.folder)), grid_of_slots(slots_of(PLAN), TERMS)
    return all(library.find(grid, number, TERMS.technique) is not None for number in range(1, spec.failures + 1))


def test_it_makes_all_plans_and_ends(spec):
    fill_library(spec, search_s=0.01)
    assert has_plans(spec)
    found = [looked_up(PlanLibrary(Path(spec.folder)), PLAN, [WorkerId(1, stage)], TERMS) for stage in range(2)]
    assert any(found)


def test_what_is_missing_is_made_at_once_and_then_the_best_engine_searches(spec, monkeypatch):
    asked = []

    def noted(*arguments, time_limit_s, engine):
        asked.append((engine, time_limit_s))
        return make_plan(*arguments, time_limit_s=time_limit_s, engine=engine)

    monkeypatch.setattr("holdfast.planning.library.make_plan", noted)
    terms = replace(TERMS, costs=parse_costs(3, costs="5,3,4", memory="2,1,1,4"))  # the bound is not reached
    plan = planned_grid(regular_grid(2, split_evenly(3, 3), 3, terms), (), terms, at_once=False).plan
    fill_library(replace(spec, plan=plan, terms=terms, failures=1), search_s=0.01)
    made = asked.index((Solver.AUTO, 0.01))
    assert made > 0
    assert set(asked[:made]) == {(Solver.LIST, 0.0)}
    assert set(asked[made:]) == {(Solver.AUTO, 0.01)}


def test_as_a_process_it_has_the_least_priority_and_ends_by_itself(spec, tmp_path):
    os.mkfifo(spec.events)  # it waits there until somebody reads
    process = ForkedProcess(target=LIBRARY, args=(spec,), daemon=True)
    process.start()
    until(lambda: os.getpriority(os.PRIO_PROCESS, process.pid) == 19)
    told = tmp_path / "told.jsonl"
    told.write_bytes(Path(spec.events).read_bytes())
    process.join(LIMIT_S)
    assert process.exitcode == 0
    assert has_plans(spec)
    assert [event for _, event in read_events(told)] == [LibraryFilled(failures=2)]


def test_what_it_cannot_do_is_told_and_ends_nothing(spec, tmp_path):
    (tmp_path / "events.jsonl").touch()
    too_many = LibrarySpec(plan=PLAN, terms=TERMS, failures=5, folder=spec.folder, events=spec.events)
    process = ForkedProcess(target=LIBRARY, args=(too_many,), daemon=True)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0
    (event,) = [event for _, event in read_events(spec.events)]
    assert isinstance(event, Notice)
    assert "survives at most 4" in event.text
