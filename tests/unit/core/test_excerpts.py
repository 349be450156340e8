from holdfast.core.excerpts import excerpts
from holdfast.core.ids import WorkerId
from holdfast.core.lower import lower_worker
from holdfast.core.placement import split_evenly
from holdfast.core.plan import with_listeners
from holdfast.schedule.builders import adaptive_plan, regular_plan

HEALTHY = regular_plan(3, split_evenly(2, 2), 4)


def visited(plan):
    return " ".join(str(microbatch) for microbatch in plan.routes.microbatches)


def test_an_excerpt_has_the_routes_through_a_worker_and_those_of_the_verdict():
    plan = adaptive_plan(HEALTHY, [WorkerId(1, 1)])
    found = excerpts(plan, [WorkerId(0, 0), WorkerId(2, 1)])
    assert {str(worker): visited(excerpt) for worker, excerpt in found.items()} == {
        "0.0": "0.0 0.1 0.2 0.3 1.0 2.0 2.3",
        "2.1": "0.0 1.0 1.1 1.3 2.0 2.1 2.2 2.3",
    }
    for worker, excerpt in found.items():
        assert excerpt.placement == plan.placement
        assert excerpt.orders.rows == ((worker, plan.orders.of(worker)),)


def test_one_who_leaves_is_told_who_stays_and_no_order():
    plan = adaptive_plan(HEALTHY, [WorkerId(1, 1)])
    excerpt = excerpts(plan, [WorkerId(1, 1)])[WorkerId(1, 1)]
    assert (excerpt.workers, excerpt.orders.rows, visited(excerpt)) == (plan.workers, (), "0.0 1.0 2.0 2.3")


def test_listeners_chains_have_the_same_names_for_everybody():
    """These are beyond the index of any micro-batch, also of those that are in nobody's excerpt otherwise."""
    listener = WorkerId(9, 0)
    plan = with_listeners(HEALTHY, [(listener, split_evenly(2, 1)[0])])
    found = excerpts(plan, plan.workers)
    for worker, excerpt in found.items():
        assert lower_worker(excerpt, worker) == lower_worker(plan, worker)
    assert visited(found[listener]) == "0.0 1.0 2.0 2.3"


def test_where_all_must_know_who_runs_what_an_excerpt_has_all_routes_and_leads_to_the_same_program():
    for worker, excerpt in excerpts(HEALTHY, HEALTHY.workers, all_routes=True).items():
        assert (excerpt.routes, excerpt.orders.workers) == (HEALTHY.routes, (worker,))
        assert lower_worker(excerpt, worker) == lower_worker(HEALTHY, worker)
