"""The job file as typed values: every key, its default and its range."""

from __future__ import annotations

import math
import sys
from typing import Annotated, Any, Literal

import msgspec

from holdfast.core.ids import Batch, WorkerId

__all__ = [
    "BertModel",
    "BreastCancerData",
    "Checkpoint",
    "Control",
    "ConvnetModel",
    "Data",
    "DigitsData",
    "GptModel",
    "Grid",
    "Job",
    "LOGGED",
    "LOSSY",
    "Logging",
    "LossScaleSettings",
    "ModelSettings",
    "Nt3Data",
    "Nt3Model",
    "Optimizer",
    "PipelineLayout",
    "PythonData",
    "PythonModel",
    "Resilience",
    "ResnetModel",
    "ScriptData",
    "ScriptModel",
    "TextData",
    "TinyImageNetData",
    "Tls",
    "Train",
    "VitModel",
]

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Gpus = Annotated[int, msgspec.Meta(ge=1, le=1_000)]
Spares = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """Base of all sections: immutable, unknown keys are refused."""


class _Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the sections without a kind."""


FIRST_INTERVAL = 10
"""Steps until the first checkpoint of a job that sets its interval by what they cost."""
LOGGED = ("auto", "adaptive")
"""The strategies that replay layers without a living owner from logs, where there are any."""
LOSSY = ("lossy-forward", "rollback", "skip")
"""The strategies that end an interrupted step with other weights than without a failure, for data parallelism."""
Checkpointed = bool | tuple[Count, ...]
"""Layers that keep only their input and are run again for their backward pass: all, none, or those of these indices."""


class _OverBytes(_Section, frozen=True, kw_only=True):
    """Base of the transformers over bytes of texts."""

    layers: Positive = 8
    width: Positive = 128
    heads: Positive = 4
    context: Positive = 128
    dropout: Fraction = 0.1
    checkpoint_activations: Checkpointed = False


class GptModel(_OverBytes, tag="gpt", frozen=True, kw_only=True):
    """A byte-level GPT; its output head shares the token embedding's weight."""


class BertModel(_OverBytes, tag="bert", frozen=True, kw_only=True):
    """A byte-level BERT that guesses masked bytes of texts; its output head shares the token embedding's weight."""


class VitModel(_Section, tag="vit", frozen=True, kw_only=True):
    """A small vision transformer, for 8x8 images, of square patches of ``patch`` pixels a side."""

    layers: Positive = 4
    width: Positive = 64
    heads: Positive = 4
    patch: Literal[1, 2, 4, 8] = 2
    dropout: Fraction = 0.1
    checkpoint_activations: Checkpointed = False


class ConvnetModel(_Section, tag="convnet", frozen=True, kw_only=True):
    """A small convolutional net with batch-norm, for 8x8 images."""

    width: Positive = 16
    checkpoint_activations: Checkpointed = False


class ResnetModel(_Section, tag="resnet", frozen=True, kw_only=True):
    """A residual network with batch-norm: ``depth`` small, of ``width`` channels at first, or 50, of 64 as published.

    ``width``: 8 for a small one unless told.
    """

    depth: Literal["small", 50] = "small"
    width: Positive | None = None
    checkpoint_activations: Checkpointed = False

    def __post_init__(self) -> None:
        if self.depth == 50 and self.width is not None:
            raise ValueError(f"Expected no width with depth 50, which has 64 channels at first, got {self.width}")


class Nt3Model(_Section, tag="nt3", frozen=True, kw_only=True):
    """CANDLE's NT3, a 1-D convolutional classifier; ``width`` channels, 128 as published."""

    width: Positive = 128
    checkpoint_activations: Checkpointed = False


class PythonModel(_Section, tag="python", frozen=True, kw_only=True):
    """One's own model: ``target`` names a function that returns the ordered list of modules.

    ``target`` and ``loss`` are ``package.module:name`` or ``path/to/file.py:name``.
    """

    target: str
    loss: str | None = None
    arguments: dict[str, Any] = {}
    checkpoint_activations: Checkpointed = False


class ScriptModel(_Section, tag="script", frozen=True, kw_only=True):
    """Whatever the script ``path``, run with ``arguments``, gives to ``holdfast.session().prepare``."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: tuple[str, ...] = ()


class TextData(_Section, tag="text", frozen=True, kw_only=True):
    """Bytes of text files: ``stdlib`` (Python's own sources), a file, a folder or a glob."""

    path: str


class DigitsData(_Section, tag="digits", frozen=True, kw_only=True):
    """scikit-learn's handwritten digits."""


class TinyImageNetData(_Section, tag="tinyimagenet", frozen=True, kw_only=True):
    """The training images of TinyImageNet, in the folder ``path`` in which it was unpacked."""

    path: Annotated[str, msgspec.Meta(min_length=1)]


class BreastCancerData(_Section, tag="breast-cancer", frozen=True, kw_only=True):
    """scikit-learn's breast-cancer data: 30 values each, standardised, as one channel."""


class Nt3Data(_Section, tag="nt3", frozen=True, kw_only=True):
    """Gene expressions in the CSV file ``path`` of CANDLE's NT3: 0 or 1, then the values."""

    path: Annotated[str, msgspec.Meta(min_length=1)]


class PythonData(_Section, tag="python", frozen=True, kw_only=True):
    """One's own map-style dataset: ``target`` names a function that returns it."""

    target: str
    arguments: dict[str, Any] = {}


class ScriptData(_Section, tag="script", frozen=True, kw_only=True):
    """Whatever the script of the model gives to ``holdfast.session().steps``."""


ModelSettings = GptModel | BertModel | ConvnetModel | VitModel | ResnetModel | Nt3Model | PythonModel | ScriptModel
Data = TextData | DigitsData | TinyImageNetData | BreastCancerData | Nt3Data | PythonData | ScriptData


class PipelineLayout(_Plain, frozen=True, kw_only=True, omit_defaults=True):
    """One pipeline: how many layers and how many ``gpus`` each of its ``stages`` has, and its ``microbatches``.

    ``gpus``: one number per stage; empty: one GPU each.
    """

    stages: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
    microbatches: Positive
    gpus: tuple[Gpus, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus and len(self.gpus) != len(self.stages):
            raise ValueError(
                f"Expected gpus to be one number per stage, {len(self.stages)} of them, got {len(self.gpus)}"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """How many GPUs stage 0, 1, ... has."""
        return self.gpus or (1,) * len(self.stages)


class Grid(_Plain, frozen=True, kw_only=True):
    """The healthy grid; ``microbatches`` per pipeline. ``workers_per_node``: consecutive workers that fail together.

    ``gpus_per_stage``: with ``numerics: exact`` a stage is so many workers of one node, which hold the same layers and
    take a pipeline's micro-batches by turns; with ``fast`` it is one worker whose layers are sharded over so many
    processes, which share the samples of each micro-batch.

    ``layout``, in place of ``pipelines``, ``stages`` and ``microbatches``: pipelines that are not all alike.
    """

    pipelines: Positive | msgspec.UnsetType = msgspec.UNSET
    stages: Positive | msgspec.UnsetType = msgspec.UNSET
    microbatches: Positive | msgspec.UnsetType = msgspec.UNSET
    layout: tuple[PipelineLayout, ...] = ()
    gpus_per_stage: Gpus = 1
    microbatch_size: Positive = 1
    workers_per_node: Positive = 1

    def __post_init__(self) -> None:
        alike = {"pipelines": self.pipelines, "stages": self.stages, "microbatches": self.microbatches}
        given = [name for name, value in alike.items() if value is not msgspec.UNSET]
        if len(given) < len(alike) and not self.layout:
            missing = ", ".join(name for name in alike if name not in given)
            raise ValueError(f"Expected pipelines, stages and microbatches, or layout instead; missing: {missing}")
        if given and self.layout:
            raise ValueError(
                f"Expected either pipelines, stages and microbatches or layout, got {given[0]} and layout (an empty "
                "layout is none)"
            )
        if self.layout and self.gpus_per_stage > 1:
            raise ValueError("Expected the gpus of each stage in layout, got gpus_per_stage and layout")

    @property
    def depths(self) -> tuple[int, ...]:
        """How many stages pipeline 0, 1, ... has."""
        return tuple(len(each.stages) for each in self.layout) or (self.stages or 0,) * (self.pipelines or 0)

    @property
    def batch(self) -> Batch:
        """The micro-batches of a step."""
        counts = tuple(each.microbatches for each in self.layout)
        return Batch(counts or (self.microbatches or 0,) * (self.pipelines or 0))

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """How many GPUs each stage of pipeline 0, 1, ... has."""
        alike = ((self.gpus_per_stage,) * (self.stages or 0),) * (self.pipelines or 0)
        return tuple(each.widths for each in self.layout) or alike


class Optimizer(_Plain, frozen=True, kw_only=True):
    """``kind``: sgd, adam, adamw, lamb, or ``package.module:name`` of a function from parameters to an optimizer.

    ``nesterov`` and ``dampening`` are for sgd with momentum, ``amsgrad`` for adam and adamw.
    """

    kind: str = "adamw"
    lr: PositiveFloat = 3.0e-4
    weight_decay: NonNegative = 0.0
    momentum: Fraction = 0.0
    nesterov: bool = False
    dampening: Fraction = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1.0e-8
    amsgrad: bool = False
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Count = 0


class LossScaleSettings(_Plain, frozen=True, kw_only=True):
    """``initial``: what the loss is multiplied by at first, a power of two; it is halved by every step that is omitted
    and doubled after ``growth_every`` steps in a row that counted.
    """

    initial: float = 65536.0
    growth_every: Positive = 2000

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= 2.0**64 or math.frexp(self.initial)[0] != 0.5:
            raise ValueError(f"Expected initial to be a power of two from 1 to 2^64, got {self.initial}")


class Train(_Plain, frozen=True, kw_only=True):
    """``numerics``: exact (same bits on any grid, whatever fails) or fast (fp32 sums).

    ``technique``: how steps are scheduled: ``gpipe``; ``1f1b``; ``decoupled``, with the two halves of the backward pass
    apart; ``staggered``, in which each layer is updated as soon as its own gradients are reduced, besides. The plans of
    these two come from the planner. ``profile``: a file of `holdfast profile` that tells it what each layer costs;
    without one all cost the same. ``in_flight``: micro-batches that a worker may hold at once, from the start of F to
    the end of W; default: twice as many as stages.

    ``loss_scale``: for models in half precision; null scales no loss. ``audit_every``: of so many steps in a row one
    has a (layer, micro-batch) that another owner of the layer computes a second time, and is committed only if the bits
    are the same; as often the owners of each layer compare it. 0: none; it needs ``numerics: exact``.
    """

    steps: Positive
    seed: Count = 0
    numerics: Literal["exact", "fast"] = "exact"
    clip_norm: PositiveFloat | None = None
    loss_scale: LossScaleSettings | None = None
    technique: Literal["1f1b", "gpipe", "decoupled", "staggered"] = "1f1b"
    profile: str | None = None
    in_flight: Positive | None = None
    audit_every: Count = 0

    def __post_init__(self) -> None:
        if self.audit_every and self.numerics == "fast":
            raise ValueError(
                f"Expected numerics to be exact with audit_every {self.audit_every}, got fast, which does not promise "
                "that owners of a layer have the same bits"
            )


class Resilience(_Plain, frozen=True, kw_only=True):
    """``strategy``: what answers a loss; ``auto`` is ``adaptive``; ``templates`` does the same and then makes other
    pipelines of whoever is left, by handing layers over while all train; ``checkpoint-restart`` and ``checkfreq`` start
    a new process and go back to the last checkpoint, ``snapshots`` goes back to copies in memory, all for comparison.
    Three end in other weights than the run without failures: ``lossy-forward`` leaves what the lost had of a step out
    of its means; ``skip`` ends the step as it is; ``rollback`` does that, and then runs its micro-batches once more.

    ``tolerate``: how many failures any of which the grid must survive; refused if it cannot.

    ``commit``: how an unfinished step is taken back, ``shadow`` (from a second copy, bitwise) or ``undo`` (by inverting
    the optimizer's step, without a copy, within a tolerance). ``wait_for_replacement``: seconds to wait for a worker to
    come when some layer has no owner left (``checkpoint-restart``, ``checkfreq``: when anybody is lost), before whoever
    is left goes on from the last checkpoint as a smaller grid. ``snapshot_every``: steps between two snapshots of
    strategy ``snapshots``, more than 0; 0 for all others. ``failure_every_s``: seconds between two failures, as far as
    you know; 0: as many as so far. Workers change places if they gain more by that in this time than it costs.
    ``step_log``: whether workers keep what they hand on in a step, so that after a loss only what was lost of the step
    is run again, not all of it. ``step_log_bytes``: how much of it a worker keeps at most, 0: as much as a step needs;
    what is not kept is computed again if it is needed. ``spares``: processes that are started beside those of the grid,
    own nothing, and take the places of lost workers.

    For strategy ``templates``: ``smallest_pipeline``, the fewest workers of a pipeline, whose memory must suffice; 0:
    as few as ``worker_memory`` bytes each (on all its GPUs together) suffice for, by the profile, or if that is 0, too,
    as many as the shortest pipeline has in the job's grid. ``degraded``: what is done once fewer workers are left than
    ``tolerate`` failures more take, one such pipeline for each and one besides: ``stop`` (all is saved and the job
    ends) or ``allow``.
    """

    strategy: Literal[
        "auto",
        "adaptive",
        "templates",
        "checkpoint-restart",
        "checkfreq",
        "snapshots",
        "lossy-forward",
        "rollback",
        "skip",
    ] = "auto"
    commit: Literal["shadow", "undo"] = "shadow"
    tolerate: Count = 0
    wait_for_replacement: NonNegative = 0.0
    snapshot_every: Count = 0
    failure_every_s: NonNegative = 0.0
    step_log: bool = True
    step_log_bytes: Count = 0
    spares: Spares = 0
    smallest_pipeline: Count = 0
    worker_memory: NonNegative = 0.0
    degraded: Literal["stop", "allow"] = "stop"


class Checkpoint(_Plain, frozen=True, kw_only=True):
    """``every``: a checkpoint after so many steps (0: never, with strategy ``checkfreq`` as often as its rule says);
    ``keep``: the newest so many; ``url``: a folder or
    ``s3://BUCKET/PREFIX``, default ``checkpoints`` in the run directory; ``synchronous``: training stands still until
    it is written, for comparison. ``on_sigterm``: seconds that SIGTERM leaves for one more checkpoint before the job
    ends, if checkpoints are made at all; 0 for none.
    """

    every: Count = 0
    keep: Positive = 3
    url: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    synchronous: bool = False
    on_sigterm: NonNegative = 25.0


class Logging(_Plain, frozen=True, kw_only=True):
    """Logs of what workers send to other nodes, from which layers are computed again that no living worker holds.

    ``use``: ``auto`` where replicas are missing and it costs less than it saves (``holdfast inspect`` tells both),
    ``on``, or ``off``. It needs ``checkpoint.every``. ``when``: tensors are written while the worker waits (``idle``),
    ``at-once``, or by the worker itself ``before-sending``, for comparison. ``most_bytes``: what waits to be written at
    most; where more would, a step is left out of the log. ``precision``: of what is kept; less than ``exact`` makes a
    replay not bitwise. ``directory``: a folder on each node's own disk, default ``logs`` in the run directory.
    ``url``: a folder or ``s3://BUCKET/PREFIX`` that all nodes reach, where logs are sent: ``upload`` ``on-failure``, or
    ``always`` as soon as a file of them is finished; without one all nodes must reach ``directory``. ``helpers``: how
    many workers replay the same lost layers besides those that take them over, each some of the micro-batches; each
    holds these layers, too, meanwhile. ``groups``: numbers of nodes that are replayed together, so that nothing is
    logged between them; ``holdfast groups`` finds them for a limit of storage. ``bandwidth``: bytes per second at which
    a worker copies what it logs.
    """

    use: Literal["auto", "on", "off"] = "auto"
    when: Literal["idle", "at-once", "before-sending"] = "idle"
    most_bytes: Positive = 1 << 28
    precision: Literal["exact", "bfloat16", "float16"] = "exact"
    directory: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    url: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    upload: Literal["on-failure", "always"] = "on-failure"
    helpers: Count = 0
    groups: tuple[tuple[Count, ...], ...] = ()
    bandwidth: PositiveFloat = 12.0e9


class Tls(_Plain, frozen=True, kw_only=True):
    """Paths of PEM files: the authority of both ends, our certificate and its key; ``holdfast certs`` makes them."""

    ca: str
    cert: str
    key: str


class Control(_Plain, frozen=True, kw_only=True):
    """Where the coordinator listens, when a worker is given up, and what happens without a coordinator.

    ``host``: the address that all processes listen on. Other than the machine's own, such as 127.0.0.1, it needs
    ``tls``, or ``insecure``: true for a network in which nobody listens whom the job's token is not for.
    ``port``: 0 for any free one. ``heartbeat_s``: how often workers tell of their progress. ``fence_grace_s``: how long
    a process that was held for lost may take to end.

    ``start_s``: how long a worker, the coordinator, or the process that tries out the model may take to start, building
    the model, opening the data and loading a checkpoint included.

    A worker is given up at once when its process is seen to end; after 2 s without a connection, if the coordinator
    lives; after ``hang_s`` without a heartbeat, or stuck in one operation, if its connection stands (an operation may
    always take eight times as long as the slowest so far). ``reattach_s`` is about the coordinator: so long workers go
    on without one before they end themselves, and so long one that was started again waits for those it knows of;
    until all are back, or given up, it holds nobody for hung.

    ``restart_delay_s``: how long its supervisor waits before it starts a dead coordinator again; six deaths within
    ``restart_window_s`` end the job. ``tls``: certificates that both ends of a connection must show; without them
    connections are in the clear. ``store``: where decisions are kept, ``sqlite`` (in the run directory) or
    ``etcd://HOST:PORT[/PREFIX]``. ``coordinators``: how many, of which one leads and the others stand by; more than one
    needs etcd. ``data_plane``: what carries tensors between workers, ``links`` that are made once, or torch's ``gloo``.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    start_s: PositiveFloat = 300.0
    heartbeat_s: PositiveFloat = 0.25
    hang_s: PositiveFloat = 2.0
    fence_grace_s: NonNegative = 1.0
    reattach_s: PositiveFloat = 60.0
    restart_delay_s: NonNegative = 0.0
    restart_window_s: PositiveFloat = 10.0
    tls: Tls | None = None
    insecure: bool = False
    store: str = "sqlite"
    coordinators: Positive = 1
    data_plane: Literal["links", "gloo"] = "links"
    outside_s: PositiveFloat = 3600.0


class Job(_Plain, frozen=True, kw_only=True):
    """A whole job file.

    ``resume``: as ``--resume``: ``auto``, or a run directory, folder or URL, with ``@STEP`` behind it if wanted.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")] = "job"
    model: ModelSettings
    data: Data
    grid: Grid
    optimizer: Optimizer = Optimizer()
    train: Train
    resilience: Resilience = Resilience()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    control: Control = Control()
    resume: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    @property
    def global_microbatches(self) -> int:
        """Micro-batches of one step, over all pipelines."""
        return sum(self.grid.batch.counts)

    @property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """How many workers each stage of pipeline 0, 1, ... has: with exact numerics one for each GPU."""
        if self.train.numerics == "fast":
            return tuple((1,) * len(row) for row in self.grid.widths)
        return self.grid.widths

    @property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """How many GPUs share each worker of each stage of pipeline 0, 1, ...: with exact numerics one."""
        if self.train.numerics == "fast":
            return self.grid.widths
        return tuple((1,) * len(row) for row in self.grid.widths)

    @property
    def most_lanes(self) -> int:
        """How many workers the widest stage has."""
        return max(map(max, self.lanes))

    @property
    def loops(self) -> bool:
        """Whether steps are those of a loop in a user's script; what its file leaves open, the script says."""
        return isinstance(self.model, ScriptModel)

    @property
    def keeps_steps(self) -> bool:
        """Whether workers keep what they have of an interrupted step: not those of several processes, nor with Gloo."""
        return self.resilience.step_log and self.most_shards == 1 and self.control.data_plane == "links"

    @property
    def may_log(self) -> bool:
        """Whether workers can log what they send to other nodes, to replay lost layers from a checkpoint."""
        plain = self.most_shards == 1 and self.most_lanes == 1 and self.control.data_plane == "links"
        return plain and self.checkpoint_every > 0 and self.resilience.strategy in LOGGED

    @property
    def most_shards(self) -> int:
        """How many GPUs the widest worker has."""
        return max(map(max, self.shards))

    @property
    def fewest_shards(self) -> int:
        """How many GPUs the narrowest worker has; so many has whoever comes besides those of the grid."""
        return min(map(min, self.shards))

    def gpus_of(self, worker: WorkerId) -> int:
        """Returns how many GPUs a worker has, for life."""
        if self.most_shards == 1 or not self.has(worker):
            return self.fewest_shards
        return self.shards[worker.pipeline][worker.stage]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many workers pipeline 0, 1, ... has."""
        return tuple(map(sum, self.lanes))

    @property
    def num_workers(self) -> int:
        """How many workers the whole grid has."""
        return sum(self.sizes)

    def has(self, worker: WorkerId) -> bool:
        """Whether the whole grid has this worker."""
        return worker.pipeline < len(self.sizes) and worker.stage < self.sizes[worker.pipeline]

    @property
    def spares(self) -> tuple[WorkerId, ...]:
        """The workers that have no place in the grid at first: they are named as one more pipeline would be."""
        return tuple(WorkerId(len(self.grid.depths), index) for index in range(self.resilience.spares))

    @property
    def checkpoint_every(self) -> int:
        """Steps between two checkpoints, at first if their number is set by what they cost; 0: there are none."""
        return self.checkpoint.every or (FIRST_INTERVAL if self.sets_interval else 0)

    @property
    def sets_interval(self) -> bool:
        """Whether CheckFreq's rule sets how often checkpoints are made, while the job runs."""
        return self.resilience.strategy == "checkfreq" and not self.checkpoint.every

    @property
    def samples_per_step(self) -> int:
        """The global batch."""
        return self.global_microbatches * self.grid.microbatch_size
