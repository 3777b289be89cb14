"""Each row of docs/coming_from.md: its commands are typed on a cluster inside this machine, and do what it promises.

CPU devices stand for GPUs: `--gpus` is typed as `--devices`. 12, 3 and JOB are jobs of the test, gpu01 is a host of it.
"""

from __future__ import annotations

import csv
import getpass
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, RunningCluster, new_cluster, until
from tests.hang import HANG_S
from tests.local_package import write_package

PAGE = REPOSITORY / "docs" / "coming_from.md"

NOT_TYPED = {"clusterd top": "draws on a terminal: tests/tui"}
"""Commands of the page that no row types, with the reason."""

NOT_TRIED = {
    "nvidia-smi before a start": "needs a GPU that somebody else uses: tests/scenarios/test_shared_machine.py",
}
"""Rows that are not tried, with the reason."""

ME = getpass.getuser()

SETTINGS = f"""\
[tenants.vision]
members = ["{ME}"]
quota = 1
"""


def _rows() -> dict[str, list[str]]:
    """Commands of each row of the page's tables, by its first column without the marks of code."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] not in ("habit", "---"):
            codes = re.findall(r"`(clusterd [^`]+)`", " ".join(cells[1:]))
            found[cells[0].replace("`", "")] = [code for code in codes if code not in NOT_TYPED]
    return found


ROWS = _rows()


class Prompt:
    """A directory at whose prompt the commands of the page are typed."""

    def __init__(self, cluster: RunningCluster, work: Path) -> None:
        self.cluster = cluster
        self.work = work

    def types(
        self, command: str, *places: tuple[str, str], typed: str = "", fails: int = 0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Type a command of the page with the names in it replaced; its exit code must be `fails`."""
        for old, new in (*places, ("--gpus", "--devices"), ("gpu01", "local0")):
            command = command.replace(old, new)
        done = subprocess.run(
            ["bash", "-c", command], input=typed, cwd=self.work, env={**self.cluster.environment, **env},
            capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        assert done.returncode == fails, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}{self.cluster.log()}"
        return done

    def script(self, body: str, *options: str) -> None:
        """Write a batch script."""
        lines = "".join(f"#SBATCH {option}\n" for option in options)
        (self.work / "job.sh").write_text(f"#!/bin/bash\n{lines}{body}\n")

    def submit(self, body: str, *options: str) -> str:
        """Submit a job of this shell script, on one core; returns its id."""
        return self.cluster.run(
            "run", "-d", "--no-snapshot", *options, "--", "sh", "-c", body, cwd=self.work
        ).stdout.strip()

    def running(self, body: str = "echo begun; sleep 1000", *options: str) -> str:
        """As `submit`, once it has printed a line."""
        job = self.submit(body, *options)
        self.output(job, "\n")
        return job

    def waiting(self, *options: str) -> str:
        """A job that waits for one which does not end."""
        return self.submit("true", "--after", f"{self.running()}:any", *options)

    def output(self, job: str, text: str) -> str:
        """Output of a job, once `text` is in it."""
        found = ""

        def look() -> bool:
            nonlocal found
            found = self.cluster.run("logs", job, check=False).stdout
            return text in found

        until(look, HANG_S, lambda: self.cluster.story(job))
        return found

    def ends(self, job: str) -> str:
        """State in which a job ends."""
        return str(self.cluster.wait_for(job, lambda row: row["ended_s"] is not None)["state"])


@pytest.fixture(scope="module")
def _cluster() -> Iterator[RunningCluster]:
    with new_cluster() as made:
        settings = made.directory / "clusterd.toml"
        settings.write_text(SETTINGS)
        made.environment["CLUSTERD_CONFIG"] = str(settings)
        made.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        made.start(hosts=2, devices=4)
        made.wait_until_up(2)
        yield made


@pytest.fixture
def lab(_cluster: RunningCluster, tmp_path: Path) -> Iterator[Prompt]:
    """The cluster of all rows, free of the jobs, claims and notices of earlier ones."""
    yield Prompt(_cluster, tmp_path)
    if (settings := _cluster.directory / "clusterd.toml").read_text() != SETTINGS:
        settings.write_text(SETTINGS)
        _cluster.run("reload")
    left = _cluster.call("jobs")
    if left:  # in one request, which tells of those that ended meanwhile
        _cluster.call("cancel", job=left[0]["id"], also=[row["id"] for row in left[1:]])
    for row in left:
        _cluster.wait_for(row["id"], lambda row: row["ended_s"] is not None and not row["holds_devices"])
    for host in _cluster.call("hosts"):
        for claim in host["claims"]:
            _cluster.run("book" if claim["owner"] else "claim", "cancel" if claim["owner"] else "rm", claim["id"])


Habit = Callable[..., None]

HABITS: dict[str, Habit] = {}

SLOW: set[str] = set()
"""Rows that import torch in several processes, or build an environment."""


def habit(row: str, slow: bool = False) -> Callable[[Habit], Habit]:
    """Register a test of the row, which is called with the commands of the row in their order."""

    def register(function: Habit) -> Habit:
        HABITS[row] = function
        SLOW.update([row] if slow else [])
        return function

    return register


# ---- Slurm ---------------------------------------------------------------------------------------------------------


@habit("sbatch job.sh, sbatch < job.sh")
def _(lab: Prompt, file: str, stdin: str) -> None:
    lab.script("echo $SLURM_JOB_ID is $SLURM_JOB_NAME", "--job-name=prep")
    for command in (file, stdin):
        job = lab.types(command).stdout.strip()
        assert lab.output(job, "\n") == f"{job} is prep\n"
    lab.script('echo "$# arguments: $1, $2"')
    job = lab.types(f"{file} one -- --lr=2").stdout.strip()
    assert lab.output(job, "\n") == "2 arguments: one, --lr=2\n"
    lab.script("true", "--test-only", "--licenses=matlab:1")
    refused = lab.types(file, fails=2).stderr
    assert "line 2: --test-only of Slurm is not understood here: clusterd submit --dry-run" in refused
    assert "line 3: --licenses of Slurm" in refused


@habit("#!/usr/bin/env python, #!/bin/bash -e in a script")
def _(lab: Prompt, submit: str) -> None:
    for text, shown in (
        ("#!/usr/bin/env python\nimport os\nprint('python in', os.environ['SLURM_JOB_ID'])\n", "python in {job}\n"),
        ("#!/bin/bash -e\necho begun\nfalse\necho went on\n", "begun\n"),
    ):
        (lab.work / "train.py").write_text(text)
        job = lab.types(submit).stdout.strip()
        lab.ends(job)
        assert lab.output(job, "\n") == shown.format(job=job)


@habit('sbatch --wrap "make"')
def _(lab: Prompt, wrap: str) -> None:
    (lab.work / "Makefile").write_text("all:\n\t@echo is made\n")
    job = lab.types(wrap).stdout.strip()
    assert lab.output(job, "\n") == "is made\n"


@habit("sbatch --hold, --begin=now+2hours")
def _(lab: Prompt, hold: str, release: str) -> None:
    lab.script("true", "--begin=now+2hours")
    late = lab.types("clusterd submit job.sh").stdout.strip()
    assert "it is not to begin before " in lab.types(f"clusterd why {late}").stdout
    lab.script("echo ran")
    job = lab.types(f"{hold} job.sh").stdout.strip()
    assert lab.cluster.job(job)["held_by"] == ME
    lab.types(release, ("12", job))
    assert lab.output(job, "\n") == "ran\n"


@habit("--exclude=gpu03, --chdir=sub")
def _(lab: Prompt, exclude: str) -> None:
    (lab.work / "sub").mkdir()
    lab.script("echo in ${PWD##*/}", "--chdir=sub")
    job = lab.types(f"{exclude} job.sh", ("gpu03", "local0")).stdout.strip()
    assert lab.output(job, "\n") == "in sub\n"
    assert lab.cluster.job(job)["hosts"] == ["local1"]


@habit("--output=logs/%x-%j.out")
def _(lab: Prompt, log: str, get: str) -> None:
    lab.script("echo to its file; echo and stderr >&2", "--job-name=prep --output=logs/%x-%j.out")
    job = lab.types("clusterd submit job.sh").stdout.strip()
    whole = "to its file\nand stderr\n"
    assert lab.output(job, "stderr\n") == whole
    assert lab.types(log, ("12", job)).stdout == whole
    lab.types(get, ("12", job))
    assert (lab.work / "logs" / f"prep-{job}.out").read_text() == whole
    elsewhere = lab.work.parent / "elsewhere"
    lab.script("echo there", f"--output={elsewhere}/5%%.out")
    job = lab.types("clusterd submit job.sh").stdout.strip()
    lab.output(job, "there\n")
    assert (elsewhere / "5%.out").read_text() == "there\n"
    lab.script("echo logged", "--output=/dev/null")
    job = lab.types("clusterd submit job.sh").stdout.strip()
    assert lab.output(job, "\n") == "logged\n"
    lab.script("echo kept", f"--output={elsewhere}")
    job = lab.types("clusterd submit job.sh").stdout.strip()
    assert f"output {elsewhere}: Is a directory" in lab.output(job, "kept\n")


@habit("--signal=B:USR1@120")
def _(lab: Prompt, warned: str) -> None:
    lab.script("trap 'echo warned; exit 4' USR1; echo begun; while :; do sleep 0.1; done", "--time=60")
    job = lab.types(f"{warned} job.sh").stdout.strip()
    lab.output(job, "begun\n")
    lab.cluster.run("edit", job, "time=2m")  # all of which is before it now
    assert lab.output(job, "warned\n") == "begun\nwarned\n"


@habit("sbatch -n 4 job.sh")
def _(lab: Prompt, submit: str) -> None:
    lab.script("echo once, of $SLURM_NTASKS; srun sh -c 'echo task $SLURM_PROCID'", "-n 1")
    job = lab.types(submit).stdout.strip()
    lab.ends(job)
    first, *tasks = lab.output(job, "task").splitlines()
    assert (first, sorted(tasks)) == ("once, of 4", [f"task {number}" for number in range(4)])


@habit("jid=$(sbatch --parsable job.sh)")
def _(lab: Prompt, after: str) -> None:
    lab.script("true")
    loop = f"jid=$(clusterd submit job.sh); for i in 1 2; do jid=$({after}); done; echo $jid"
    job = lab.types(loop).stdout.strip()
    assert lab.ends(job) == "finished"
    assert lab.cluster.job(job)["spec"]["after"] == [str(int(job) - 1)]


@habit("scontrol requeue $SLURM_JOB_ID in a trap")
def _(lab: Prompt) -> None:
    body = """trap 'scontrol requeue $SLURM_JOB_ID; exit 0' USR1
echo restarts: ${SLURM_RESTART_COUNT:-0}
[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || kill -USR1 $$"""
    lab.script(body)
    job = lab.types("clusterd submit job.sh").stdout.strip()
    assert lab.ends(job) == "finished"
    assert lab.output(job, "restarts") == "restarts: 1\n"


@habit("sbatch --wait, --test-only")
def _(lab: Prompt, wait: str, dry_run: str) -> None:
    lab.script("exit 3")
    lab.types(wait, fails=3)
    before = len(lab.cluster.call("jobs", all=True))
    assert re.search(r"would start now on local\d", lab.types(dry_run).stdout)
    lab.script("true", "--gres=gpu:1")
    assert "job can never start: it asks for 1 GPU, the cluster has 0" in lab.types(dry_run, fails=2).stderr
    assert len(lab.cluster.call("jobs", all=True)) == before


@habit("srun --gres=gpu:2 python train.py")
def _(lab: Prompt, run: str) -> None:
    body = "import sys; print(sys.stdin.read().upper()); print('warned', file=sys.stderr); sys.exit(5)"
    (lab.work / "train.py").write_text(body)
    ran = lab.types(run, typed="from a pipe", fails=5)
    assert ran.stdout == "FROM A PIPE\n"
    assert "warned\n" in ran.stderr


@habit("srun -n 4 ./tool")
def _(lab: Prompt, run: str) -> None:
    (lab.work / "tool").write_text("#!/bin/sh\necho $RANK $SLURM_PROCID of $WORLD_SIZE\n")
    (lab.work / "tool").chmod(0o755)
    assert sorted(lab.types(run).stdout.splitlines()) == [f"{rank}: {rank} {rank} of 4" for rank in range(4)]


@habit("srun in a batch script")
def _(lab: Prompt) -> None:
    lab.script("srun -l -D / sh -c 'echo $SLURM_PROCID in $PWD'\nsrun -o out true", "--ntasks=2")
    job = lab.types("clusterd submit job.sh").stdout.strip()
    assert lab.ends(job) == "failed"
    shown = lab.output(job, "-o").splitlines()
    assert sorted(shown[:2]) == ["0: 0 in /", "1: 1 in /"]


@habit("srun -N 2 --gpus-per-node 4 torchrun ...", slow=True)
@habit("torchrun --nnodes 2 --rdzv-endpoint ... on each machine", slow=True)
def _(lab: Prompt, run: str) -> None:
    body = "import os; os.write(1, b'rank %s of %s\\n' % (os.environb[b'RANK'], os.environb[b'WORLD_SIZE']))"
    (lab.work / "train.py").write_text(body)
    ran = lab.types(run, ("-per-node 4", "-per-node 2"), ("...", "train.py"))
    assert sorted(re.findall(r"rank \d of \d", ran.stdout)) == [f"rank {rank} of 4" for rank in range(4)]


@habit("srun --pty bash, salloc")
def _(lab: Prompt, shell: str, detached: str) -> None:
    assert lab.types(shell, typed="echo $((40 + 2))\nexit 3\n", fails=3).stdout == "42\n"
    job = lab.types(detached).stdout.strip()
    assert len(lab.cluster.wait_for(job, lambda row: row["state"] == "running")["devices"]) == 1


@habit("sattach 12")
def _(lab: Prompt, shell: str, logs: str) -> None:
    job = lab.submit("echo begun; while [ ! -e go ]; do sleep 0.05; done; echo over; exit 1")
    lab.output(job, "begun")
    assert lab.types(shell, ("12", job), typed="echo beside $CLUSTERD_JOB; touch go\n").stdout == f"beside {job}\n"
    assert lab.types(logs, ("12", job)).stdout == "begun\nover\n"


@habit("squeue, squeue -u me, squeue --start")
def _(lab: Prompt, ls: str, mine: str, why: str) -> None:
    waits = lab.waiting("--name", "second")
    for command in (ls, mine):
        assert re.search(rf"(?m)^{waits} +second +queued ", lab.types(command).stdout)
    told = lab.types(why, ("12", waits)).stdout
    assert re.match(
        rf"second \({waits}\) is queued: waits for sh \(\d+, running\)\n  expected start( and end)?: ", told
    )


@habit("sacct -S now-1day, sreport")
def _(lab: Prompt, ls: str, report: str, *formats: str) -> None:
    job = lab.submit("exit 4")
    lab.ends(job)
    assert re.search(rf"(?m)^{job} +sh +failed .* exit code 4 on local\d$", lab.types(ls).stdout)
    for command, name in ((ls, "id"), (report, "group")):
        listed = list(csv.DictReader(io.StringIO(lab.types(f"{command} -o csv").stdout)))
        assert {str(row[name]) for row in json.loads(lab.types(f"{command} -o json").stdout)} == {
            row[name] for row in listed
        }


@habit("scancel 12, scancel -n name, scancel -t PENDING")
def _(lab: Prompt, one: str, pattern: str, pending: str) -> None:
    job = lab.running()
    lab.types(one, ("12", job))
    named = [lab.submit("sleep 1000", "--name", f"name{number}") for number in (1, 2)]
    other, waits = lab.running(), lab.waiting()
    lab.types(pattern)
    lab.types(pending)
    assert [lab.ends(each) for each in (job, *named, waits)] == ["cancelled"] * 4
    for state in ("R", "RUNNING"):
        assert re.search(rf"(?m)^{other} ", lab.types(f"clusterd ls --state {state}").stdout)


@habit("scancel -u me")
def _(lab: Prompt, cancel: str) -> None:
    jobs = [lab.running(), lab.waiting()]
    lab.types(cancel)
    assert [lab.ends(job) for job in jobs] == ["cancelled"] * 2


@habit("scancel -s USR1 12")
def _(lab: Prompt, usr1: str) -> None:
    job = lab.running("trap 'echo got it; exit 0' USR1; echo begun; while :; do sleep 0.05; done")
    lab.types(usr1, ("12", job))
    assert lab.ends(job) == "finished"
    assert "got it\n" in lab.cluster.run("logs", job).stdout


@habit("scontrol suspend 12, resume")
@habit("Ctrl-Z, fg")
def _(lab: Prompt, pause: str, unpause: str) -> None:
    job = lab.running("echo begun; while [ ! -e go ]; do sleep 0.05; done; echo over")
    assert "is paused, and keeps its devices" in lab.types(pause, ("12", job), ("JOB", job)).stderr
    (lab.work / "go").touch()
    assert "paused by" in lab.cluster.run("ls").stdout
    assert lab.cluster.run("logs", job).stdout == "begun\n"
    lab.types(unpause, ("12", job), ("JOB", job))
    assert lab.ends(job) == "finished"


@habit("scontrol hold, release, requeue")
def _(lab: Prompt, hold: str, release: str, requeue: str) -> None:
    first = lab.running("echo begun; while [ ! -e go ]; do sleep 0.05; done")
    waits = lab.submit("echo $CLUSTERD_ATTEMPT; [ -e end ] || sleep 1000", "--after", f"{first}:any")
    lab.types(hold, ("12", waits))
    (lab.work / "go").touch()
    assert lab.ends(first) == "finished"
    assert lab.cluster.job(waits)["state"] == "queued"
    lab.types(release, ("12", waits))
    lab.output(waits, "1\n")
    (lab.work / "end").touch()
    lab.types(requeue, ("12", waits))
    assert lab.ends(waits) == "finished"
    assert lab.output(waits, "2") == "2\n"


@habit("scontrol update job 12 TimeLimit=...")
@habit("scontrol show job 12")
def _(lab: Prompt, command: str) -> None:
    job = lab.running()
    lab.types(command, ("12", job))
    shown = lab.types(f"clusterd show {job}").stdout
    assert "  command    sh -c 'echo begun; sleep 1000'\n" in shown
    assert ("  time limit 2h" in shown) == ("time=2h" in command)


@habit("TimeLimit=UNLIMITED")
def _(lab: Prompt, edit: str) -> None:
    job = lab.running("echo begun; sleep 1000", "--time", "1h")
    lab.types(edit, ("12", job))
    assert lab.cluster.job(job)["time_limit_s"] is None


@habit("scontrol show job of several")
def _(lab: Prompt, ids: str, pattern: str) -> None:
    first, second = (lab.submit("true", "--name", name) for name in ("night1", "night2"))
    for command in (ids, pattern):
        shown = lab.types(command, ("12", first), ("13", second), ("night", "night[12]")).stdout
        assert re.findall(r"(?m)^\d+  night\d", shown) == [f"{first}  night1", f"{second}  night2"]


@habit("sbatch --array=0-99%8")
def _(lab: Prompt, submit: str, results: str) -> None:
    lab.script("echo $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT, $SLURM_ARRAY_TASK_MIN-$SLURM_ARRAY_TASK_MAX")
    array = lab.types(submit, ("0-99%8", "0-3%2")).stdout.split()[0]
    lab.types(f"clusterd wait {array}")
    assert lab.output(f"{array}_3", "\n") == "3 of 4, 0-3\n"
    assert len(re.findall(r"(?m)^\d+ +\d +finished ", lab.types(results, ("12", array)).stdout)) == 4


@habit("running the failed tasks again")
def _(lab: Prompt, rerun: str) -> None:
    lab.script(f'[ "$SLURM_ARRAY_TASK_ID" != 1 ] || [ -e {lab.work}/good ]', "--array=0-2")
    array = lab.types("clusterd submit job.sh").stdout.split()[0]
    lab.types(f"clusterd wait {array}", fails=1)
    (lab.work / "good").touch()
    lab.types(rerun, ("12", array))
    lab.types(f"clusterd wait {array}")
    assert re.search(rf"(?m)^{array}_\* +job +finished .* 3 tasks: 3 done$", lab.types("clusterd ls --all").stdout)


@habit("sbatch --dependency=afterok:12")
def _(lab: Prompt, submit: str) -> None:
    lab.script("echo over")
    first = lab.running("echo begun; while [ ! -e go ]; do sleep 0.05; done; exit 1")
    ways = ("", ":any", ":failed")
    ok, anyhow, failed = (lab.types(submit, ("12", f"{first}{way}")).stdout.strip() for way in ways)
    (lab.work / "go").touch()
    assert [lab.ends(job) for job in (ok, anyhow, failed)] == ["failed", "finished", "finished"]
    assert "it was to start after" in lab.cluster.job(ok)["reason"]


@habit("sinfo, smap")
@habit("ask in the chat who uses gpu03")
def _(lab: Prompt, ls: str) -> None:
    job = lab.running("echo begun; sleep 1000", "--devices", "3", "--name", "ours")
    (host,) = lab.cluster.job(job)["hosts"]
    assert re.search(rf"(?m)^{host} +up .* 3/4 .* ours$", lab.types(ls).stdout)


@habit("scontrol update node state=drain reason=fans")
def _(lab: Prompt, drain: str) -> None:
    job = lab.running("echo begun; sleep 1000", "--host", "local0")
    lab.types(f"{drain} --dry-run")
    assert lab.cluster.call("hosts")[0]["drained"] is None
    lab.types(drain)
    listed = lab.types("clusterd host ls").stdout
    assert re.search(rf"(?m)^local0 +up \(drained\) .*drained \(by {ME}: fans\)", listed)
    assert lab.cluster.job(job)["state"] == "running"
    waits = lab.submit("true", "--host", "local0")
    assert "fans" in lab.types(f"clusterd why {waits}").stdout
    lab.types("clusterd host undrain gpu01")
    assert lab.ends(waits) == "finished"


@habit("scontrol update node=gpu[01-04] state=resume")
def _(lab: Prompt, undrain: str) -> None:
    lab.types("clusterd host drain local0 local1")
    assert lab.types(undrain, ("gpu[01-04]", "local[0-1]")).stderr == "local0 is undrained\nlocal1 is undrained\n"
    assert [host["drained"] for host in lab.cluster.call("hosts")] == [None, None]


@habit("scontrol create reservation")
@habit('"please do not use gpu01 on Friday"')
def _(lab: Prompt, claim: str) -> None:
    day = time.strftime("%Y-%m-%d 08:00", time.localtime(time.time() + 2 * 86400))
    told = lab.types(claim, ("2026-12-04 08:00", day)).stderr
    assert re.search(r"local0:cpu(0-)?3 ", told)
    if "--from" in claim:
        assert re.match(rf"claim \d+: .* from {day} until ", told)
    else:
        assert "cpu3 claimed: fan" in lab.types("clusterd host ls").stdout


@habit("a reservation for oneself, sbatch --reservation")
def _(lab: Prompt, book: str, run: str) -> None:
    told = lab.types(book, ('--from "mon 9:00"', "")).stderr
    booking = re.search(r"--booking (\d+)", told)
    assert booking is not None
    assert lab.types(run, ("3", booking[1]), ("...", "--devices 4 -- echo booked")).stdout == "booked\n"
    assert re.search(r"from \d{4}-\d\d-\d\d 09:00 until \d{4}-\d\d-\d\d 13:00", lab.types(book).stderr)


@habit("sprio")
def _(lab: Prompt, why: str) -> None:
    lab.running("echo begun; sleep 1000", "--devices", "4", "--host", "local0")
    low, _ = (lab.submit("true", "--devices", "2", "--host", "local0", "--priority", level) for level in "01")
    assert "sh comes just before it, because its priority is higher" in lab.types(why, ("12", low)).stdout


@habit("module load, conda activate in the script")
def _(lab: Prompt) -> None:
    lab.script("conda activate llm\nmodule load cuda\necho $CONDA_PREFIX, $CUDA_HOME")
    (lab.work / "conda").write_text("#!/bin/sh\necho 'conda() { CONDA_PREFIX=/envs/$2; }'\n")
    (lab.work / "conda").chmod(0o755)
    env = {"CONDA_EXE": f"{lab.work}/conda", "BASH_FUNC_module%%": "() { CUDA_HOME=/opt/$2; }"}
    job = lab.types(f"clusterd submit --env CONDA_EXE='{env['CONDA_EXE']}' --env 'BASH_FUNC_module%%' job.sh", **env)
    assert lab.output(job.stdout.strip(), "\n") == "/envs/llm, /opt/cuda\n"


@habit("GrpTRESMins, sshare")
def _(lab: Prompt, report: str) -> None:
    lab.running("echo begun; sleep 1000", "--devices", "1")
    settings = lab.cluster.directory / "clusterd.toml"
    settings.write_text(f"{SETTINGS}device_hours = 5000\n[users.{ME}]\ndevice_hours = 0\n")
    lab.types("clusterd reload")
    waits = lab.submit("true", "--devices", "1")
    assert f"{ME} has used the 0 device-hours of " in lab.types(f"clusterd why {waits}").stdout
    assert re.search(rf"(?m)^default +{ME} .* +\d+\.\d\d +\d+\.\d\d +\d+\.\d\d$", lab.types(report).stdout)
    settings.write_text(SETTINGS)
    lab.types("clusterd reload")
    assert lab.ends(waits) == "finished"


@habit("sacctmgr, --qos")
def _(lab: Prompt) -> None:
    text = 'tenant = "vision"\ncommand = ["sleep", "1000"]\nresources = { devices = 1 }\n'
    (lab.work / "job.toml").write_text(text)
    first, waits = (lab.types("clusterd submit job.toml").stdout.strip() for _ in range(2))
    lab.cluster.wait_for(first, lambda row: row["state"] == "running")
    assert "tenant vision may hold 1 device, and holds 1" in lab.types(f"clusterd why {waits}").stdout


@habit("wall, the message of the day")
def _(lab: Prompt, notice: str) -> None:
    lab.types(notice)
    assert lab.types("clusterd ls").stderr.startswith(f"notice of {ME}: gpu03 gets a new fan\n")
    lab.types("clusterd notice --clear")
    assert "notice" not in lab.types("clusterd ls").stderr


@habit("scancel 12_[3,10-12]")
def _(lab: Prompt, cancel: str) -> None:
    array = lab.submit("true", "--hold", "--name", "grid", "--array", "0-13").split()[0]
    lab.types(cancel, ("12_", f"{array}_"), (f"10-{array}_", "10-12"))
    rows = json.loads(lab.types("clusterd ls --all --json grid").stdout)
    assert [row["array"]["index"] for row in rows if row["state"] == "cancelled"] == [3, 10, 11, 12]


@habit("exit of salloc")
def _(lab: Prompt, shell: str) -> None:
    lab.types(shell, typed="false\nexit\n", fails=1)
    assert lab.ends("work") == "finished"


@habit("squeue --json, sacct -P")
def _(lab: Prompt, ls: str, table: str) -> None:
    assert json.loads(lab.types(ls).stdout) == []
    assert lab.types("clusterd ls --csv").stdout.startswith("id,name,")
    job = lab.submit("exit 4")
    lab.ends(job)
    (row,) = (row for row in csv.DictReader(io.StringIO(lab.types(table).stdout)) if row["id"] == job)
    assert (row["exit_code"], row["state"]) == ("4", "failed")
    (row,) = json.loads(lab.types(f"{ls} --all {job}").stdout)
    assert row["exit_code"] == 4 and row["devices"] == []
    at_s = datetime.fromisoformat(row["submitted_at"]).timestamp()
    assert at_s == pytest.approx(row["submitted_s"], abs=0.01)


@habit("--begin=now+1hour, -t 90")
def _(lab: Prompt, submit: str) -> None:
    lab.script("true", "--begin=now+1hour -t 90")
    jobs = [lab.types(command).stdout.strip() for command in (submit, "clusterd submit job.sh")]
    for job in jobs:
        row = lab.cluster.job(job)
        assert 3500.0 < row["begin_s"] - row["submitted_s"] <= 3600.0
        assert row["time_limit_s"] == 5400.0


# ---- PBS, LSF and Grid Engine ----------------------------------------------------------------------------------------


@habit("qsub job.sh, bsub < job.sh")
def _(lab: Prompt, submit: str) -> None:
    for line in ("#PBS -l nodes=1:ppn=4", "#BSUB -n 4", "#$ -pe smp 4"):
        (lab.work / "job.sh").write_text(f"#!/bin/bash\n{line}\ntrue\n")
        assert f"lines of {line.split()[0]} are not read: write #SBATCH" in lab.types(submit, fails=2).stderr


@habit("qstat, qdel 12, pbsnodes, bjobs, bkill 12, bhosts")
def _(lab: Prompt, ls: str, cancel: str, hosts: str) -> None:
    for command, words in ((ls, ("qstat", "bjobs")), (cancel, ("qdel", "bkill")), (hosts, ("pbsnodes", "bhosts"))):
        for word in words:
            here = lab.types(f"clusterd {word}", fails=2).stderr.split("Here it is: ")[1].strip()
            assert command.startswith(here)
    job = lab.running()
    lab.types(cancel, ("12", job))
    assert lab.ends(job) == "cancelled"


# ---- tmux, ssh and a spreadsheet -------------------------------------------------------------------------------------


@habit("ssh gpu03, tmux, CUDA_VISIBLE_DEVICES=2 python train.py")
@habit("sky exec cluster cmd")
def _(lab: Prompt, run: str) -> None:
    (lab.work / "train.py").write_text("import os; print('trains', os.environ['CLUSTERD_JOB'])")
    python = ("-- cmd", "-- python train.py")
    assert re.fullmatch(r"trains \d+\n", lab.types(run, python).stdout)
    job = lab.types(run, ("run ", "run -d "), python).stdout.strip()
    assert lab.output(job, "\n") == f"trains {job}\n"


@habit("scroll back in tmux")
def _(lab: Prompt, follow: str, last: str) -> None:
    job = lab.submit("seq 300")
    assert lab.types(follow, ("JOB", job)).stdout.splitlines() == [str(number) for number in range(1, 301)]
    assert lab.types(last, ("JOB", job)).stdout.splitlines() == [str(number) for number in range(201, 301)]


@habit("a loop over learning rates")
def _(lab: Prompt, sweep: str) -> None:
    (lab.work / "train.py").write_text("import sys; print(*sys.argv[1:])")
    jobs = lab.types(sweep).stdout.split()
    assert [lab.output(job, "\n") for job in jobs] == ["--lr 1e-3\n", "--lr 3e-4\n"]


@habit("scp gpu03:run/best.pt .")
def _(lab: Prompt, get: str) -> None:
    job = lab.cluster.run("run", "-d", "--", "sh", "-c", "printf weights > best.pt", cwd=lab.work).stdout.strip()
    assert lab.ends(job) == "finished"
    lab.types(get, ("JOB", job))
    assert (lab.work / "best.pt").read_text() == "weights"


@habit("scp -r gpu03:run .")
def _(lab: Prompt, get: str) -> None:
    body = "mkdir deep; printf a > deep/a; printf b > b"
    job = lab.cluster.run("run", "-d", "--", "sh", "-c", body, cwd=lab.work).stdout.strip()
    assert lab.ends(job) == "finished"
    lab.types(get, ("JOB", job))
    assert (lab.work / "run" / "deep" / "a").read_text() == "a"
    assert (lab.work / "run" / "b").read_text() == "b"


@habit("for i in 0 1 2; do scp gpu03:run$i/best.pt $i; done")
def _(lab: Prompt, get: str) -> None:
    body = "echo $CLUSTERD_ARRAY_TASK_ID > best.pt"
    given = ("run", "-d", "--name", "run", "--array", "0-2", "--", "sh", "-c", body)
    array = lab.cluster.run(*given, cwd=lab.work).stdout.split()[0]
    lab.types("clusterd wait run")
    lab.types(get, ("12", array))
    assert [(lab.work / "all" / f"run_{index}" / "best.pt").read_text() for index in range(3)] == ["0\n", "1\n", "2\n"]


@habit("tail -F of a log that is not there yet")
def _(lab: Prompt, logs: str) -> None:
    first = lab.running()
    waits = lab.submit("echo begun", "--after", f"{first}:any", "--name", "next")
    command = ["bash", "-c", f"exec {logs.replace('12', waits)}"]
    with subprocess.Popen(
        command, env=lab.cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as following:
        assert following.stderr is not None and following.stdout is not None
        assert following.stderr.readline() == f"next ({waits}) is queued: waits for sh ({first}, running)\n"
        lab.types(f"clusterd cancel {first}")
        assert following.stdout.read() == "begun\n"


@habit("ssh -L 6006:localhost:6006 gpu03")
def _(lab: Prompt, forward: str) -> None:
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        there, here = (probe.getsockname()[1] for probe in (one, two))
    (lab.work / "index.html").write_text("curves")
    job = lab.submit(f"exec {sys.executable} -u -m http.server {there} --bind 127.0.0.1")
    lab.output(job, "Serving")
    command = ["bash", "-c", f"exec {forward.replace('JOB', job).replace('6006', f'{there}:{here}')}"]
    with subprocess.Popen(command, env=lab.cluster.environment, stderr=subprocess.PIPE, text=True) as forwarding:
        assert forwarding.stderr is not None
        assert str(here) in forwarding.stderr.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{here}/index.html", timeout=HANG_S) as page:
            assert page.read() == b"curves"
        forwarding.send_signal(signal.SIGINT)


@habit("ssh gpu03 tar c run > run.tar")
def _(lab: Prompt, run: str) -> None:
    (lab.work / "run").mkdir()
    (lab.work / "run" / "weights").write_bytes(bytes(range(256)) * 1000)
    lab.types(run)
    with tarfile.open(lab.work / "run.tar") as packed:
        weights = packed.extractfile("run/weights")
        assert weights is not None and weights.read() == bytes(range(256)) * 1000


@habit("./a & ./b & wait, echo $?")
def _(lab: Prompt, run: str, wait: str) -> None:
    jobs = [lab.types(run, ("./a", f"sh -c 'exit {code}'")).stdout.strip() for code in (0, 5)]
    lab.types(wait, ("12 13", " ".join(jobs)), fails=5)


# ---- SkyPilot --------------------------------------------------------------------------------------------------------


@habit("sky launch task.yaml, sky jobs launch")
def _(lab: Prompt, submit: str) -> None:
    (lab.work / "job.toml").write_text('command = ["sh", "-c", "cat data.txt"]\n')
    (lab.work / "data.txt").write_text("sent along\n")
    job = lab.types(submit).stdout.strip()
    assert lab.output(job, "\n") == "sent along\n"
    (lab.work / "task.yaml").write_text("run: python train.py\n")
    assert "job files are TOML: clusterd template" in lab.types("clusterd submit task.yaml", fails=2).stderr


@habit("sky queue, sky status")
def _(lab: Prompt, ls: str, hosts: str) -> None:
    job = lab.running()
    assert re.search(rf"(?m)^{job} +sh +running ", lab.types(ls).stdout)
    assert re.findall(r"(?m)^local\d +up ", lab.types(hosts).stdout)


@habit("sky logs cluster 3")
def _(lab: Prompt, logs: str) -> None:
    job = lab.submit("for i in 1 2 3; do echo $i; sleep 0.1; done")
    assert lab.types(logs, ("3", job)).stdout == "1\n2\n3\n"


@habit("sky cancel cluster 3, sky down")
def _(lab: Prompt, cancel: str) -> None:
    job = lab.running()
    lab.types(cancel, ("3", job))
    assert lab.ends(job) == "cancelled"


@habit("setup: of a task", slow=True)
def _(lab: Prompt) -> None:
    write_package(lab.work / "pkg")
    (lab.work / "requirements.txt").write_text("./pkg\n")
    (lab.work / "job.toml").write_text('command = ["greeter-greet"]\nrequirements = "requirements.txt"\n')
    for _ in range(2):
        job = lab.types("clusterd submit --wait job.toml").stdout.split()[0]
        assert lab.output(job, "\n") == "hello\n"
    assert "built in" not in lab.types(f"clusterd history --job {job}").stdout


@habit("file_mounts:, workdir:")
def _(lab: Prompt) -> None:
    (lab.work / "code").mkdir()
    (lab.work / "code" / "train.sh").write_text("cat $DATA/part; echo $PWD\n")
    (lab.work / "data").mkdir()
    (lab.work / "data" / "part").write_text("numbers\n")
    text = f'command = ["sh", "train.sh"]\nworkdir = "code"\nenv = {{ DATA = "{lab.work}/data" }}\n'
    (lab.work / "job.toml").write_text(text)
    job = lab.types("clusterd submit --wait job.toml").stdout.split()[0]
    assert re.fullmatch(r"numbers\n.*/work\n", lab.output(job, "work\n"))


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


@habit("kubectl exec JOB -- ls")
def _(lab: Prompt, shell: str) -> None:
    (lab.work / "here").touch()
    job = lab.running()
    assert lab.types(shell, ("JOB", job)).stdout == "here\n"


@habit("kubectl cordon gpu01, uncordon")
def _(lab: Prompt, drain: str, undrain: str) -> None:
    assert "clusterd host drain" in lab.types("clusterd cordon gpu01", fails=2).stderr
    lab.types(drain)
    assert re.search(r"(?m)^local0 +up \(drained\)", lab.types("clusterd host ls").stdout)
    lab.types(undrain)
    assert "drained" not in lab.types("clusterd host ls").stdout


@habit("kubectl apply -f -")
def _(lab: Prompt, submit: str) -> None:
    (lab.work / "job.toml").write_text('command = ["echo", "applied"]\n')
    job = lab.types(submit).stdout.strip()
    assert lab.output(job, "\n") == "applied\n"


# ---- torchrun --------------------------------------------------------------------------------------------------------


@habit("torchrun --nproc-per-node 4 train.py", slow=True)
@habit("one process per GPU without a launcher")
def _(lab: Prompt, run: str) -> None:
    (lab.work / "train.py").write_text("import os; print('rank {RANK} {LOCAL_RANK} {WORLD_SIZE}'.format(**os.environ))")
    ran = lab.types(run)
    assert sorted(re.findall(r"rank \d \d \d", ran.stdout)) == [f"rank {rank} {rank} 4" for rank in range(4)]


ELASTIC = """
import os, torch
from clusterd import train

train.run(
    model=lambda: torch.nn.Linear(4, 1),
    loss=lambda output, target: (output - target).square().mean(),
    data=[(torch.ones(4), torch.ones(1))] * 64,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    global_batch=4,
    steps=100000,
)
"""


@habit("choose a batch size and a parallel layout that fit", slow=True)
def _(lab: Prompt, plans: str) -> None:
    (lab.work / "train.py").write_text(ELASTIC)
    (lab.work / "job.toml").write_text(
        'kind = "elastic"\ncommand = ["python", "train.py"]\ntrials = false\n'
        "resources = { devices = 2, min_devices = 2, max_devices = 2 }\n"
    )
    job = lab.types("clusterd submit job.toml").stdout.strip()
    lab.cluster.wait_for(job, lambda row: row["step"] > 5)
    assert re.search(r"(?m)^.*dp=2", lab.types(plans, ("JOB", job)).stdout)


@habit("restart from a checkpoint by hand", slow=True)
def _(lab: Prompt, resume: str, submit: str) -> None:
    (lab.work / "train.py").write_text(ELASTIC)
    (lab.work / "job.toml").write_text(
        'kind = "elastic"\ncommand = ["python", "train.py"]\ntrials = false\n'
        f'resources = {{ devices = 1, max_devices = 1 }}\n[checkpoints]\ndirectory = "{lab.work}/saved"\n'
    )
    job = lab.types("clusterd submit job.toml").stdout.strip()
    saved = 5
    for command in (resume, submit):
        # Until a job has reported a step of its own, there is nothing new to save.
        lab.cluster.wait_for(job, lambda row, known=saved: row["step"] > known)
        lab.types(f"clusterd cancel --wait {job}")
        saved = int(lab.cluster.job(job)["step"])
        job = lab.types(command, ("JOB", job)).stdout.strip()
        row = lab.cluster.wait_for(job, lambda row: row["step"] > 0)
        assert row["step"] >= saved


# ---- all of them -----------------------------------------------------------------------------------------------------


def test_every_row_of_the_page_is_tried_or_says_why_not() -> None:
    assert set(ROWS) == {*HABITS, *NOT_TRIED}
    assert not HABITS.keys() & NOT_TRIED.keys()
    text = PAGE.read_text(encoding="utf-8")
    assert [command for command in NOT_TYPED if f"`{command}`" not in text] == []


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] if row in SLOW else []) for row in ROWS if row in HABITS]
)
def test_a_habit_works_as_the_page_says(lab: Prompt, row: str) -> None:
    HABITS[row](lab, *ROWS[row])
