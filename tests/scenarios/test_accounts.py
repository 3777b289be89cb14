"""Jobs of several people: each runs as its owner on the hosts, and nobody reaches what is another's.

The users are real ones, made for the test and removed after it, so it needs root.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import GPT, REPOSITORY, until
from tests.scenarios.people import Person, Site, command, needs_users, people, site, start_and_let_in

__all__ = ["people", "site"]  # fixtures

pytestmark = [pytest.mark.slow, *needs_users]


def log_of(site: Site, job: str) -> str:
    return site.cluster.run("logs", job).stdout


def test_without_a_setting_nobody_else_s_job_is_accepted(site: Site, people: tuple[Person, Person]) -> None:
    site.settings("")
    site.cluster.start()
    refused = people[0].calls(site.socket, "submit", spec=command("mine", "id"))
    assert "would run as root" in refused
    assert 'accounts = "own" or "shared"' in refused
    assert "jobs of root alone" in site.cluster.run("status").stdout


def test_a_shared_account_is_said_plainly(site: Site, people: tuple[Person, Person]) -> None:
    site.settings('accounts = "shared"\n')
    site.cluster.start()
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "1", "node")
    job = people[0].calls(site.socket, "submit", spec=command("mine", "id -un"))["id"]
    site.cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert log_of(site, job) == "root\n"
    assert "every user's jobs can read the others' files and secrets" in site.cluster.run("status").stdout


def test_each_job_runs_as_its_owner_who_alone_reaches_it(site: Site, people: tuple[Person, Person]) -> None:
    ann, bob = people
    site.settings('accounts = "own"\n')
    site.cluster.start()
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "2", "node")
    # Nobody let the cluster in yet: the job waits, and says for what.
    spec = command("mine", "id -un; cat /root/.profile; sleep 600", secrets=("TOKEN",))
    job = ann.calls(site.socket, "submit", spec=spec, secrets={"TOKEN": "of-ann-alone"})["id"]
    answer = ann.calls(site.socket, "login")
    assert answer["account"] == ann.name
    assert "does not let" in answer["hosts"]["node"]
    row = site.cluster.job(job)
    assert (row["state"], list(row["unfit"])) == ("queued", ["node"])
    assert ann.name in row["unfit"]["node"]
    for person in people:
        person.lets_in(answer["key"])
    assert ann.calls(site.socket, "login")["hosts"] == {"node": ""}
    site.cluster.wait_for(job, lambda row: row["state"] == "running")
    until(lambda: "Permission denied" in log_of(site, job), 60.0, lambda: log_of(site, job))
    assert log_of(site, job).splitlines()[0] == ann.name
    # Its processes, files and secret are ann's.
    pids = subprocess.run(["pgrep", "-u", ann.name, "-f", "sleep 600"], capture_output=True, text=True, check=True)
    pid = pids.stdout.split()[0]
    assert b"TOKEN=of-ann-alone" in Path(f"/proc/{pid}/environ").read_bytes()
    assert "Permission denied" in bob.does(lambda: Path(f"/proc/{pid}/environ").read_text())
    agent = next(p for p in (ann.home / ".local/state/clusterd").rglob("daemon.sock"))
    assert "Permission denied" in str(bob.does(lambda: agent.stat()))
    # Bob's jobs run beside it; neither cancels the other's.
    other = bob.calls(site.socket, "submit", spec=command("his", "id -un; sleep 600"))["id"]
    site.cluster.wait_for(other, lambda row: row["state"] == "running")
    until(lambda: log_of(site, other) == f"{bob.name}\n")
    assert f"is {ann.name}'s" in bob.calls(site.socket, "cancel", job=job)
    # A restarted daemon leads both on.
    site.cluster.kill()
    site.cluster.start()
    site.cluster.wait_for(job, lambda row: row["state"] == "running" and not row["away"])
    assert ann.calls(site.socket, "cancel", job=job, now=True)
    site.cluster.wait_for(job, lambda row: row["state"] == "cancelled")
    assert site.cluster.job(other)["state"] == "running"
    until(lambda: not Path(f"/proc/{pid}").exists())
    bob.calls(site.socket, "cancel", job=other, now=True)
    site.cluster.wait_for(other, lambda row: row["state"] == "cancelled")


def test_jobs_have_the_login_of_their_owner(site: Site, people: tuple[Person, Person]) -> None:
    """Each account's agent runs its own login shell; a profile that is mended counts after a check of the host."""
    ann, bob = people
    for person in people:
        (person.home / ".profile").write_text(f"echo hello; export SCRATCH=/scratch/{person.name}\n")
    start_and_let_in(site, ann)
    bob.lets_in(bob.calls(site.socket, "login")["key"])
    assert bob.calls(site.socket, "login")["hosts"] == {"node": ""}

    def scratch(person: Person) -> str:
        job = person.calls(site.socket, "submit", spec=command("show", "echo $SCRATCH"))["id"]
        site.cluster.wait_for(job, lambda row: row["state"] == "finished")
        return log_of(site, job).strip()

    assert [scratch(person) for person in people] == [f"/scratch/{person.name}" for person in people]
    (ann.home / ".profile").write_text("exit 3\n")
    checks = {row["check"]: row for row in ann.calls(site.socket, "host_check")}
    assert f"the login shell of {ann.name} here (/bin/sh) exits with 3" in checks["login"]["said"]
    assert scratch(bob) == f"/scratch/{bob.name}"
    (ann.home / ".profile").write_text("export SCRATCH=/new\n")
    ann.calls(site.socket, "host_check")
    assert scratch(ann) == "/new"


SYSTEM_PYTHON = Path("/usr/bin/python3")
"""Other than the tests' own, everybody may execute it; it finds torch where the tests do, if it is of their version."""


def _is_of_our_version() -> bool:
    return SYSTEM_PYTHON.resolve().name == f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.skipif(not _is_of_our_version(), reason=f"{SYSTEM_PYTHON} is not of the version of the tests' Python")
def test_an_elastic_job_moves_under_its_owner_s_account(site: Site, people: tuple[Person, Person]) -> None:
    """Fork server, ranks, shared memory and the move between them are the person's."""
    ann, _ = people
    start_and_let_in(site, ann)
    packages = os.pathsep.join([str(REPOSITORY), sysconfig.get_path("purelib")])
    spec = {
        "name": "mine", "kind": "elastic", "command": ["python", "train.py", "--steps", "400"], "workdir": str(GPT),
        "python": str(SYSTEM_PYTHON), "env": {"PYTHONPATH": packages}, "resources": {"devices": 1}, "trials": False,
    }  # fmt: skip
    job = ann.calls(site.socket, "submit", spec=spec)["id"]
    site.cluster.wait_for(job, lambda row: row["state"] == "running" and row["step"] >= 3)
    assert ann.calls(site.socket, "migrate", job=job, plan="dp=2")["plan"] == "dp=2"
    site.cluster.wait_for(job, lambda row: row["plan"] == "dp=2" and row["state"] == "running")
    stores = [owner.parent for owner in Path("/dev/shm").glob("clusterd-*/owner") if ann.name in owner.read_text()]
    assert {store.stat().st_uid for store in stores} == {pwd.getpwnam(ann.name).pw_uid}
    row = site.cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert row["attempt"] == 1
    steps = [json.loads(line)["step"] for line in site.cluster.call("steps", job=job)["data"].splitlines()]
    assert steps == list(range(1, 401))


def test_a_person_whose_agent_is_killed_loses_nothing(site: Site, people: tuple[Person, Person]) -> None:
    ann, _ = people
    start_and_let_in(site, ann)
    job = ann.calls(site.socket, "submit", spec=command("mine", "for i in 1 2 3 4 5 6; do sleep 1; echo $i; done"))[
        "id"
    ]
    site.cluster.wait_for(job, lambda row: row["state"] == "running")
    subprocess.run(["pkill", "-KILL", "-u", ann.name, "-f", "agent-.* serve"], check=False)
    row = site.cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert row["attempt"] == 1
    assert log_of(site, job).split() == list("123456")


@pytest.mark.skipif(shutil.which("sudo") is None, reason="needs sudo: apt-get install sudo")
def test_sudo_is_the_other_way_to_people_s_accounts(site: Site, people: tuple[Person, Person]) -> None:
    """No key needs to be authorized; a user without an account is refused with sudo's message."""
    ann, _ = people
    site.settings(f'accounts = "own"\nbecome = "sudo"\n[users.{people[1].name}]\naccount = "nosuchaccount"\n')
    site.cluster.start()
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "2", "node")
    assert ann.calls(site.socket, "login") == {"account": ann.name, "key": None, "hosts": {"node": ""}}
    job = ann.calls(site.socket, "submit", spec=command("mine", "id -un; echo $HOME"))["id"]
    site.cluster.wait_for(job, lambda row: row["state"] == "finished")
    assert log_of(site, job).split() == [ann.name, str(ann.home)]
    refused = people[1].calls(site.socket, "login")
    assert refused["account"] == "nosuchaccount"
    assert "unknown user" in refused["hosts"]["node"]


def test_visibility_decides_how_much_of_other_users_is_shown(site: Site, people: tuple[Person, Person]) -> None:
    """Over the real socket, where the kernel says who asks."""
    ann, bob = people
    for visibility in ("own", "names"):
        site.settings(f'accounts = "shared"\nvisibility = "{visibility}"\nreaders = ["{bob.name}"]\n')
        site.cluster.start()
        if visibility == "own":
            site.cluster.run("host", "add", "--yes", "--cpu-devices", "1", "node")
            spec = command("ann-draft", "echo of-ann-alone; sleep 600", resources={"devices": 1})
            job = ann.calls(site.socket, "submit", spec=spec)["id"]
        site.cluster.wait_for(job, lambda row: row["state"] == "running")
        seen = json.dumps([bob.calls(site.socket, verb) for verb in ("jobs", "hosts", "history")])
        assert ("ann-draft" in seen, "of-ann-alone" in seen) == (visibility == "names", False)
        assert "node:cpu0" in seen
        assert "another user's" in str(bob.calls(site.socket, "steps", job=job))
        assert "may only look" in bob.calls(site.socket, "submit", spec=command("his", "true"))
        assert "of-ann-alone" in json.dumps(ann.calls(site.socket, "job", job=job))
        site.cluster.run("stop")
    site.settings('accounts = "shared"\n')
    site.cluster.start()
    assert "of-ann-alone" in json.dumps(bob.calls(site.socket, "job", job=job))
    site.cluster.run("cancel", "--now", job)
    site.cluster.wait_for(job, lambda row: row["state"] == "cancelled")


def test_a_restored_daemon_leads_people_s_later_jobs(site: Site, people: tuple[Person, Person]) -> None:
    """Ann's job came after the backup, under an account that the backup knows from an earlier one."""
    ann, _ = people
    start_and_let_in(site, ann)
    first = ann.calls(site.socket, "submit", spec=command("first", "true"))["id"]
    site.cluster.wait_for(first, lambda row: row["state"] == "finished")
    backup = site.cluster.directory.parent / "backup"
    site.cluster.run("backup", str(backup))
    spec = command("later", "sleep 600", secrets=("TOKEN",))
    later = ann.calls(site.socket, "submit", spec=spec, secrets={"TOKEN": "of-ann-alone"})["id"]
    site.cluster.wait_for(later, lambda row: row["state"] == "running")
    site.cluster.kill()
    for rest in ("journal.db-wal", "journal.db-shm"):
        (site.cluster.directory / rest).unlink(missing_ok=True)
    shutil.copy(backup / "journal.db", site.cluster.directory / "journal.db")
    site.cluster.run("start", "--restored")
    until(lambda: any(row["id"] == later for row in site.cluster.call("jobs")), 60.0, site.cluster.log)
    row = site.cluster.wait_for(later, lambda row: row["state"] == "running")
    assert (row["user"], row["attempt"]) == (ann.name, 1)
    assert ann.calls(site.socket, "requeue", job=later)["id"] == later
    row = site.cluster.wait_for(later, lambda row: row["state"] == "running" and row["attempt"] == 2)
    pids = subprocess.run(["pgrep", "-u", ann.name, "-f", "sleep 600"], capture_output=True, text=True, check=True)
    environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in pids.stdout.split()]
    assert any(b"TOKEN=of-ann-alone" in environment for environment in environments), "its secret came with the record"
    ann.calls(site.socket, "cancel", job=later, now=True)
    site.cluster.wait_for(later, lambda row: row["state"] == "cancelled")
