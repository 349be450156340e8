"""A job on Kubernetes: an Indexed Job each of whose pods may be gone at any time, and is made anew elsewhere."""

from __future__ import annotations

import json
import math
import re
import textwrap
from dataclasses import dataclass

from holdfast.launchers.job import LaunchedJob, filled
from holdfast.launchers.node import NUMBER_0, node_script

__all__ = ["Pods", "kubernetes_manifest"]

_LEAST_GRACE_S = 30
_BEYOND_S = 30
"""Processes end behind a checkpoint."""
_SHARED, _SILENT_S = "shared", 10

_MANIFEST = """\
# A job that goes on while pods and nodes come and go. Made by: @MADE_BY@
# It is yours to change. kubectl apply starts it; kubectl delete has it make a checkpoint, and applied again it goes on.
apiVersion: batch/v1
kind: Job
metadata:
  name: @NAME@
spec:
  completionMode: Indexed
  completions: @NODES@
  parallelism: @NODES@
  backoffLimitPerIndex: 1000000  # a pod that has ended is made anew, however often that may be
  podReplacementPolicy: TerminatingOrFailed  # also if its node is silent, and it may live
  successPolicy:  # Kubernetes 1.31
    rules:
    - succeededIndexes: "0"  # its pod ends when the job has
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: @GRACE_S@  # for a checkpoint, if nobody else has its workers' layers
      affinity:
        podAntiAffinity:  # on a node each: what fails together is one node, as Holdfast sees it
          requiredDuringSchedulingIgnoredDuringExecution:
          - topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                job-name: @NAME@
      tolerations:  # another pod is made @SILENT_S@ s after Kubernetes has noticed that a node is silent, not 300
      - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: @SILENT_S@}
      - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: @SILENT_S@}
      containers:
      - name: holdfast
        image: @IMAGE@
        env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        command: [bash, -c]
        args:
        - |
@SCRIPT@
        resources:
          requests:
            cpu: "@SLOTS@"
@LIMITS@        volumeMounts:
        - {name: @SHARED@, mountPath: @MOUNT@}
        - {name: memory, mountPath: /dev/shm}
      volumes:
      - {name: @SHARED@, persistentVolumeClaim: {claimName: @CLAIM@}}  # ReadWriteMany
      - {name: memory, emptyDir: {medium: Memory}}  # for data loaders
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """What pods are made of.

    Attributes:
        image: that has Holdfast.
        claim: a PersistentVolumeClaim that all may mount at once (ReadWriteMany).
        mount: where they do; the job's folder and its run directory are below it.
    """

    image: str
    claim: str
    mount: str


def kubernetes_manifest(job: LaunchedJob, pods: Pods) -> str:
    """Returns the manifest, for ``kubectl apply``.

    Any of its pods may be evicted, and its workers leave. What was killed in one is started again there, as the Job
    waits longer each time before it makes another.
    """
    script = node_script(job, number='"$JOB_COMPLETION_INDEX"', address='"$POD_IP"', over=NUMBER_0)
    grace_s = max(_LEAST_GRACE_S, math.ceil(job.notice_s or 0)) + _BEYOND_S
    limits = f"          limits:\n            nvidia.com/gpu: {job.slots}\n" if job.gpus else ""
    return filled(
        _MANIFEST,
        {
            "MADE_BY": job.made_by,
            "NAME": _quoted(_name(job.name)),
            "NODES": str(job.nodes),
            "GRACE_S": str(grace_s),
            "SILENT_S": str(_SILENT_S),
            "IMAGE": _quoted(pods.image),
            "SCRIPT": textwrap.indent(script.rstrip(), 10 * " "),
            "SLOTS": str(job.slots),
            "LIMITS": limits,
            "SHARED": _SHARED,
            "MOUNT": _quoted(pods.mount),
            "CLAIM": _quoted(pods.claim),
        },
    )


def _quoted(text: str) -> str:
    """A scalar of YAML, whatever it may begin with."""
    return json.dumps(text)


def _name(job: str) -> str:
    """Of a Job, whose pods are called by it and their number: letters, digits and dashes, 50 of them at most."""
    return re.sub(r"[^a-z0-9]+", "-", job.lower())[:50].strip("-") or "holdfast"
