"""What records of a study come to, as numbers, text and pictures."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest

from holdfast.errors import ConfigError
from holdfast.study.findings import find
from holdfast.study.outcomes import Baseline, Held, Outcome, Spent, load, points, save
from holdfast.study.pictures import draw
from holdfast.study.telling import to_csv, to_json, to_markdown, to_text

AT, STEPS = 5, 20
TIMES = points(AT, STEPS)
SPENT = Spent(wall_s=2.0, cpu_s=1.0)


def held(*losses, accuracy=0.5):
    return tuple(Held(steps=s, loss=x, accuracy=accuracy) for s, x in zip(TIMES, losses, strict=True))


def baseline(seed, loss, accuracy=0.5):
    return Baseline(
        seed=seed,
        curve=(Held(steps=0, loss=3.0, accuracy=0.0 if accuracy else None), *held(*[loss] * 4, accuracy=accuracy)),
        before={AT: Held(steps=AT, loss=2 * loss, accuracy=accuracy and 0.25)},
        after={AT: held(*[loss] * 4, accuracy=accuracy)},
        weights_sha256={AT: "ab"},
        minibatch_s=0.25,
        checkpoint=SPENT,
        steps_per_epoch=8,
        model_bytes=10,
        state_bytes=20,
        samples=(8, 2),
    )


def outcome(strategy, loss, seed=0, progress=50, survivors=None, accuracy=0.75, **more):
    given = {"minibatch_s": 0.3, "baseline_s": 0.2, **more}
    after = held(loss, loss, loss, loss, accuracy=accuracy)
    return Outcome(
        seed=seed, at=AT, strategy=strategy, progress=progress, survivors=survivors, after=after,
        weights_sha256="cd", **given,
    )  # fmt: skip


RESTART = {"progress": None, "init": SPENT, "restart": SPENT, "replay": Spent(wall_s=9.0, cpu_s=1.3), "replayed": 5}
OUTCOMES = (
    outcome("lossy-forward", 1.1, survivors=2),
    outcome("lossy-forward", 1.05, survivors=4),
    outcome("rollback", 0.8, minibatch_s=0.44),
    outcome("checkpoint-restart", 1.0, minibatch_s=0.2, **RESTART),
)


def found_of(baselines, outcomes, microbatches=8):
    return find(baselines, outcomes, workers=8, microbatches=microbatches, steps=STEPS)


def test_points_after_a_failure_end_with_the_run():
    assert points(5, 20) == (6, 7, 16, 20)
    assert points(19, 20) == (20,)


def test_differences_are_of_magnitudes_over_all_seeds():
    outcomes = (outcome("skip", 1.1), outcome("skip", 3.6, seed=1, accuracy=0.25))
    found = found_of((baseline(0, 1.0), baseline(1, 4.0)), outcomes)
    row = found.after(AT)
    assert [each.name for each in row] == ["before", "baseline", "skip 50 %"]
    assert [each.loss for each in row] == pytest.approx([5.0, 2.5, 2.35])
    assert [each.loss_difference for each in row] == pytest.approx([1.0, 0.0, 0.1])
    assert [each.accuracy_difference for each in row] == pytest.approx([-0.25, 0.0, 0.0])
    assert [each.later for each in found.findings if each.name == "skip 50 %"] == [0, 1, 10, 14]
    assert [each.end for each in found.findings if each.name == "skip 50 %"] == [False, False, False, True]


def test_costs_beside_the_formulas():
    costs = {each.name: each for each in found_of((baseline(0, 1.0),), OUTCOMES).costs}
    restart = costs["checkpoint-restart"]
    assert (restart.measured_s, restart.predicted_s) == pytest.approx((1 + 1 + 1.3, 1 + 1 + 5 * 0.25))
    assert restart.near
    back = costs["rollback 50 %"]
    assert (back.slowdown, back.measured_s, back.predicted_s) == pytest.approx((2.2, 0.24, 0.25))
    lossy = costs["lossy-forward 50 % 2"]
    assert (lossy.measured_s, lossy.predicted_s, lossy.near) == (pytest.approx(0.1), 0.0, False)


def test_what_two_of_eight_lose_is_a_quarter_of_a_mini_batch_again():
    (cost,) = found_of(
        (baseline(0, 1.0),), (outcome("adaptive", 1.0, progress=None, survivors=6, minibatch_s=0.26),)
    ).costs
    assert (cost.name, cost.measured_s, cost.predicted_s) == ("adaptive 6", pytest.approx(0.06), 0.25 / 4)


def test_a_prediction_that_is_off_by_half_a_mini_batch_is_not_near():
    (cost,) = found_of((baseline(0, 1.0),), (outcome("rollback", 1.0, minibatch_s=0.32),)).costs
    assert (cost.measured_s, cost.predicted_s, cost.near) == (pytest.approx(0.12), 0.25, False)


@pytest.mark.parametrize(("minibatch_s", "near"), [(0.2, True), (0.44, True), (0.48, False)])
def test_what_is_predicted_of_adaptive_is_the_most_that_it_costs(minibatch_s, near):
    struck = outcome("adaptive", 1.0, progress=None, survivors=2, minibatch_s=minibatch_s)
    (cost,) = found_of((baseline(0, 1.0),), (struck,)).costs
    assert (cost.predicted_s, cost.near) == (0.25 * 6 / 8, near)


def test_the_formulas_know_how_many_micro_batches_are_shared():
    found = found_of((baseline(0, 1.0),), OUTCOMES, microbatches=56)
    of = found.data_parallel(3600.0)
    assert (of.microbatches, of.state_bytes, of.init_s, of.restart_s) == (56, 20, 1.0, 1.0)
    assert f"| adaptive | {0.25 / 7:.3f} |" in to_markdown(found)


def test_a_loss_that_is_negative_or_0_has_a_difference():
    found = found_of((baseline(0, -2.0), baseline(1, -2.0)), (outcome("skip", -1.0), outcome("skip", -3.0, seed=1)))
    assert found.after(AT)[2].loss_difference == pytest.approx(0.5)
    zero = found_of((baseline(0, 0.0),), (outcome("skip", 0.0), outcome("rollback", 0.1)))
    assert [each.loss_difference for each in zero.after(AT)] == [0, 0, 0, float("inf")]


def test_runs_that_were_looked_at_at_other_steps_have_a_curve_of_those_in_common():
    more = baseline(1, 4.0)
    more = msgspec.structs.replace(more, curve=(*more.curve, Held(steps=STEPS + 1, loss=9.0, accuracy=0.5)))
    pictures = dict(draw(found_of((baseline(0, 1.0), more), (outcome("skip", 1.0), outcome("skip", 1.0, seed=1)))))
    line = ElementTree.fromstring(pictures["curve-loss.svg"]).find("{http://www.w3.org/2000/svg}polyline")
    assert len(line.get("points").split()) == 1 + len(TIMES)


def test_what_was_not_measured_is_not_told():
    found = found_of((baseline(0, 1.0),), (outcome("skip", 1.0),))
    assert "replay.svg" not in dict(draw(found))
    report = to_markdown(found)
    assert "replay.svg" not in report
    assert "one failure an hour" not in report


def test_what_was_published_is_counted():
    text = to_text(found_of((baseline(0, 1.0),), OUTCOMES))
    assert "lossy-forward differs no more than rollback in 2 of 2 scenarios" in text
    assert "differs less with more survivors in 1 of 1 comparisons" in text
    assert "more progress" not in text, "there is one"
    assert "(adaptive: at most so much), in 2 of 4 scenarios" in text


def test_forms_of_a_study():
    found = found_of((baseline(0, 1.0),), OUTCOMES)
    assert json.loads(to_json(found))["findings"][0]["name"] == "before"
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert len(rows) == 1 + 4 * len(OUTCOMES)
    assert (rows[0]["strategy"], rows[0]["steps"], rows[0]["loss"], rows[0]["baseline_loss"]) == (
        "before",
        "5",
        "2.0",
        "1.0",
    )
    assert (rows[1]["strategy"], rows[1]["loss"], rows[1]["baseline_loss"]) == ("lossy-forward", "1.1", "1.0")
    restart = [rows[-1][name] for name in ("init_s", "restart_s", "replay_s", "replayed", "weights_sha256")]
    assert restart == ["1.0", "1.0", "1.3", "5", "cd"]
    report = to_markdown(found)
    assert "| rollback 50 % | 0.8000 | 20.00 % |" in report
    assert "| before | 2.0000 | 100.00 % |" in report
    assert "| rollback 50 % | 75.00 % | +25.00 |" in report
    assert "| before | 25.00 % | -25.00 |" in report
    assert "| 5 | checkpoint-restart | 3.300 | 3.250 | yes |" in report
    pictures = dict(draw(found))
    named = {line.rpartition("(")[2].rstrip(")") for line in report.splitlines() if line.startswith("![")}
    assert named <= pictures.keys()
    for picture in pictures.values():
        ElementTree.fromstring(picture)
    assert "20.00 %" in pictures[f"loss-step-{AT}.svg"]
    assert "+25.00" in pictures[f"accuracy-step-{AT}.svg"]
    assert "2.20x" in pictures[f"slowdown-step-{AT}.svg"]


def test_without_classes_there_is_no_accuracy():
    found = found_of((baseline(0, 1.0, None),), (outcome("skip", 1.1, accuracy=None),))
    assert not any("accuracy" in name for name, _ in draw(found))
    assert "![accuracy]" not in to_markdown(found)


def test_a_record_is_read_as_it_was_written_and_nothing_else_is(tmp_path):
    file = tmp_path / "seed-0" / "a.json"
    assert load(file, Outcome) is None
    save(file, OUTCOMES[0])
    assert load(file, Outcome) == OUTCOMES[0]
    assert [each.name for each in file.parent.iterdir()] == ["a.json"]
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"a\.json: is no record of a study"):
        load(file, Outcome)
