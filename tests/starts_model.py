"""A model for CP-SAT with a variable for every start: slow, but plain, to hold against it what counting proves."""

from itertools import pairwise

from ortools.sat.python import cp_model

from holdfast.planning.solvers.child import Given


def least(given):
    """The least period, or makespan, of a problem of ``given_of``, in its units."""
    model = _Model(given)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    assert solver.solve(model.model) == cp_model.OPTIMAL
    return round(solver.objective_value)


class _Model:
    def __init__(self, given):
        self._p, self._shared = given, Given(given)
        self._visits, self._kinds = self._shared.visits, 2 if given["coupled"] else 3
        self._ends = {stop - 1 for _, stop in given["journeys"]}
        numbers = range(self._kinds * self._visits)
        self._horizon = sum(map(self._length, numbers)) + 2 * sum(map(self._delay, range(self._visits)))
        self.model = cp_model.CpModel()
        self._starts = [self._variable() for _ in numbers]
        self._add_needs()
        for worker, row in self._shared.visits_of_workers().items():
            self._add_worker(row)
            self._add_memory(given["room"][self._shared.group_of(worker)], row)
        self._add_interchangeable()
        self._add_objective()

    def _variable(self):
        return self.model.new_int_var(0, self._horizon, "")

    def _length(self, number):
        kind, visit = divmod(number, self._visits)
        return self._p["durations"][kind][self._shared.part[visit]]

    def _delay(self, visit):
        return self._p["comm"][self._shared.part[visit]]

    def _end(self, number):
        return self._starts[number] + self._length(number)

    def _add_needs(self):
        for visit in range(self._visits):
            back = visit + self._visits
            if visit not in self._ends:
                delay = self._delay(visit)
                self.model.add(self._starts[visit + 1] >= self._end(visit) + delay)
                self.model.add(self._starts[back] >= self._end(back + 1) + delay)
            else:
                self.model.add(self._starts[back] >= self._end(visit))
            if self._kinds == 3:
                self.model.add(self._starts[back + self._visits] >= self._end(back))

    def _add_worker(self, row):
        numbers = [visit + kind * self._visits for visit in row for kind in range(self._kinds)]
        self.model.add_no_overlap(
            [
                self.model.new_fixed_size_interval_var(self._starts[number], self._length(number), "")
                for number in numbers
            ]
        )

    def _add_memory(self, room, row):
        if room is None:
            return
        spans, demands = [], []
        for visit in row:
            takes, gives_input, gives_weight = self._p["memory"][self._shared.part[visit]]
            back = visit + self._visits
            last = back + (self._kinds - 2) * self._visits
            kept = takes - gives_input - gives_weight
            for demand, end in ((gives_input, self._end(back)), (gives_weight, self._end(last)), (kept, self._horizon)):
                stop = self._variable()
                self.model.add(stop == end)
                spans.append(self.model.new_interval_var(self._starts[visit], self._variable(), stop, ""))
                demands.append(demand)
        self.model.add_cumulative(spans, demands, room)

    def _add_interchangeable(self):
        """Micro-batches with equal routes keep the order of their numbers: else they would exchange names."""
        for route, entries in self._shared.routes().items():
            offsets = [kind * self._visits + place for kind in range(self._kinds) for place in range(len(route))]
            for before, entry in pairwise(entries):
                for offset in offsets:
                    self.model.add(self._starts[entry + offset] >= self._end(before + offset))

    def _add_objective(self):
        value = self.model.new_int_var(0, 2 * self._horizon + max(self._p["optimizer"]), "")
        ends = [self._end(visit + (self._kinds - 1) * self._visits) for visit in range(self._visits)]
        if not self._p["staggered"]:
            for end in ends:
                self.model.add(value >= end)
        for opening, waits_for, step in self._p["windows"] if self._p["staggered"] else ():
            first = self._variable()
            for visit, worker in enumerate(self._p["worker_of"]):
                group = self._shared.group_of(worker)
                if group == opening:
                    self.model.add(first <= self._starts[visit])
                if group in waits_for:
                    self.model.add(value >= ends[visit] + step - first)
        self.model.minimize(value)
