"""A job on Slurm: the script that ``sbatch`` takes, for an allocation of which nodes may fail."""

from __future__ import annotations

import math
import shlex
import textwrap

from holdfast.launchers.job import LaunchedJob, filled

__all__ = ["slurm_script"]

_HERE = '"$(hostname)"'
_LEAST_NOTICE_S = 60
_BEYOND_S = 60
"""Slurm's signal may come this much late, and workers end after their checkpoint."""

_TEXT = r"""#!/bin/bash
# A job that goes on while nodes of its allocation fail. Made by: @MADE_BY@
# It is yours to change. sbatch submits it, again and again: it goes on from its last checkpoint.
@OPTIONS@
@VARIABLES@
first=$SLURMD_NODENAME
before=$(cat "$run_dir/job-id" 2> /dev/null)  # of the attempt before this one
cd @FOLDER@ || exit

told="" begun=""
pass_on() {
    told=$1
    [ -z "$begun" ] || kill -s "$1" "$begun"
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
@CERTIFICATES@
# On each of the other nodes, in a step of its own, as one of several nodes can end when some of these fail: an agent,
# which finds the job by its run directory. One that is killed is started again.
take_part() {
    local code=137 told=""
    trap 'told=yes' TERM USR1 USR2  # notices are for the agent, whose workers leave
    while [ "$code" -eq 137 ] && [ -z "$told" ]; do
        "${holdfast[@]}" agent --coordinator "$run_dir" --slots "$slots"
        code=$?
        sleep 1
    done
    [ "$code" -ne 75 ] || return 75  # it has left, and the job goes on elsewhere
    # If the first node is gone, its script ends the allocation no more: the last of us does.
    local running=(squeue -h -j "$SLURM_JOB_ID" -t RUNNING -o %i)
    while [ -n "$("${running[@]}")" ] && [ -z "$("${running[@]}" -w "$first")" ]; do
        local alive steps
        alive=$(squeue -h -j "$SLURM_JOB_ID" -o %N)
        steps=$(squeue -h -s -j "$SLURM_JOB_ID" -w "$alive" -o %i | sed -n 's/.*[.]\([0-9][0-9]*\)$/\1/p' | sort -n)
        if [ "$steps" = "$SLURM_STEP_ID" ]; then
            if [ "$code" -eq 0 ] || [ "$code" -eq 93 ]; then scancel "$SLURM_JOB_ID"; else @NOT_DONE@; fi
        fi
        [ "${steps##*$'\n'}" = "$SLURM_STEP_ID" ] || break
        sleep 5
    done
    return "$code"
}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit
agents=()
for node in $nodes; do
    [ "$node" != "$first" ] || continue
    srun --nodelist="$node" --nodes=1 --ntasks=1 --cpus-per-task="$slots" --export=ALL \
        --output="%x-%j-$node.%t.log" --open-mode=append \
        bash -c "$(declare -p holdfast run_dir slots first); $(declare -f take_part); take_part" &
    agents+=($!)
done

# On this node: the job is begun, or goes on where it was. If it is killed and others go on, this takes part as they do.
begin() {
@BEGIN@
}
code=137
while [ "$code" -eq 137 ] && [ -z "$told" ]; do
    begin &
    begun=$!
    wait "$begun"
    code=$?
    while [ -n "$told" ] && kill -0 "$begun" 2> /dev/null; do  # a signal ends the wait, not the job
        wait "$begun"
        code=$?
    done
done
if [ "$code" -eq 75 ] && [ -z "$told" ]; then  # this node has left (holdfast drain), and the job goes on on the others
    for agent in "${agents[@]}"; do
        wait "$agent"
        case $? in
            0) code=0 ;;
            93) [ "$code" -eq 0 ] || code=3 ;;
        esac
    done
fi
begun_here=$([ "$(cat "$run_dir/job-id" 2> /dev/null)" = "$before" ] || echo yes)
if { [ "$code" -eq 0 ] || [ "$code" -eq 93 ]; } && [ -n "$begun_here" ]; then
    wait "${agents[@]}"  # whoever has led to the end sums up, and scripts may be at work behind their loop
fi
@AGAIN@exit "$code"
"""

_AGAIN = r"""if [ "$code" -eq 3 ] || [ "$code" -eq 138 ] || { [ "$told" = USR1 ] && [ "$code" -ne 0 ]; }; then
    # Too much was lost at once, or this allocation is over: the job goes on from its last checkpoint in another one.
    # If no step was done in this one, it would be the same again and again.
    if [ -n "$begun_here" ] && grep -qs '"event":"step"' "$run_dir"/{,node-*/}events*.jsonl; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
"""


def slurm_script(job: LaunchedJob) -> str:
    """Returns the script, for ``sbatch``.

    The first node begins the job, and agents run on the others; a node that fails, the first one, too, is taken out of
    the allocation, and the job goes on.
    """
    parts = {
        "MADE_BY": job.made_by,
        "OPTIONS": "\n".join(_options(job)),
        "VARIABLES": job.variables,
        "FOLDER": shlex.quote(str(job.folder)),
        "CERTIFICATES": job.make_certificates and f"\n{job.make_certificates}",
        "BEGIN": textwrap.indent(f"exec {job.begin(listen=_HERE)}", "    "),
        "NOT_DONE": f'{"scancel" if job.notice_s is None else "scontrol requeue"} "$SLURM_JOB_ID"',
        "AGAIN": "" if job.notice_s is None else _AGAIN,
    }
    return filled(_TEXT, parts)


def _options(job: LaunchedJob) -> list[str]:
    lines = [f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={job.slots}"]
    if job.gpus:
        lines.append(f"--gpus-per-node={job.slots}")
    lines += ["--output=%x-%j.log", "--open-mode=append", "--no-kill  # nodes that fail do not end the job"]
    if job.notice_s is None:
        lines.append("--no-requeue  # it makes no checkpoints to go on from")
    else:
        seconds = max(_LEAST_NOTICE_S, math.ceil(job.notice_s)) + _BEYOND_S
        lines += ["--requeue", f"--signal=B:USR1@{seconds}  # so long before the time is over, a checkpoint is made"]
    return [f"#SBATCH {line}" for line in (*lines, *job.options)]
