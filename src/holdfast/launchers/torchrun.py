"""A job on nodes where something runs ``torchrun``: the script that this runs instead of a Python program."""

from __future__ import annotations

from holdfast.launchers.job import LaunchedJob, filled
from holdfast.launchers.node import node_script

__all__ = ["torchrun_script"]

_TEXT = """#!/bin/bash
# A job that goes on while nodes are gone. Made by: @MADE_BY@
# It is yours to change. To be called on each of @NODES@ nodes, of which R counts, from 0; HOST is number 0's:
#
#     torchrun --nnodes @NODES@ --node-rank R --master-addr HOST --nproc-per-node 1 --max-restarts 0 --no-python FILE
@SCRIPT@"""


def torchrun_script(job: LaunchedJob) -> str:
    """Returns the script; called again on a node, it takes part anew."""
    script = node_script(job, number='"$RANK"', address='"$MASTER_ADDR"', over=None)
    return filled(_TEXT, {"MADE_BY": job.made_by, "NODES": str(job.nodes), "SCRIPT": script})
