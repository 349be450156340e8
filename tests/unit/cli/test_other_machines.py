"""What the command line says of other machines: where they come, by what token."""

import io
import re
from argparse import Namespace

import pytest

from holdfast.cli.arguments import token_from
from holdfast.cli.commands import make_parser
from holdfast.cli.train import listening
from holdfast.errors import ConfigError

TOKEN = "a-token-of-16-letters"


def test_a_token_comes_out_of_a_file_or_a_pipe_or_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert token_from(str(path), {"HOLDFAST_TOKEN": "another-one-of-16"}) == TOKEN
    monkeypatch.setattr("sys.stdin", io.StringIO(TOKEN))
    assert token_from("-", {}) == TOKEN
    environ = {"HOLDFAST_TOKEN": TOKEN}
    assert (token_from(None, environ), environ) == (TOKEN, {}), "what is started does not have it"
    assert token_from(None, {}) == ""


@pytest.mark.parametrize("text", ["", "short", f"{TOKEN} {TOKEN}", "x" * 201, "a-token-with-ümläuts"])
def test_what_is_no_token_is_refused_and_not_repeated(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no token; expected 16 to 200") as error:
        token_from(str(path), {})
    assert not text or text not in str(error.value)


def test_a_token_that_cannot_be_read_is_said_so(tmp_path):
    with pytest.raises(ConfigError, match="missing: cannot be read: No such file"):
        token_from(str(tmp_path / "missing"), {})
    with pytest.raises(ConfigError, match="HOLDFAST_TOKEN: holds no token"):
        token_from(None, {"HOLDFAST_TOKEN": "short"})


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [("10.0.0.5:7000", "10.0.0.5", "7000"), ("10.0.0.5", "10.0.0.5", "0"), ("n1.cluster:65535", "n1.cluster", "65535")],
)
def test_where_a_job_listens_overrides_its_file(given, host, port):
    told = listening(Namespace(listen=given, overrides=["grid.stages=2"]))
    assert told == ["grid.stages=2", f"control.host={host}", f"control.port={port}"]


@pytest.mark.parametrize(
    "given", ["10.0.0.5:", "10.0.0.5:http", "0.0.0.0:7000", ":::7000", "fd00::5", "[::1]:7000", "n1:65536"]
)
def test_where_nobody_could_come_is_refused(given):
    with pytest.raises(ConfigError, match=f"--listen {re.escape(given)}: (expected|the last port)"):
        listening(Namespace(listen=given, overrides=[]))


def test_a_coordinator_runs_no_worker_unless_it_is_told_to():
    slots = [make_parser().parse_args(["coordinator", "job.yaml", *more]).slots for more in ([], ["--slots", "2"])]
    assert slots == [0, 2]
    assert make_parser().parse_args(["train", "job.yaml"]).slots is None


@pytest.mark.parametrize("given", ["n1", "n1:7000,", "n1:70000", "[fd00::1]:7000"])
def test_where_no_coordinator_can_be_is_refused(given):
    args = make_parser().parse_args(["agent", "--coordinator", given])
    with pytest.raises(ConfigError, match=f"coordinator {re.escape(given)}: (expected|the last port)"):
        args.run(args)


def test_an_agent_has_room_for_somebody(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["agent", "--coordinator", "h:1", "--slots", "0"])
    assert "expected a whole number from 1" in capsys.readouterr().err
