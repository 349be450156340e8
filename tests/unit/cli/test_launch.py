"""``holdfast launch``: the file that it writes, and what it says."""

import ast
import re
import stat
import subprocess

import kubernetes_validate
import pytest
import yaml
from tests.dist.conftest import JOBS, LOOP_SCRIPT

from holdfast import parse_job
from holdfast.cli.main import main
from holdfast.config.load import dump_job

CHECKPOINTS = "checkpoint.every=5"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where the job file is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(dump_job(parse_job(JOBS["small"], ())))
    return tmp_path


def launched(*words):
    assert main(["launch", "--on", "slurm", "--dry-run", *map(str, words)]) == 0


def script(name="small"):
    with open(f"{name}.slurm.sh") as file:
        text = file.read()
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    return text


def options(text):
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    return [line.partition("  #")[0] for line in lines]


def begins(text):
    """The words of the command that begins the job, as the shell reads them; its program is printed instead of run."""
    body = text[text.index("begin() {") : text.index("code=137\nwhile")].replace("exec ", "printf '%s\\n' ")
    lines = ["holdfast=(holdfast)", "run_dir='/the run'", "slots=2", "hostname() { echo n0; }", body, "begin"]
    return subprocess.run(
        ["bash", "-c", "\n".join(lines)], text=True, capture_output=True, check=True
    ).stdout.splitlines()


TLS = "control.tls={ca: '/the run/certs/ca.pem', cert: '/the run/certs/cert.pem', key: '/the run/certs/key.pem'}"
WHERE = ["--run-dir", "/the run", "--resume", "auto", "--listen", "n0", "--slots", "2", "--set", TLS]


def test_as_many_nodes_as_the_workers_need_and_spare_ones(folder, capsys):
    launched("--slots", 2, "--spare-nodes", 1, "--set", CHECKPOINTS, "--option=--time=12:00:00", "small.yaml")
    text = script()
    assert options(text) == [
        "--job-name=small",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--no-kill",
        "--requeue",
        "--signal=B:USR1@120",
        "--time=12:00:00",
    ]
    assert begins(text) == ["holdfast", "train", "small.yaml", "--set", CHECKPOINTS, *WHERE]
    assert f"cd {folder} " in text
    assert f"run_dir={folder}/runs/small\n" in text
    assert stat.S_IMODE((folder / "small.slurm.sh").stat().st_mode) == 0o700
    assert capsys.readouterr().out.splitlines() == [
        "small.slurm.sh: 4 nodes with room for 2 workers each, for 6 workers; the job writes into runs/small",
        "submit it by: sbatch small.slurm.sh",
    ]


def test_a_job_without_checkpoints_is_not_queued_again_and_that_is_said(capsys):
    launched("--slots", 6, "small.yaml")
    text = script()
    assert {"--nodes=1", "--no-requeue"} <= {*options(text)}
    assert not [line for line in options(text) if "signal" in line]
    assert "scontrol requeue" not in text
    assert "checkpoint.every is 0: if the allocation ends before the job, all is lost" in capsys.readouterr().err


def test_the_notice_is_longer_than_what_a_checkpoint_may_take():
    launched("--slots", 6, "--set", CHECKPOINTS, "--set", "checkpoint.on_sigterm=300.5", "small.yaml")
    assert "--signal=B:USR1@361" in options(script())


def test_each_worker_on_a_gpu_has_one_of_its_own():
    launched("--slots", 2, "--set", "train.device=cuda", "small.yaml")
    assert "--gpus-per-node=2" in options(script())


def test_a_script_of_ones_own_is_given_its_arguments(folder):
    given = ("--lr", "0.1", "--name", "two words")
    launched("--workers", 4, "--slots", 2, "--set", CHECKPOINTS, "--out", "own.slurm.sh", LOOP_SCRIPT, *given)
    words = ["holdfast", "run", "--workers", "4", "--set", CHECKPOINTS, *WHERE, str(LOOP_SCRIPT), *given]
    assert begins(script("own")) == words


def test_certificates_of_the_jobs_own_are_used_and_none_are_made_where_none_are_wanted():
    for number, more in enumerate(("control.insecure=true", "control.tls={ca: /a, cert: /b, key: /c}")):
        launched("--slots", 2, "--set", more, "--out", f"{number}.slurm.sh", "small.yaml")
        text = script(number)
        assert "certs" not in text
        assert begins(text) == ["holdfast", "train", "small.yaml", "--set", more, *WHERE[:-2]]


def test_what_a_person_has_changed_is_not_overwritten(folder, capsys):
    launched("--slots", 2, "small.yaml")
    launched("--slots", 2, "small.yaml")
    path = folder / "small.slurm.sh"
    path.write_text(changed := path.read_text() + "# ours\n")
    assert main(["launch", "--on", "slurm", "--slots", "2", "--dry-run", "small.yaml"]) == 2
    assert "small.slurm.sh: is there, and is another one" in capsys.readouterr().err
    assert path.read_text() == changed


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--nodes", "2", "--slots", "2", "small.yaml"),
            "--nodes 2, --slots 2: there is room for 4 workers, and the job",
        ),
        (("small.yaml", "--lr", "1"), "--lr: a job file is given no arguments; expected options before it, or"),
        (("--set", "control.store=sqlite", "small.yaml"), "control.store: sqlite: is seen on one node"),
        (("--set", "resume=runs/before", "small.yaml"), "resume: runs/before: expected auto, or nothing"),
        (("missing.yaml",), "missing.yaml: "),
        (("--workers", "2", "missing.py"), "missing.py: there is no such script"),
        (("--slots", "2", "--out", "no/folder.sh", "small.yaml"), "no/folder.sh: cannot be written: No such file"),
    ],
)
def test_what_cannot_run_is_said_before_anything_is_submitted(words, line, capsys):
    assert main(["launch", "--on", "slurm", "--dry-run", *words]) == 2
    assert line in capsys.readouterr().err


def test_without_sbatch_the_file_is_written_all_the_same(folder, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(folder))
    assert main(["launch", "--on", "slurm", "--slots", "2", "small.yaml"]) == 2
    assert "sbatch: is not installed here; call it where it is: sbatch small.slurm.sh" in capsys.readouterr().err
    assert (folder / "small.slurm.sh").exists()


@pytest.mark.parametrize(("code", "returned"), [(0, 0), (1, 2)])
def test_what_sbatch_says_is_what_comes_of_it(folder, monkeypatch, capfd, code, returned):
    sbatch = folder / "sbatch"
    sbatch.write_text(f"#!/bin/sh\necho got $*\nexit {code}\n")
    sbatch.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    assert main(["launch", "--on", "slurm", "--slots", "2", "small.yaml"]) == returned
    told = capfd.readouterr()
    assert "got small.slurm.sh" in told.out
    assert ("has refused it, with exit code 1" in told.err) == bool(code)
    assert ("holdfast inspect --follow runs/small" in told.out) == (not code)


def begun_by(script, *lines):
    """The words of the command with which a node's script begins the job; its program is printed instead of run."""
    body = script[script.index("begin() {") : script.index("take_part() {")].replace("exec ", "printf '%s\\n' ")
    text = "\n".join(["holdfast=(:)", "run_dir='/the run'", "slots=2", *lines, body, "begin"])
    return subprocess.run(["bash", "-c", text], text=True, capture_output=True, check=True).stdout.splitlines()


def leaving(address):
    where = ["--run-dir", "/the run", "--resume", "auto", "--listen", address, "--slots", "2", "--notice", "leave"]
    return [":", "train", "small.yaml", "--set", CHECKPOINTS, *where, "--set", TLS]


class OnKubernetes:
    """A job as its manifest has it."""

    def __init__(self, *words):
        where = ("--image", "registry/img:1", "--claim", "data:/shared", "--folder", "/shared/a project")
        assert main(["launch", "--on", "kubernetes", "--dry-run", *where, *map(str, words)]) == 0
        with open("small.kubernetes.yaml") as file:
            self.text = file.read()
        self.manifest = yaml.safe_load(self.text)
        self.spec = self.manifest["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        (self.script,) = self.container["args"]


def test_a_manifest_is_what_every_kubernetes_takes_that_can_do_it():
    job = OnKubernetes(
        "--slots", 2, "--spare-nodes", 1, "--set", CHECKPOINTS, "--set", "train.device=cuda", "small.yaml"
    )
    for minor in range(31, 38):
        kubernetes_validate.validate(job.manifest, f"1.{minor}", strict=True)
    assert subprocess.run(["bash", "-n"], input=job.script, text=True, capture_output=True, check=True).stderr == ""
    assert (job.manifest["spec"]["completions"], job.manifest["spec"]["parallelism"]) == (4, 4)
    assert job.container["resources"] == {"requests": {"cpu": "2"}, "limits": {"nvidia.com/gpu": 2}}
    assert job.spec["terminationGracePeriodSeconds"] == 60
    mounts = {mount["name"]: mount["mountPath"] for mount in job.container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in job.spec["volumes"]}
    assert mounts == {"shared": "/shared", "memory": "/dev/shm"}
    assert volumes["shared"] == {"persistentVolumeClaim": {"claimName": "data"}}


def test_the_first_pod_begins_the_job_and_leaves_at_a_notice():
    script = OnKubernetes("--slots", 2, "--set", CHECKPOINTS, "small.yaml").script
    assert begun_by(script, "POD_IP=10.0.0.7") == leaving("10.0.0.7")
    assert "until cd '/shared/a project'; do" in script
    assert "run_dir='/shared/a project/runs/small'" in script


@pytest.mark.parametrize(
    ("name", "called"), [("2024", "2024"), ("My_Job.2", "my-job-2"), ("-", "holdfast"), ("x" * 80, "x" * 50)]
)
def test_a_name_is_one_that_pods_can_have(folder, name, called):
    (folder / "small.yaml").write_text(dump_job(parse_job({**JOBS["small"], "name": name}, ())))
    words = ("--slots", 6, "--out", "small.kubernetes.yaml", "small.yaml")
    assert OnKubernetes(*words).manifest["metadata"]["name"] == called


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--claim", "data:/shared"), "--on kubernetes: expected --image IMAGE, with Holdfast in it, and --claim"),
        (("--image", "img", "--claim", "data"), "--on kubernetes: expected --image IMAGE, with Holdfast in it, and"),
        (("--image", "img", "--claim", "data:/shared"), "where pods mount data; expected where they see it"),
        (
            ("--image", "img", "--claim", "data:/shared", "--folder", "/shared/x", "--run-dir", "/runs/x"),
            "--run-dir: /runs/x is not below /shared, where pods mount data",
        ),
        (("--option=--time=1"), "--option: is not for --on kubernetes"),
        (("--set", "control.coordinators=1"), "control.coordinators: 1: no pod could be done without"),
    ],
)
def test_what_pods_cannot_run_is_said_before_anything_is_submitted(words, line, capsys):
    words = [words] if isinstance(words, str) else words
    assert main(["launch", "--on", "kubernetes", "--dry-run", *words, "--slots", "2", "small.yaml"]) == 2
    assert line in capsys.readouterr().err


def test_what_is_for_pods_is_not_for_slurm(capsys):
    assert main(["launch", "--on", "slurm", "--dry-run", "--image", "img", "small.yaml"]) == 2
    assert "--image: is not for --on slurm" in capsys.readouterr().err


def test_machines_are_named_and_the_first_one_begins_the_job(folder):
    words = ("--hosts", "n1,me@n2", "--slots", "3", "--option=-p2222", "--set", CHECKPOINTS)
    assert main(["launch", "--on", "ssh", "--dry-run", *words, "small.yaml"]) == 0
    text = (folder / "small.ssh.sh").read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    assert "hosts=(n1 me@n2)" in text
    assert "ssh=(ssh -p2222 -o BatchMode=yes)" in text
    body = text[text.index("    begin() {") : text.index("    take_part() {")].replace("exec ", "printf '%s\\n' ")
    lines = ["holdfast=(:)", "run_dir='/the run'", "slots=3", "host=n1", body, "begin"]
    words = subprocess.run(["bash", "-c", "\n".join(lines)], text=True, capture_output=True, check=True).stdout.split(
        "\n"
    )
    where = ["--run-dir", "/the run", "--resume", "auto", "--listen", "n1", "--slots", "3", "--set", TLS, ""]
    assert words == [":", "train", "small.yaml", "--set", CHECKPOINTS, *where]


@pytest.mark.parametrize("hosts", [(), ("--hosts", ""), ("--hosts", "n1,-oProxyCommand=x"), ("--hosts", "a b")])
def test_machines_have_names(hosts, capsys):
    assert main(["launch", "--on", "ssh", "--dry-run", *hosts, "--slots", "6", "small.yaml"]) == 2
    assert "expected HOST or USER@HOST, several joined by commas" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 2)])
def test_ray_is_asked_for_room_and_runs_the_script_on_each_node(folder, device, gpus):
    words = ("--slots", "2", "--spare-nodes", "1", "--set", CHECKPOINTS)
    where = ("--folder", "/a '''\"\"\"\\folder", "--set", f"train.device={device}") if gpus else ()
    assert main(["launch", "--on", "ray", "--dry-run", *words, *where, "small.yaml"]) == 0
    text = (folder / "small.ray.py").read_text()
    program = ast.parse(text)
    known = {
        target.id: ast.literal_eval(line.value)
        for line in program.body
        if isinstance(line, ast.Assign)
        for target in line.targets
        if isinstance(target, ast.Name)
    }
    assert known["NODES"] == 4
    assert re.fullmatch("small-[0-9a-f]{8}", known["NAME"])
    assert f"CPUS, GPUS = 2, {gpus}  # on each of them" in text
    script = known["SCRIPT"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=True).stderr == ""
    begun = begun_by(script, "ADDRESS=10.0.0.7")
    assert begun == leaving("10.0.0.7") if not gpus else "train.device=cuda" in begun
    assert "until cd '/a '\"'\"''\"'\"''\"'\"'\"\"\"\\folder'; do" in script or not gpus


def test_what_torchrun_runs_is_to_be_called_by_hand(folder, capsys):
    assert main(["launch", "--on", "torchrun", "--slots", "2", "--set", CHECKPOINTS, "small.yaml"]) == 0
    assert "call it as the file says, on each of 3 nodes\n" in capsys.readouterr().out
    path = folder / "small.torchrun.sh"
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    assert begun_by(text, "MASTER_ADDR=n1") == leaving("n1")


@pytest.mark.parametrize("option", ["--nodes", "--spare-nodes"])
def test_the_number_of_machines_is_said_once(option, capsys):
    assert main(["launch", "--on", "ssh", "--dry-run", "--hosts", "n1,n2", option, "2", "small.yaml"]) == 2
    assert f"{option}: is not for --on ssh" in capsys.readouterr().err
