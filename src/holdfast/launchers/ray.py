"""A job on a Ray cluster: an actor on each of its nodes, made anew elsewhere when its node is gone."""

from __future__ import annotations

import hashlib

from holdfast.launchers.job import LaunchedJob, filled
from holdfast.launchers.node import WHOEVER_SAW_IT, node_script

__all__ = ["ray_program"]

_TEXT = r"""# A job that goes on while nodes of a Ray cluster come and go. Made by: @MADE_BY@
# It is yours to change. Called on the cluster, or by ray job submit, it has Ray start what does not run yet, and ends.
# holdfast stop ends the job.

import contextlib
import logging
import os
import subprocess
import threading
import time

try:
    import ray
except ImportError:
    raise SystemExit("Ray is not installed here; expected what the cluster has: pip install ray") from None
from ray.util import get_node_ip_address, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NAME = @NAME@  # of this run directory
NODES = @NODES@
CPUS, GPUS = @CPUS@, @GPUS@  # on each of them

# What runs on a node.
SCRIPT = r'''
@SCRIPT@
'''


@ray.remote(max_restarts=-1)
class Node:
    # If its node is gone, Ray makes it anew on another one, and that takes part.
    def __init__(self, number):
        here = ray.get_runtime_context().get_node_id()
        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        name = names.get(here, here[:8])
        more = {"NUMBER": str(number), "ADDRESS": get_node_ip_address(), "HOLDFAST_NODE": name}
        # When this process is gone, the script is told to end.
        line = ["setpriv", "--pdeathsig", "TERM", "bash", "-c", SCRIPT]
        self.script = subprocess.Popen(line, env={**os.environ, **more}, stdin=subprocess.DEVNULL)
        threading.Thread(target=self.follow, args=(number,), daemon=True).start()

    def follow(self, number):
        code = self.script.wait()
        print(f"{NAME}: the script of number {number} has ended with exit code {code}", flush=True)
        while code in (0, 1):  # the job is over: all actors in the group end with it, this one, too
            with contextlib.suppress(Exception):  # Ray may not answer just now
                remove_placement_group(get_placement_group(NAME))
            time.sleep(5)
        if code != 75:  # else its workers have left: it waits until its node is gone
            time.sleep(5)
            os._exit(1)  # Ray makes it anew


if __name__ == "__main__":
    logging.getLogger("ray.actor").setLevel(logging.ERROR)  # it warns that actors end with their group; they are to
    ray.init(address="auto", namespace="holdfast", logging_level=logging.WARNING, log_to_driver=False)
    each = {"CPU": CPUS, "GPU": GPUS} if GPUS else {"CPU": CPUS}
    try:
        group = get_placement_group(NAME)
    except ValueError:
        group = placement_group([each] * NODES, strategy="STRICT_SPREAD", name=NAME, lifetime="detached")
    if len(group.bundle_specs) != NODES:
        raise SystemExit(f"{NAME}: runs on {len(group.bundle_specs)} nodes; end it by holdfast stop first")
    for number in range(NODES):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        Node.options(
            name=f"{NAME}-{number}",
            get_if_exists=True,
            lifetime="detached",
            num_cpus=CPUS,
            num_gpus=GPUS,
            scheduling_strategy=where,
        ).remote(number)
    if group.wait(10):
        print(f"{NAME}: runs on {NODES} nodes")
    else:
        print(f"{NAME}: begins as soon as Ray has {NODES} nodes with {each} left on each")
"""


def ray_program(job: LaunchedJob) -> str:
    """Returns the program of Python."""
    script = node_script(job, number='"$NUMBER"', address='"$ADDRESS"', over=WHOEVER_SAW_IT)
    parts = {
        "MADE_BY": job.made_by,
        "NAME": repr(f"{job.name}-{hashlib.sha256(str(job.run_dir).encode()).hexdigest()[:8]}"),
        "NODES": str(job.nodes),
        "CPUS": str(job.slots),
        "GPUS": str(job.slots if job.gpus else 0),
        "SCRIPT": script.strip(),
    }
    return filled(_TEXT, parts)
