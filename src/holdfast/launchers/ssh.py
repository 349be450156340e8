"""A job on machines that ssh reaches: on each a process that begins the job, or takes part in it, detached from us."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from holdfast.launchers.job import LaunchedJob, filled

__all__ = ["ssh_script"]

_TEXT = r"""#!/bin/bash
# A job on machines each of which may be gone at any time. Made by: @MADE_BY@
# It is yours to change. Called again it starts what does not run, and the job goes on; holdfast stop ends it.
hosts=(@HOSTS@)  # the first one begins the job; all see @FOLDER@
ssh=(ssh@OPTIONS@ -o BatchMode=yes)

# What runs on a machine: one process, which is started again if it is killed.
on_machine() {
    @VARIABLES@
    cd @FOLDER@ || exit
    exec 9> ".$name-$host.lock"
    flock -n -E 99 9
    case $? in
        0) ;;
        99) echo "$host: runs already" && exit 0 ;;
        *) exit 1 ;;
    esac
    begin() {
        @CERTIFICATES@
        exec @BEGIN@
    }
    take_part() {
        exec "${holdfast[@]}" agent --coordinator "$run_dir" --slots "$slots" --node "$host"
    }
    supervise() {
        code=137
        while [ "$code" -eq 137 ]; do
            (if [ "$host" = "$first" ]; then begin; else take_part; fi)
            code=$?
            sleep 1
        done
    }
    export HOLDFAST_NODE=$host
    setsid nohup bash -c "$(declare -p name host first holdfast run_dir slots)
        $(declare -f begin take_part supervise); supervise" >> "$name-$host.log" 2>&1 < /dev/null &
    echo "$host: started, and writes into $name-$host.log"
}
name=@NAME@
first=${hosts[0]#*@}
failed=0
for each in "${hosts[@]}"; do
    host=${each#*@}
    "${ssh[@]}" "$each" bash -s <<< "$(declare -p name host first); $(declare -f on_machine); on_machine" || {
        echo "$each: nothing was started there" >&2
        failed=1
    }
done
exit "$failed"
"""


def ssh_script(job: LaunchedJob, hosts: Sequence[str]) -> str:
    """Returns the script, to be called where ``ssh`` reaches these hosts without asking for anything.

    Args:
        job: what is to run.
        hosts: ``HOST`` or ``USER@HOST``; by ``HOST`` all others reach it, too.
    """
    parts = {
        "MADE_BY": job.made_by,
        "HOSTS": shlex.join(hosts),
        "OPTIONS": "".join(f" {shlex.quote(option)}" for option in job.options),
        "VARIABLES": textwrap.indent(job.variables, "    ").strip(),
        "FOLDER": shlex.quote(str(job.folder)),
        "CERTIFICATES": textwrap.indent(job.make_certificates, "        ").strip() or ":",
        "BEGIN": textwrap.indent(job.begin(listen='"$host"'), "        ").strip(),
        "NAME": shlex.quote(job.name),
    }
    return filled(_TEXT, parts)
