"""Public test tools: a whole job under a virtual clock, faults at random, and what a trace must be.

>>> from holdfast.core.builders import regular_plan
>>> from holdfast.core.faults import Fault
>>> from holdfast.core.placement import split_evenly
>>> from holdfast.testing import VirtualCluster
>>> plan = regular_plan(2, split_evenly(4, 2), 3)
>>> healthy = VirtualCluster(plan, steps=5).run()
>>> struck = VirtualCluster(plan, steps=5, seed=1, faults=[Fault.parse("kill:1.1@2:backward")]).run()
>>> struck.fired, struck.digest == healthy.digest
(('kill:1.1@2:backward',), True)
"""

from __future__ import annotations

from holdfast.testing.fault_plans import random_faults
from holdfast.testing.traces import trace_faults
from holdfast.testing.virtual import Delays, Pause, VirtualCluster, VirtualResult

__all__ = ["Delays", "Pause", "VirtualCluster", "VirtualResult", "random_faults", "trace_faults"]
