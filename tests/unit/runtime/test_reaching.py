"""How the coordinators of a job are found in its run directory."""

from contextlib import closing

import msgspec
import pytest
from tests.contract.test_attempts import WHY, decision
from tests.dist.conftest import JOBS

from holdfast import parse_job
from holdfast.cli.arguments import reach_from
from holdfast.cli.commands import make_parser
from holdfast.config.job import Tls
from holdfast.config.load import dump_job
from holdfast.control.chain.leading import end_for_good, lead
from holdfast.control.chain.opening import open_chain
from holdfast.control.reach import Reach
from holdfast.errors import CoordinatorUnavailable
from holdfast.runtime.launch import reaching
from holdfast.runtime.launch.directory import JOB_ID, TOKEN, decisions_of, end_the_one_before
from holdfast.runtime.launch.reaching import reach_in

OURS, GIVEN = "the-token-in-the-directory", "another-that-was-given"
TLS = Tls(ca="/certs/ca.pem", cert="/certs/cert.pem", key="/certs/key.pem")


@pytest.fixture
def run_dir(tmp_path):
    """That of a job that was begun, whose coordinator is yet to lead."""
    text = dump_job(
        parse_job(JOBS["small"], ("control.host=10.0.0.1", f"control.tls={msgspec.json.encode(TLS).decode()}"))
    )
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / JOB_ID).write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / TOKEN).write_text(f"{OURS}\n")
    return tmp_path


def says(run_dir, address):
    """Whoever leads there gives a sign of life."""
    with closing(open_chain(decisions_of(run_dir))) as chain:
        chain.say(msgspec.json.encode({"number": 1, "by": 16 * "a", "count": 0, "address": address}))


def found(*words):
    return reach_from(make_parser().parse_args(["agent", "--coordinator", *map(str, words)]))()


def test_all_of_it_is_in_the_directory(run_dir):
    says(run_dir, "n1:7000")
    ours = Reach(addresses="n1:7000", token=OURS, tls=TLS, read=True)
    assert found(run_dir) == ours
    says(run_dir, "n2:7000")
    assert found(run_dir).addresses == "n2:7000", "another one leads"
    assert OURS not in repr(ours)


def test_what_people_give_is_taken(run_dir, tmp_path, monkeypatch):
    says(run_dir, "n1:7000")
    monkeypatch.setenv("HOLDFAST_TOKEN", GIVEN)
    theirs = {name: str(run_dir / "own" / f"{name}.pem") for name in ("ca", "cert", "key")}
    assert found(run_dir, "--certs", run_dir / "own") == Reach(
        addresses="n1:7000", token=GIVEN, tls=Tls(**theirs), read=True
    )


def test_it_is_looked_for_again_until_somebody_has_said_where_it_is(tmp_path, run_dir):
    for place in (tmp_path / "to-be-made", run_dir):
        with pytest.raises(CoordinatorUnavailable, match="no coordinator has said there where it listens"):
            reach_in(place)
    says(run_dir, "")
    with pytest.raises(CoordinatorUnavailable, match="no coordinator has said"):
        reach_in(run_dir)


def test_decisions_that_one_machine_alone_sees_tell_others_nothing(run_dir):
    (run_dir / "control.db").write_bytes(b"")
    with pytest.raises(CoordinatorUnavailable, match="no coordinator has said"):
        reach_in(run_dir)


def test_a_job_that_has_ended_is_told_from_one_that_is_led(run_dir):
    says(run_dir, "n1:7000")
    with closing(open_chain(decisions_of(run_dir))) as chain:
        end_for_good(chain, 16 * "b", WHY, decision(0))
        chain.say(msgspec.json.encode({"number": 1, "by": 16 * "a", "count": 0, "address": "n1:7000"}))
    assert reach_in(run_dir) == WHY


@pytest.mark.parametrize(("outcome", "done"), [("done", True), ("interrupted", False)])
def test_how_an_attempt_has_ended_stays_as_it_was(run_dir, outcome, done):
    ended = msgspec.structs.replace(WHY, outcome=outcome)
    with closing(open_chain(decisions_of(run_dir))) as chain:
        end_for_good(chain, 16 * "b", ended, decision(0))
    assert end_the_one_before(run_dir) is done
    assert reach_in(run_dir) == ended


def test_an_attempt_that_nobody_leads_any_more_ends_before_the_next_one(run_dir):
    with closing(open_chain(decisions_of(run_dir))) as chain:
        lead(chain, job="", by=16 * "a", alone=True, note=print)[0].put(decision(1))
    assert end_the_one_before(run_dir) is False
    assert reach_in(run_dir).outcome == "superseded"


def test_what_is_made_anew_just_now_is_looked_for_again(run_dir, monkeypatch):
    says(run_dir, "n1:7000")
    url = decisions_of(run_dir)
    monkeypatch.setattr(reaching, "seen_by_others", lambda run_dir: url)
    (run_dir / "job.yaml").unlink()
    with pytest.raises(CoordinatorUnavailable, match=r"job\.yaml"):
        reach_in(run_dir)


@pytest.mark.parametrize(("text", "why"), [(None, "cannot be read: No such file"), ("short", "holds no token")])
def test_a_token_that_is_not_there_has_to_be_given(run_dir, text, why):
    says(run_dir, "n1:7000")
    (run_dir / TOKEN).unlink()
    if text is not None:
        (run_dir / TOKEN).write_text(text)
    with pytest.raises(CoordinatorUnavailable, match=f"{TOKEN} {why}.*or --token-file, or HOLDFAST_TOKEN"):
        reach_in(run_dir)
    assert reach_in(run_dir, token=GIVEN).token == GIVEN
