"""A job that is written out and read again is the same job."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.config.job import (
    BertModel,
    Control,
    ConvnetModel,
    Data,
    DigitsData,
    GptModel,
    Grid,
    Job,
    LossScaleSettings,
    Nt3Model,
    Optimizer,
    PythonData,
    PythonModel,
    Resilience,
    ResnetModel,
    TextData,
    Train,
    VitModel,
)
from holdfast.config.load import dump_job, load_job, parse_job
from holdfast.errors import ConfigError

TRICKY = ["1e5", "3e-4", ".5e3", "no", "null", "12", "2020-01-01", "~", "a: b", "#", "0x10", "1_000", "<<", "="]
letters = st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])
text = st.text(letters, min_size=1, max_size=12) | st.sampled_from(TRICKY)
names = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True) | st.sampled_from(["1e5", "12", "no", ".5e3"])
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(text, plain, max_size=3)
positive = st.floats(min_value=1e-300, max_value=1e300)
fraction = st.floats(0, 1, exclude_max=True)
scales = st.builds(
    LossScaleSettings, initial=st.integers(0, 64).map(lambda n: 2.0**n), growth_every=st.integers(1, 10**9)
)
data: st.SearchStrategy[Data] = (
    st.builds(TextData, path=text) | st.builds(DigitsData) | st.builds(PythonData, target=text, arguments=arguments)
)


@st.composite
def optimizers(draw):
    kind = draw(st.sampled_from(["sgd", "adam", "adamw", "lamb"]) | text)
    own, sgd = ":" in kind, kind == "sgd"
    momentum = draw(fraction) if sgd else 0.0
    nesterov = momentum > 0 and draw(st.booleans())
    unset = Optimizer()
    return Optimizer(
        kind=kind,
        lr=unset.lr if own else draw(positive),
        weight_decay=0.0 if own else draw(st.floats(0, 1e9)),
        momentum=momentum,
        nesterov=nesterov,
        dampening=draw(fraction) if momentum > 0 and not nesterov else 0.0,
        betas=unset.betas if own or sgd else draw(st.tuples(fraction, fraction)),
        amsgrad=kind in ("adam", "adamw") and draw(st.booleans()),
    )


@st.composite
def jobs(draw):
    heads = draw(st.integers(1, 4))
    gpt = GptModel(
        layers=draw(st.integers(1, 9)), width=heads * draw(st.integers(1, 9)), heads=heads, dropout=draw(fraction)
    )
    bert = BertModel(layers=gpt.layers, width=gpt.width, heads=heads, dropout=gpt.dropout)
    vit = VitModel(layers=gpt.layers, width=gpt.width, heads=heads, patch=draw(st.sampled_from([1, 2, 4, 8])))
    python = PythonModel(target=draw(text), loss=draw(st.none() | text), arguments=draw(arguments))
    transformers = [(each, each.layers + 2) for each in (gpt, bert, vit)]
    model, most_stages = draw(
        st.sampled_from(
            [*transformers, (ConvnetModel(width=2), 7), (ResnetModel(depth=50), 19), (Nt3Model(), 5), (python, 40)]
        )
    )
    pipelines = draw(st.integers(1, 5))
    return Job(
        name=draw(
            st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True) | st.sampled_from(["1e5", "12", "no", ".5e3"])
        ),
        model=model,
        data=draw(data),
        grid=Grid(pipelines=pipelines, stages=draw(st.integers(1, most_stages)), microbatches=draw(st.integers(1, 9))),
        optimizer=draw(optimizers()),
        train=Train(
            steps=draw(st.integers(1, 10**9)),
            clip_norm=draw(st.none() | positive),
            loss_scale=draw(st.none() | scales),
        ),
        resilience=Resilience(
            tolerate=draw(st.integers(0, pipelines - 1)),
            commit=draw(st.sampled_from(["shadow", "undo"])),
            spares=draw(st.integers(0, 9)),
        ),
        control=Control(port=draw(st.integers(0, 65535)), heartbeat_s=draw(st.floats(0.001, 0.6))),
    )


def complaint_of(read):
    """What is wrong; empty if nothing is. Any other error fails the test."""
    try:
        read()
    except ConfigError as error:
        return str(error)
    return ""


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_dump_and_load_round_trip(tmp_path_factory, job):
    path = tmp_path_factory.getbasetemp() / "job.yaml"
    path.write_text(dump_job(job))
    assert load_job(path) == job


@given(st.recursive(plain, lambda inner: st.dictionaries(st.sampled_from(["model", "grid", "kind", "data"]), inner)))
def test_any_tree_is_a_job_or_a_complaint(tree):
    assert "\n" not in complaint_of(lambda: parse_job(tree))


@given(st.text(max_size=30))
def test_any_text_is_a_job_or_a_complaint(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    assert "\n" not in complaint_of(lambda: load_job(path))


@given(st.floats(1e-30, 1e30), st.integers(0, 17))
def test_any_usual_form_of_a_number_is_one(tmp_path_factory, value, digits):
    written = f"{value:.{digits}e}"
    tree = {"model": {"kind": "convnet"}, "data": {"kind": "digits"}, "train": {"steps": 1}}
    tree["grid"] = dict.fromkeys(["pipelines", "stages", "microbatches"], 1)
    assert math.isclose(parse_job(tree, [f"optimizer.lr={written}"]).optimizer.lr, float(written), rel_tol=0)
