"""The profiles in the repository: they load, plans are made of them, and the script makes the estimated ones again."""

import runpy
from pathlib import Path

import pytest

from holdfast.config.profiles import load_profile
from holdfast.core.placement import split_evenly
from holdfast.core.profile import costs_from_profile
from holdfast.schedule.builders import regular_plan
from holdfast.schedule.evaluate import evaluate

FOLDER = Path(__file__).resolve().parents[3] / "profiles"
PAPER = {
    "gpt3-medium-350m": (24, 0.355e9, 8, 2),
    "gpt3-3.35b": (28, 3.35e9, 1, 4),
    "gpt3-6.7b": (32, 6.7e9, 1, 8),
}
PEAK_FLOPS, BF16_BYTES, CONTEXT = 312e12, 2, 2048


def test_every_file_is_of_a_model_of_the_paper():
    assert {path.stem for path in FOLDER.glob("*.json")} == {*PAPER, *(f"{name}-h200" for name in PAPER)}


@pytest.mark.parametrize("name", PAPER)
def test_it_is_labelled_estimated_and_has_the_models_size(name):
    blocks, parameters, microbatch, _ = PAPER[name]
    profile = load_profile(FOLDER / f"{name}.json")
    assert profile.estimated
    assert profile.iterations == 0
    assert len(profile.layers) == blocks + 2
    assert profile.machine["microbatch"] == microbatch
    untied = sum(layer.parameter_bytes for layer in profile.layers[:-1]) / BF16_BYTES
    assert untied == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("name", PAPER)
def test_what_was_measured_says_where_and_is_of_the_same_model(name):
    measured, estimated = (load_profile(FOLDER / f"{name}{which}.json") for which in ("-h200", ""))
    assert not measured.estimated
    assert measured.iterations >= 10
    assert "H200" in measured.machine["device"]
    assert [layer.name for layer in measured.layers] == [layer.name for layer in estimated.layers]
    for one, other in zip(measured.layers, estimated.layers, strict=True):
        assert one.parameter_bytes == pytest.approx(2 * other.parameter_bytes, rel=0.01), "float32, and not bf16"
    assert measured.layers[1].boundary_bytes == estimated.layers[1].boundary_bytes
    plan = regular_plan(2, split_evenly(len(measured.layers), PAPER[name][3]), 8)
    assert evaluate(plan, costs_from_profile(measured)).makespan > 0


@pytest.mark.parametrize("name", PAPER)
def test_no_time_beats_the_accelerator(name):
    """Two operations per parameter and token in each of F, I and W, at the peak, is less than a block can take."""
    profile = load_profile(FOLDER / f"{name}.json")
    for layer in profile.layers[1:-1]:
        least = 2 * layer.parameter_bytes / BF16_BYTES * PAPER[name][2] * CONTEXT / PEAK_FLOPS
        for seconds in (layer.forward_s, layer.backward_input_s, layer.backward_weight_s):
            assert 1.5 * least < seconds < 6 * least


@pytest.mark.parametrize("name", PAPER)
def test_a_plan_of_the_papers_stages_is_timed_with_it(name):
    profile, stages = load_profile(FOLDER / f"{name}.json"), PAPER[name][3]
    costs = costs_from_profile(profile, capacity_bytes=80e9)
    plan = regular_plan(2, split_evenly(costs.num_layers, stages), 8)
    timeline = evaluate(plan, costs)
    slowest = max(costs.of(part).total for part in split_evenly(costs.num_layers, stages))
    assert 8 * slowest < timeline.makespan < 3 * 8 * slowest
    assert max(peak for _, peak in timeline.peak_memory) < 80e9


@pytest.mark.parametrize("name", PAPER)
def test_the_script_makes_the_same_again(name):
    made = runpy.run_path(str(FOLDER / "estimate.py"))
    (shape,) = (shape for shape in made["SHAPES"] if shape.name == name)
    assert made["estimate"](shape) == load_profile(FOLDER / f"{name}.json")
