"""What runs on one of a job's nodes, which are numbered: one process, which is started again if it is killed."""

from __future__ import annotations

import shlex
import textwrap

from holdfast.launchers.job import LaunchedJob, filled

__all__ = ["NUMBER_0", "WHOEVER_SAW_IT", "node_script"]

_SCRIPT = r"""@VARIABLES@
holdfast=(setpriv --pdeathsig TERM "${holdfast[@]}")  # told to go if this script is gone
number=@NUMBER@ told="" pid=""
leave() {
    told=yes
    [ -z "$pid" ] || kill -s TERM "$pid"
}
trap leave TERM
until cd @FOLDER@; do
    [ -z "$told" ] || exit 143
    sleep 5
done
attempt() { cat "$run_dir/job-id" 2> /dev/null; }  # the one that was begun last
first=$(attempt)

begin() {
    @CERTIFICATES@
    exec @BEGIN@
}
take_part() {
    exec "${holdfast[@]}" agent --coordinator "$run_dir" --slots "$slots"
}
@FUNCTIONS@pause=5
while [ -z "$told" ]; do
    began=$SECONDS before=$(attempt)
    if [ "$number" -eq 0 ]; then begin & else take_part & fi
    pid=$!
    [ -z "$told" ] || kill -s TERM "$pid"
    wait "$pid"
    while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done  # a signal ends the wait, not the job
    wait "$pid"
    code=$?
    pid=""
    [ -z "$told" ] || break
    @ENDS@
    if [ $((SECONDS - began)) -gt 60 ]; then pause=5; fi
    echo "it has ended with exit code $code: again in $pause s"
    sleep "$pause" &
    pid=$!
    [ -z "$told" ] || kill -s TERM "$pid"
    wait "$pid"
    if [ "$pause" -lt 300 ]; then pause=$((2 * pause)); fi
done
@TOLD@
"""

_REPLACED = r"""case $code in
    75) exit 75 ;;  # its workers have left
    0) if @OVER@; then finish; fi ;;
    1 | 143)
        if [ "$number" -eq 0 ] && [ "$(attempt)" != "$before" ]; then
            case $(ended) in
                preempted) exit 0 ;;  # by holdfast stop
                ?*) exit 1 ;;
            esac
        fi
        ;;
esac"""

_FUNCTIONS = r"""ended() {  # how the job has; nothing if it goes on
    "${holdfast[@]}" status "$run_dir" --format json 2> /dev/null |
        sed -n 's/.*"phase":"ended".*"ended":"\([a-z-]*\).*/\1/p'
}
finish() {
    [ "$(ended)" = "done" ] || exit 0
    for _ in {1..3600}; do  # whoever has led the job to its end sums up, once its scripts have ended
        [ -z "$told" ] || exit 143
        [ ! -e "$run_dir/summary.json" ] || exit 0
        sleep 1
    done
    exit 0
}
"""

_TOLD = r"""case ${code:-0} in
    0 | 1) exit 143 ;;  # told behind an end that may not be the last
    *) exit "$code" ;;
esac"""

_ENDS_ITSELF, _TOLD_ITSELF = r'[ "$code" -eq 137 ] || exit "$code"', r'exit "${code:-143}"'

NUMBER_0 = '[ "$number" -eq 0 ]'
"""Number 0 alone can tell that nothing is to be done any more."""
WHOEVER_SAW_IT = f'{NUMBER_0} || {{ [ "$(attempt)" != "$first" ] && sleep 20; }}'
"""Others can, too, of an attempt that was begun while they were there, if number 0 does not within 20 s."""


def node_script(job: LaunchedJob, *, number: str, address: str, over: str | None) -> str:
    """Returns the script of bash that runs on each node.

    Number 0 begins the job, or takes part in it if it goes on without; on each of the others an agent runs. SIGTERM has
    the node's workers leave.

    Where another one is made of one that has ended, it ends with 0 once the job is over, or 1 if its program failed:
    so are all then. Else it ends with another code, 75 if its workers have left.

    Args:
        job: what is to run.
        number: a word of the shell: which of the nodes it is, from 0.
        address: a word of the shell: by which the others reach it.
        over: a condition of the shell, once the process on this node has ended well: whether nothing is to be done any
            more; None: no other one is made, and each node ends by itself as its process has.
    """
    ends = _ENDS_ITSELF if over is None else filled(_REPLACED, {"OVER": over})
    parts = {
        "FUNCTIONS": "" if over is None else _FUNCTIONS,
        "VARIABLES": job.variables,
        "FOLDER": shlex.quote(str(job.folder)),
        "NUMBER": number,
        "CERTIFICATES": textwrap.indent(job.make_certificates, "    ").strip() or ":",
        "BEGIN": textwrap.indent(job.begin(listen=address, options="--notice leave"), "    ").strip(),
        "ENDS": textwrap.indent(ends, "    ").strip(),
        "TOLD": _TOLD_ITSELF if over is None else _TOLD,
    }
    return filled(_SCRIPT, parts)
