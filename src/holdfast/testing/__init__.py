"""Public test tools: a whole job under a virtual clock, faults at random, and what a trace must be.

>>> from dataclasses import replace
>>> from holdfast.schedule.builders import regular_plan
>>> from holdfast.core.faults import Fault
>>> from holdfast.core.placement import split_evenly
>>> from holdfast.testing import Scenario, VirtualCluster
>>> job = Scenario(plan=regular_plan(2, split_evenly(4, 2), 3), steps=5)
>>> healthy = VirtualCluster(job).run()
>>> struck = VirtualCluster(replace(job, seed=1, faults=(Fault.parse("kill:1.1@2:backward"),))).run()
>>> struck.fired, struck.digest == healthy.digest
(('kill:1.1@2:backward',), True)
"""

from __future__ import annotations

from holdfast.testing.fault_plans import random_faults
from holdfast.testing.scenario import Delays, Pause, Scenario, VirtualResult
from holdfast.testing.traces import trace_faults
from holdfast.testing.virtual import VirtualCluster

__all__ = ["Delays", "Pause", "Scenario", "VirtualCluster", "VirtualResult", "random_faults", "trace_faults"]
