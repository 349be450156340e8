"""The job file as typed values: every key, its default and its range."""

from __future__ import annotations

import math
import re
import sys
from typing import Annotated, Any, Literal

import msgspec

from holdfast.core.ids import Batch, WorkerId
from holdfast.strategies.registry import STRATEGIES, strategy_named
from holdfast.strategies.strategy import Strategy

__all__ = [
    "BertModel",
    "BreastCancerData",
    "Checkpoint",
    "Cluster",
    "Control",
    "ConvnetModel",
    "Data",
    "DigitsData",
    "Evaluate",
    "GptModel",
    "Grid",
    "Job",
    "Logging",
    "Lora",
    "LossScaleSettings",
    "ModelSettings",
    "Nt3Data",
    "Nt3Model",
    "Optimizer",
    "PipelineLayout",
    "PythonData",
    "HuggingFaceModel",
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
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?|(?!(auto|cpu|cuda):).+:[A-Za-z_]\w*")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """Base of all sections: immutable, unknown keys are refused."""


class _Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the sections without a kind."""


FIRST_INTERVAL = 10
"""Steps until the first checkpoint of a job that sets its interval by what they cost."""
Checkpointed = bool | tuple[Count, ...]
"""Layers that keep only their input and are run again for their backward pass: all, none, or those of these indices."""


class _OverBytes(_Section, frozen=True, kw_only=True):
    """Base of the transformers over bytes of texts.

    Attributes:
        layers: transformer blocks; the model has two layers more.
        width: of the residual stream.
        heads: of attention.
        context: bytes of a sample.
        dropout: probability.
        checkpoint_activations: layers that keep only their input and are run again for their backward pass, all
            (``true``) or some (``[1, 2]``); same bits.
    """

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
    """A small vision transformer, for 8x8 images that are cut into squares.

    Attributes:
        layers: transformer blocks; the model has two layers more.
        width: of the residual stream.
        heads: of attention.
        patch: pixels of a side of a square.
        dropout: probability.
        checkpoint_activations: layers that keep only their input and are run again for their backward pass, all
            (``true``) or some (``[1, 2]``); same bits.
    """

    layers: Positive = 4
    width: Positive = 64
    heads: Positive = 4
    patch: Literal[1, 2, 4, 8] = 2
    dropout: Fraction = 0.1
    checkpoint_activations: Checkpointed = False


class ConvnetModel(_Section, tag="convnet", frozen=True, kw_only=True):
    """A small convolutional net of 7 layers with batch-norm, for 8x8 images.

    Attributes:
        width: channels at first.
        checkpoint_activations: layers that keep only their input and are run again for their backward pass, all
            (``true``) or some (``[1, 2]``); same bits.
    """

    width: Positive = 16
    checkpoint_activations: Checkpointed = False


class ResnetModel(_Section, tag="resnet", frozen=True, kw_only=True):
    """A residual network with batch-norm.

    Attributes:
        depth: ``small``: 6 layers, for 8x8 images; 50: 19 layers, for TinyImageNet, as published.
        width: channels at first; 8 unless told, and none to be told with depth 50, which has 64.
        checkpoint_activations: layers that keep only their input and are run again for their backward pass, all
            (``true``) or some (``[1, 2]``); same bits.
    """

    depth: Literal["small", 50] = "small"
    width: Positive | None = None
    checkpoint_activations: Checkpointed = False

    def __post_init__(self) -> None:
        if self.depth == 50 and self.width is not None:
            raise ValueError(f"Expected no width with depth 50, which has 64 channels at first, got {self.width}")


class Nt3Model(_Section, tag="nt3", frozen=True, kw_only=True):
    """CANDLE's NT3, a 1-D convolutional classifier of 5 layers.

    Attributes:
        width: channels; 128 as published.
        checkpoint_activations: layers that keep only their input and are run again for their backward pass, all
            (``true``) or some (``[1, 2]``); same bits.
    """

    width: Positive = 128
    checkpoint_activations: Checkpointed = False


class PythonModel(_Section, tag="python", frozen=True, kw_only=True):
    """One's own model (docs/own_model.md); functions are ``package.module:name`` or ``path/to/file.py:name``.

    Attributes:
        target: a function that returns the ordered list of modules; or, with ``split``, one module.
        split: ``blocks``: it is cut at the list of its blocks; ``none``: it is one layer, and a pipeline one stage.
            null: it is a list.
        loss: a function of output and target; null: cross entropy of logits and classes.
        arguments: what ``target`` is called with.
        checkpoint_activations: layers that keep only their input and are run again for their backward pass, all
            (``true``) or some (``[1, 2]``); same bits.
    """

    target: str
    split: Literal["blocks", "none"] | None = None
    loss: str | None = None
    arguments: dict[str, Any] = {}
    checkpoint_activations: Checkpointed = False


HuggingFaceTask = Literal[
    "causal-lm", "masked-lm", "sequence-classification", "token-classification", "image-classification"
]


class Lora(_Plain, frozen=True, kw_only=True):
    """Adapters of low rank, which are trained while all else stays as it is (docs/hugging_face.md#lora).

    Attributes:
        r: their rank.
        alpha: what they add counts ``alpha / r`` times; null: twice the rank.
        dropout: of what they are given.
        targets: ends of the names of the linear layers that have one; null: those that peft knows of the model.
    """

    r: Positive = 8
    alpha: Positive | None = None
    dropout: Fraction = 0.0
    targets: tuple[str, ...] | None = None


class HuggingFaceModel(_Section, tag="huggingface", frozen=True, kw_only=True):
    """A model of Hugging Face's transformers, cut at its blocks (docs/hugging_face.md).

    Attributes:
        task: what it is made for, and so which of transformers' classes it is of.
        config: a folder with a ``config.json``; or what stands in one.
        labels: how many classes there are, for a task with classes; null: as ``config`` says.
        weights: a folder with safetensors to begin with; null: weights are drawn from the job's seed.
        loss: a function of output and target; null: cross entropy of logits and classes, of which -100 is left out.
        lora: train adapters instead of the weights; null: all weights are trained.
        attention: how attention is computed: ``sdpa`` or ``eager``; null: as transformers chooses for the model.
        checkpoint_activations: layers that keep only their input and are run again for their backward pass, all
            (``true``) or some (``[1, 2]``); same bits.
    """

    config: str | dict[str, Any]
    task: HuggingFaceTask = "causal-lm"
    labels: Positive | None = None
    weights: str | None = None
    loss: str | None = None
    lora: Lora | None = None
    attention: Literal["sdpa", "eager"] | None = None
    checkpoint_activations: Checkpointed = False


class ScriptModel(_Section, tag="script", frozen=True, kw_only=True):
    """Whatever a script gives to ``holdfast.session().prepare``; ``holdfast run`` makes it.

    Attributes:
        path: the script.
        arguments: what it is run with.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: tuple[str, ...] = ()


BYTES = "bytes"
"""Says of texts that a token is a byte."""


class TextData(_Section, tag="text", frozen=True, kw_only=True):
    """Text files, as bytes or as tokens.

    Attributes:
        path: ``stdlib`` (the Python sources of this interpreter), a file, a folder or a glob.
        context: bytes or tokens of a sample; None: as the model says, which only ``gpt`` and ``bert`` do.
        tokenizer: ``bytes``, or a folder with a ``tokenizer.json``, by which files are read once on each machine.
    """

    path: str
    context: Positive | None = None
    tokenizer: str = BYTES


class DigitsData(_Section, tag="digits", frozen=True, kw_only=True):
    """scikit-learn's handwritten digits; ``pip install -e '.[digits]'``."""


class TinyImageNetData(_Section, tag="tinyimagenet", frozen=True, kw_only=True):
    """The training images of TinyImageNet; it needs Pillow.

    Attributes:
        path: the folder that holds ``train/CLASS/images``.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]


class BreastCancerData(_Section, tag="breast-cancer", frozen=True, kw_only=True):
    """scikit-learn's breast-cancer data: 30 values, standardised, as one channel; ``pip install -e '.[digits]'``."""


class Nt3Data(_Section, tag="nt3", frozen=True, kw_only=True):
    """Gene expressions of CANDLE's NT3.

    Attributes:
        path: its CSV file: 0 or 1, and then the values in each line.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]


class PythonData(_Section, tag="python", frozen=True, kw_only=True):
    """One's own dataset, by index (docs/own_model.md).

    Attributes:
        target: a function that returns it.
        arguments: what ``target`` is called with.
    """

    target: str
    arguments: dict[str, Any] = {}


class ScriptData(_Section, tag="script", frozen=True, kw_only=True):
    """Whatever the script of the model gives to ``holdfast.session().steps``."""


ModelSettings = (
    GptModel
    | BertModel
    | ConvnetModel
    | VitModel
    | ResnetModel
    | Nt3Model
    | HuggingFaceModel
    | PythonModel
    | ScriptModel
)
Data = TextData | DigitsData | TinyImageNetData | BreastCancerData | Nt3Data | PythonData | ScriptData


class PipelineLayout(_Plain, frozen=True, kw_only=True, omit_defaults=True):
    """One pipeline.

    Attributes:
        stages: layers of each of its stages.
        microbatches: of the pipeline in a step.
        gpus: one number per stage; empty: one GPU each.
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
    """The workers while nothing has failed, and the samples of a step: pipelines x microbatches x microbatch_size.

    Grids that differ in pipelines and stages but agree on pipelines x microbatches and on ``microbatch_size`` train to
    the same bits.

    Attributes:
        pipelines: how many; workers are pipelines x stages x gpus_per_stage. Needed without ``layout``, as are the two
            below.
        stages: of each pipeline.
        microbatches: per pipeline.
        layout: pipelines that are not alike, in place of the three: a list of ``stages``, the layers of each stage,
            ``microbatches``, and if stages have several GPUs ``gpus``, one number per stage. With ``--set`` it replaces
            the file's three.
        workers: in place of all that: the pipelines of so many workers, of any number each, that are the fastest by
            ``train.profile``, and as short as ``resilience.worker_memory`` or ``smallest_pipeline`` lets them be.
            ``--set grid.workers=7`` keeps the micro-batches of the file's grid, and so trains to the same bits.
        global_microbatches: of a step, with ``workers``.
        gpus_per_stage: GPUs of each stage: with ``exact`` numerics so many workers of one node, which hold the same
            layers and take micro-batches by turns; with ``fast`` one worker, sharded (docs/stages.md).
        microbatch_size: samples of a micro-batch.
        workers_per_node: so many consecutive workers fail together.
    """

    pipelines: Positive | msgspec.UnsetType = msgspec.UNSET
    stages: Positive | msgspec.UnsetType = msgspec.UNSET
    microbatches: Positive | msgspec.UnsetType = msgspec.UNSET
    layout: tuple[PipelineLayout, ...] = ()
    workers: Positive | msgspec.UnsetType = msgspec.UNSET
    global_microbatches: Positive | msgspec.UnsetType = msgspec.UNSET
    gpus_per_stage: Gpus = 1
    microbatch_size: Positive = 1
    workers_per_node: Positive = 1

    def __post_init__(self) -> None:
        alike = {"pipelines": self.pipelines, "stages": self.stages, "microbatches": self.microbatches}
        given = [name for name, value in alike.items() if value is not msgspec.UNSET]
        found = {"workers": self.workers, "global_microbatches": self.global_microbatches}
        if unset := [name for name, value in found.items() if value is msgspec.UNSET]:
            if len(unset) == 1:
                raise ValueError(f"Expected workers and global_microbatches; missing: {unset[0]}")
        elif beside := [*given, *["layout"] * bool(self.layout), *["gpus_per_stage"] * (self.gpus_per_stage > 1)]:
            raise ValueError(f"Expected workers, whose pipelines are found, or what these are, got both: {beside[0]}")
        else:
            return
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
    """How a layer is updated.

    Attributes:
        kind: ``sgd``, ``adam``, ``adamw``, ``lamb``, or ``package.module:name`` of a function from parameters to an
            optimizer, for which ``schedule`` and ``warmup_steps`` count alone. What counts for nothing is refused.
        lr: learning rate.
        weight_decay: of all kinds.
        momentum: of sgd.
        nesterov: of sgd with momentum.
        dampening: of sgd with momentum, without nesterov.
        betas: of adam, adamw and lamb.
        eps: of adam, adamw and lamb.
        amsgrad: of adam and adamw.
        schedule: of the learning rate: ``constant``; ``cosine`` and ``linear`` fall to 0 at the last step; or
            ``package.module:name`` of a scheduler of torch's, such as ``torch.optim.lr_scheduler:StepLR``, which goes
            by the step alone and begins behind ``warmup_steps``.
        schedule_arguments: what such a scheduler is called with beside the optimizer.
        warmup_steps: in which the learning rate rises linearly.
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
    schedule: str = "constant"
    schedule_arguments: dict[str, Any] = {}
    warmup_steps: Count = 0


class LossScaleSettings(_Plain, frozen=True, kw_only=True):
    """For models in half precision (docs/assumptions.md#the-loss-scale).

    Attributes:
        initial: what the loss is multiplied by at first, a power of two; halved by every step that is omitted.
        growth_every: it is doubled after so many steps in a row that counted.
    """

    initial: float = 65536.0
    growth_every: Positive = 2000

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= 2.0**64 or math.frexp(self.initial)[0] != 0.5:
            raise ValueError(f"Expected initial to be a power of two from 1 to 2^64, got {self.initial}")


class Train(_Plain, frozen=True, kw_only=True):
    """How it is trained.

    Attributes:
        steps: optimizer steps; or ``epochs``, of which the data tell how many steps they are.
        epochs: how often each sample is used; those of the last step that are left over are used once more.
        seed: of the first weights, the order of samples and dropout.
        numerics: ``exact``: same bits on any grid, whatever fails; ``fast``: float32 sums, and no such guarantee.
        sum_chunks: in how many chunks of neighbours the micro-batches of a step are cut: within one their gradients are
            added one after another, then chunks by twos. Any number that divides them; bits depend on it. null: the
            largest power of two that does, up to 8 (docs/assumptions.md#sums).
        clip_norm: largest L2 norm of the whole model's mean gradient; null: no limit.
        precision: of what layers and the loss compute: ``fp32``: as they are written; by torch's autocast ``bf16``, or
            ``fp16``, which needs ``loss_scale``. Weights, sums and optimizers are as ever, and so is what ``exact``
            says (docs/assumptions.md#precision).
        loss_scale: for half precision; null: losses are not scaled.
        technique: how steps are scheduled, also after losses: ``1f1b``, ``gpipe``, or by the planner: ``decoupled``
            (the two halves of the backward pass apart) or ``staggered`` (besides, each stage updates as soon as its own
            gradients are summed, docs/staggered.md). ``auto``: with ``profile`` the fastest of 1f1b, decoupled and
            staggered within ``resilience.worker_memory``, or without that in the memory that 1f1b takes; without a
            profile 1f1b (docs/planner.md#technique-auto). With ``exact`` no bit depends on it.
        profile: a file of ``holdfast profile`` that tells the planner what each layer costs; null: all the same.
        in_flight: micro-batches that a worker may hold at once, from the start of F to the end of W, for the planner;
            null: twice as many as stages.
        audit_every: in one of so many steps a (layer, micro-batch) is computed a second time, by another owner of the
            layer, before the step is committed, and as often the owners of each layer compare it; 0: never. With
            ``exact`` only (docs/audit.md).
        compare_every: in the loop of a script, workers compare the bits of their weights once in so many steps, and two
            of them run one item; null: as often as half a percent of the time allows; 0: at the end only. With
            ``exact`` only (docs/audit.md#in-the-loop-of-a-script).
        time_limit: seconds after which the loop of a script ends as by ``hf.stop()``; what stands behind it is run.
        device: what layers are computed on: ``cpu``; ``cuda``, a GPU for each worker; ``cuda:N``, one GPU that all
            share, by its number among those that are visible; ``auto``: ``cuda`` where there are as many GPUs as
            workers, else ``cpu`` (docs/gpu.md); ``path/to/file.py:name``: what makes one of your own. A script computes
            on ``hf.device``.
    """

    steps: Count = 0
    epochs: Positive | None = None
    seed: Count = 0
    numerics: Literal["exact", "fast"] = "exact"
    sum_chunks: Positive | None = None
    clip_norm: PositiveFloat | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: LossScaleSettings | None = None
    technique: Literal["auto", "1f1b", "gpipe", "decoupled", "staggered"] = "auto"
    profile: str | None = None
    in_flight: Positive | None = None
    audit_every: Count = 0
    compare_every: Count | None = None
    time_limit: PositiveFloat | None = None
    device: str = "cpu"

    @property
    def device_kind(self) -> str:
        """What is computed on, whichever of them it is: ``auto``, ``cpu``, ``cuda``, or what makes a device."""
        return "cuda" if self.device.startswith("cuda:") else self.device

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(
                "Expected device to be auto, cpu, cuda, cuda:N such as cuda:0, or path/to/file.py:name, "
                f"got {self.device!r}"
            )
        if not self.steps and self.epochs is None:
            raise ValueError("Expected steps to be 1 or more, or epochs")
        if self.precision == "fp16" and self.loss_scale is None:
            raise ValueError("Expected loss_scale with precision fp16, whose small gradients would be zero: {}")
        if self.audit_every and self.numerics == "fast":
            raise ValueError(
                f"Expected numerics to be exact with audit_every {self.audit_every}, got fast, which does not promise "
                "that owners of a layer have the same bits"
            )

    @property
    def technique_unprofiled(self) -> str:
        """How steps are scheduled as far as no profile tells."""
        return "1f1b" if self.technique == "auto" else self.technique


class Evaluate(_Plain, frozen=True, kw_only=True):
    """With which data the model is evaluated while it is trained, and how often; no bit of training changes by it.

    Attributes:
        every: before each step whose number is a multiple of it; and once behind the last step.
        data: as ``data``, of the same shapes.
        microbatches: how many of ``grid.microbatch_size`` samples at most, from the beginning, as far as they are full.
            What a stage has not run of them yet waits in its memory.
        metrics: ``file.py:name`` or ``module:name`` of a function ``(output, target) -> {name: number}``, at most
            32; their means over the micro-batches that have them are told beside the loss.
        best: the score, such as ``loss``, by which the best state so far is told; its checkpoint is kept however many
            come, and ``holdfast export RUN_DIR@STEP`` writes it;
            ``checkpoint.every`` has to divide ``every``. null: none.
        better: whether lower or higher scores are better.
        patience: where so many evaluations in a row were not the best so far, the job ends early, where the next one is
            due (docs/evaluation.md#ending-early); 0: never.
    """

    every: Positive
    data: Data
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 32
    metrics: str | None = None
    best: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    better: Literal["lower", "higher"] = "lower"
    patience: Count = 0


class Resilience(_Plain, frozen=True, kw_only=True):
    """What is done when workers are lost (docs/recovery.md).

    Attributes:
        strategy: ``adaptive``: re-routed where others hold the same layers, else replayed from logs, else from a
            checkpoint; which of these and why is said at start (docs/logging.md). ``templates`` makes other pipelines
            of the surviving workers, too, while all train (docs/recovery.md#strategy-templates). ``auto``: with
            ``train.profile`` both, and of what can be done where layers have no owner what makes the most steps
            until the next failure; without it as ``adaptive`` (docs/recovery.md#strategy-auto). For
            comparison: ``checkpoint-restart``, ``checkfreq``, ``snapshots`` (docs/baselines.md). With other weights
            than without the failure, where pipelines have one stage: ``lossy-forward`` leaves what the lost workers had
            of a step out of its means, ``skip`` ends the step as it is, ``rollback`` does that and runs its
            micro-batches once more (docs/data_parallel.md#lossy-strategies).
        commit: how an unfinished step is taken back: ``shadow`` from a second copy, bitwise; ``undo`` by inverting the
            optimizer's step, within a tolerance (docs/undo.md).
        tolerate: refuse a grid that does not survive any so many failures: at most pipelines - 1. More exceptions in
            single workers than that (at least 1) within 100 steps end the job.
        wait_for_replacement: seconds to wait for a worker when a layer has no owner left (``checkpoint-restart``,
            ``checkfreq``: when anybody is lost), before the surviving workers go on as a smaller grid.
        snapshot_every: for ``snapshots``: a snapshot in memory after so many steps.
        failure_every_s: seconds between two failures, as far as you know; 0: as many as so far. Workers change places
            if that pays until the next one (docs/recovery.md#a-worker-changes-places).
        step_log: workers keep what they hand on in a step, so that after a loss only what was lost of the step is run
            again, not all of it (docs/recovery.md#what-is-run-again).
        step_log_bytes: how much of that a worker keeps at most, the rest is computed again; 0: as much as a step needs.
        spares: processes beside those of the grid, on nodes behind its own: they wait, and take the places of lost
            workers (docs/recovery.md#spares).
        smallest_pipeline: for ``templates`` and ``auto``: the fewest workers of a pipeline, whose memory must suffice;
            0: by ``worker_memory``, else as many as the shortest pipeline has at first; for ``auto`` half of these,
            where no more are left.
        worker_memory: for ``templates`` and ``auto``: bytes of memory of a worker, on all its GPUs together; by the
            profile no stage takes more. 0: no limit.
        degraded: for ``templates``, once fewer workers are left than ``tolerate`` + 1 of the smallest pipelines take:
            ``stop``: all is saved and the job ends with exit code 3; ``allow``: it goes on.
    """

    strategy: Annotated[str, msgspec.Meta(extra={"one_of": tuple(STRATEGIES)})] = "auto"
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
    """Checkpoints, written while training goes on (docs/checkpoints.md).

    Attributes:
        every: a checkpoint after so many steps; 0: none, with ``checkfreq`` as often as its rule says; ``auto``: as
            often as is best by what they cost and how often failures come (docs/checkpoints.md#how-often).
        keep: the newest so many are kept.
        url: a folder or ``s3://BUCKET/PREFIX``; null: ``checkpoints`` in the run directory.
        synchronous: for comparison: training stands still until a checkpoint is written.
        on_sigterm: seconds that SIGTERM leaves for one more checkpoint before the job ends, if any are made; 0: it ends
            at once.
    """

    every: Count | Literal["auto"] = 0
    keep: Positive = 3
    url: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    synchronous: bool = False
    on_sigterm: NonNegative = 25.0


class Logging(_Plain, frozen=True, kw_only=True):
    """Logs of what workers send to other nodes, from which layers are computed again that no living worker holds.

    They are explained in docs/logging.md.

    Attributes:
        use: ``auto``: where no other node holds the same layers and it costs less than it saves, ``on`` or ``off``. It
            needs ``checkpoint.every``.
        when: they are written while workers wait (``idle``); for comparison ``at-once``, or ``before-sending``.
        most_bytes: where more would wait to be written, a step is left out.
        precision: of what is kept; a replay from less than ``exact`` is not bitwise.
        directory: a folder on each node's own disk; null: ``logs`` in the run directory.
        url: a folder or ``s3://BUCKET/PREFIX`` that all nodes reach; null: all reach ``directory``.
        upload: when finished logs are sent to ``url``: when somebody is lost (``on-failure``), or ``always``.
        helpers: workers that replay the same lost layers besides those that take them over.
        groups: numbers of nodes that are replayed together, as ``holdfast groups`` finds them: nothing is logged
            between them.
        bandwidth: bytes per second at which a worker copies what it logs, to tell whether it is worth it.
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


class Cluster(_Plain, frozen=True, kw_only=True):
    """How fast a cluster is, as far as no profile tells: by it ``auto`` chooses, and ``simulate`` computes.

    The defaults are about what was measured with processes of one machine (docs/benchmarks.md): say your own. What a
    run of yours shows, ``holdfast simulate --speeds-of`` tells.

    Attributes:
        detect_s: from a machine's loss until the coordinator knows.
        control_s: of a message between the coordinator and a worker, in one direction.
        message_s: of a message between workers that carries no tensor of a micro-batch.
        connect_s: until the workers of a generation are connected.
        start_s: until a new process trains.
        copy: bytes per second at which a worker is given state by its peers.
        load: at which it reads a checkpoint.
        save: at which it writes one.
        pin: at which it copies its state in its own memory, for a checkpoint.
    """

    detect_s: PositiveFloat = 0.01
    control_s: PositiveFloat = 0.001
    message_s: PositiveFloat = 0.0005
    connect_s: PositiveFloat = 0.01
    start_s: PositiveFloat = 5.0
    copy: PositiveFloat = 350e6
    load: PositiveFloat = 500e6
    save: PositiveFloat = 250e6
    pin: PositiveFloat = 4e9

    def __str__(self) -> str:
        """Each by its name."""
        return ", ".join(f"{name} {getattr(self, name):g}" for name in self.__struct_fields__)


class Tls(_Plain, frozen=True, kw_only=True):
    """Certificates that both ends of a control connection show; ``holdfast certs`` makes them (docs/security.md).

    Attributes:
        ca: path of the PEM file of the authority of both ends.
        cert: path of our certificate.
        key: path of its key.
    """

    ca: str
    cert: str
    key: str


class Control(_Plain, frozen=True, kw_only=True):
    """Where the coordinator listens, when a worker is given up, and what happens without a coordinator.

    A worker is given up at once when its process is seen to end; after 2 s without a connection, if the coordinator
    lives; after ``hang_s`` without a heartbeat, or stuck in one operation, if its connection stands (an operation may
    always take eight times as long as the slowest so far). For being stuck nobody is given up whose layers nobody else
    holds that surely works (docs/recovery.md#busy-is-not-hung).

    Attributes:
        host: the address that all processes listen on. Other than this machine's own it needs ``tls``, or ``insecure``.
        port: of the coordinator; 0: any free one.
        start_s: how long a process may take to start: to build the model, open the data, load a checkpoint. Where the
            loop of a script is tried, ``load_s`` and ``compile_s`` come on top.
        heartbeat_s: how often workers report where they are.
        hang_s: how long a worker may be silent, or stuck in one operation while another owner of its layers works; at
            least three times ``heartbeat_s``.
        silent_s: how long the host of a worker may acknowledge nothing of what other workers send; its kernel does that
            under any load. More is needed where round trips take more than a tenth of it.
        load_s: how long a worker may take to load the data of a micro-batch or of a script's item, if that is more than
            ``hang_s``.
        compile_s: how long ``torch.compile`` may take at a time, if that is more than ``hang_s``.
        fence_grace_s: how long a process that was held for lost may take to end by itself.
        reattach_s: how long workers go on without a coordinator before they end themselves, and how long one that was
            started again waits for those it knows of.
        restart_delay_s: before a dead coordinator is started again.
        restart_window_s: six deaths of it within this time end the job.
        tls: certificates of control connections; links between workers are sealed then. null: all is in the clear.
        insecure: a ``host`` other than this machine's own may be used without ``tls``, though the job's token travels
            in the clear.
        store: where decisions are kept: ``sqlite`` (in the run directory); or, so that several coordinators see them,
            ``etcd://HOST:PORT[/PREFIX]``, an absolute folder, or ``s3://BUCKET/PREFIX``. ``auto``: ``sqlite``, or with
            agents of other machines the folder ``decisions`` of the run directory, which all of them see.
        coordinators: how many, of which one leads and the others stand by; more than one needs a ``store`` that all
            see. Agents of other machines have one each, as far as that goes. 0: three with such agents, else one.
        outside_s: how long a script may be outside of its loop, between two steps.
        carrier: what carries the bodies of long messages and sums: ``links``, as all else; ``gloo``, process groups of
            torch, one for each two workers, which are built while training goes on; ``device``, those of the device,
            which carry from one's memory to the other's: NCCL's on GPUs. Not with ``tls`` (docs/transport.md#carriers).
        carry_from: bytes of a body from which on it is carried.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    start_s: PositiveFloat = 300.0
    heartbeat_s: PositiveFloat = 0.25
    hang_s: PositiveFloat = 2.0
    silent_s: PositiveFloat = 1.0
    load_s: PositiveFloat = 300.0
    compile_s: PositiveFloat = 600.0
    fence_grace_s: NonNegative = 1.0
    reattach_s: PositiveFloat = 60.0
    restart_delay_s: NonNegative = 0.0
    restart_window_s: PositiveFloat = 10.0
    tls: Tls | None = None
    insecure: bool = False
    store: str = "auto"
    coordinators: Annotated[int, msgspec.Meta(ge=0)] = 0
    outside_s: PositiveFloat = 3600.0
    carrier: Literal["links", "gloo", "device"] = "links"
    carry_from: Positive = 65536


class Job(_Plain, frozen=True, kw_only=True):
    """A whole job file.

    Attributes:
        name: letters, digits, ``.``, ``_`` and ``-``; part of the default run directory.
        model: what is trained.
        data: what it is trained with.
        grid: the workers.
        optimizer: how a layer is updated.
        train: how it is trained.
        evaluate: how it is evaluated meanwhile; null: it is not.
        resilience: what is done when workers are lost.
        checkpoint: when the state is written.
        logging: what workers log.
        cluster: how fast it is, as far as no profile tells.
        control: limits of time, and connections.
        track: trackers that are told of it, as ``holdfast track --to`` names them (docs/tracking.md); none: none are.
        resume: as ``--resume``: ``auto``, or a run directory, folder or URL, with ``@STEP`` behind it if wanted
            (docs/checkpoints.md#going-on); null: it begins.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")] = "job"
    model: ModelSettings
    data: Data
    grid: Grid
    optimizer: Optimizer = Optimizer()
    train: Train
    evaluate: Evaluate | None = None
    resilience: Resilience = Resilience()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    cluster: Cluster = Cluster()
    control: Control = Control()
    track: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
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
    def strategy(self) -> Strategy:
        """What is done about losses."""
        return strategy_named(self.resilience.strategy)

    @property
    def keeps_steps(self) -> bool:
        """Whether workers keep what they have of an interrupted step: not those of several processes."""
        return self.resilience.step_log and self.most_shards == 1

    @property
    def may_log(self) -> bool:
        """Whether workers can log what they send to other nodes, to replay lost layers from a checkpoint."""
        plain = self.most_shards == 1 and self.most_lanes == 1
        return plain and self.checkpoint_every > 0 and self.strategy.logs

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

    @property
    def most_workers(self) -> int:
        """How many workers there are at most, spares included."""
        return self.num_workers + self.resilience.spares

    def on(self, device: str) -> Job:
        """Returns the job with what its layers are computed on."""
        return msgspec.structs.replace(self, train=msgspec.structs.replace(self.train, device=device))

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
        if self.sets_interval:
            return FIRST_INTERVAL
        return 0 if isinstance(self.checkpoint.every, str) else self.checkpoint.every

    @property
    def sets_interval(self) -> bool:
        """Whether a rule sets how often checkpoints are made, while the job runs."""
        return self.follows_failures or (self.strategy.sets_interval and not self.checkpoint.every)

    @property
    def follows_failures(self) -> bool:
        """Whether that is Young's rule, which goes by how often failures come; else it is CheckFreq's."""
        return self.checkpoint.every == "auto"

    @property
    def samples_per_step(self) -> int:
        """The global batch."""
        return self.global_microbatches * self.grid.microbatch_size
