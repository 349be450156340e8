"""What runs on one of a job's nodes, which are numbered: one process, which is started again if it is killed."""

from __future__ import annotations

import shlex
import textwrap

from holdfast.launchers.job import LaunchedJob, filled

__all__ = ["node_script"]

_SCRIPT = r"""@VARIABLES@
holdfast=(setpriv --pdeathsig TERM "${holdfast[@]}")  # told to go if this script is gone
cd @FOLDER@ || exit

number=@NUMBER@ told="" pid=""
leave() {
    told=yes
    [ -z "$pid" ] || kill -s TERM "$pid"
}
trap leave TERM

begin() {
    @CERTIFICATES@
    exec @BEGIN@
}
take_part() {
    exec "${holdfast[@]}" agent --coordinator "$run_dir" --slots "$slots"
}
while [ -z "$told" ]; do
    if [ "$number" -eq 0 ]; then begin & else take_part & fi
    pid=$!
    wait "$pid"
    while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done  # a signal ends the wait, not the job
    wait "$pid"
    code=$?
    @ENDS@
    sleep 5
done
[ "${code:-0}" -ne 0 ] || code=143  # told behind an end that may not be the last: another one is to be made
exit "$code"
"""

_REPLACED = r"""[ "$code" -ne 75 ] || exit 75  # its workers have left
# Only number 0 ends well, and by that all: behind any other end the job may go on, and the others have to be there.
if [ "$number" -eq 0 ] && [ -z "$told" ]; then
    case $code in
        143) exit 0 ;;  # holdfast stop
        0)
            for _ in {1..60}; do  # whoever has led the job to its end sums up
                [ ! -e "$run_dir/summary.json" ] || break
                sleep 1
            done
            exit 0
            ;;
        1) exit 1 ;;
    esac
fi"""

_ENDS_ITSELF = r'[ "$code" -eq 137 ] || exit "$code"'


def node_script(job: LaunchedJob, *, number: str, address: str, replaced: bool) -> str:
    """Returns the script of bash that runs on each node.

    Number 0 begins the job, or takes part in it if it goes on without; on each of the others an agent runs. SIGTERM has
    the node's workers leave.

    Args:
        job: what is to run.
        number: a word of the shell: which of the nodes it is, from 0.
        address: a word of the shell: by which the others reach it.
        replaced: whether one that has ended is made anew, and whether all are ended once number 0 has ended well;
            otherwise each ends by itself when the job has.
    """
    parts = {
        "VARIABLES": job.variables,
        "FOLDER": shlex.quote(str(job.folder)),
        "NUMBER": number,
        "CERTIFICATES": textwrap.indent(job.make_certificates, "    ").strip() or ":",
        "BEGIN": textwrap.indent(job.begin(listen=address, options="--notice leave"), "    ").strip(),
        "ENDS": textwrap.indent(_REPLACED if replaced else _ENDS_ITSELF, "    ").strip(),
    }
    return filled(_SCRIPT, parts)
