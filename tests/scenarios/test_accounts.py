"""Jobs of several people: each runs as its owner on the hosts, and nobody reaches what is another's.

The users are real ones, made for the test and removed after it, so it needs root.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusterd.client import Client
from clusterd.errors import ClusterError
from tests.agent.client import end_all
from tests.conftest import GPT, REPOSITORY, RunningCluster, until
from tests.ssh.openssh import OpenSshServer, make_key, needs_sshd

pytestmark = [
    pytest.mark.slow,
    needs_sshd,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("useradd") is None, reason="makes users: needs root and useradd"
    ),
]

NAME = f"clusterd{os.getpid()}"
"""Start of the names made here: two runs at once share the machine's users."""

GROUP = f"{NAME}test"


@dataclass
class Person:
    """A user of the head node and the hosts."""

    name: str

    @property
    def home(self) -> Path:
        return Path(pwd.getpwnam(self.name).pw_dir)

    def does(self, action: Callable[[], Any]) -> Any:
        """Result of an action of this user, in a process of theirs; an error of the cluster is a text."""
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                entry = pwd.getpwnam(self.name)
                os.initgroups(self.name, entry.pw_gid)
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
                os.environ["HOME"] = entry.pw_dir
                try:
                    result = {"ok": action()}
                except (ClusterError, OSError) as error:
                    result = {"error": str(error)}
                os.write(writer, json.dumps(result, default=str).encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = json.loads(pipe.read() or "{}")
        assert os.waitpid(pid, 0)[1] == 0
        return answer.get("ok", answer.get("error"))

    def calls(self, socket: Path, verb: str, **args: Any) -> Any:
        def call() -> Any:
            with Client(socket) as client:
                return client.call(verb, **args)

        return self.does(call)

    def lets_in(self, key: str) -> None:
        """Add a key to the authorized ones."""
        ssh = self.home / ".ssh"
        ssh.mkdir(mode=0o700, exist_ok=True)
        with open(ssh / "authorized_keys", "a") as file:
            file.write(key + "\n")
        for path in (ssh, ssh / "authorized_keys"):
            shutil.chown(path, self.name)


@pytest.fixture(scope="module")
def people() -> Iterator[tuple[Person, Person]]:
    subprocess.run(["groupadd", "-f", GROUP], check=True)
    names = (f"{NAME}ann", f"{NAME}bob")
    for name in names:
        subprocess.run(["useradd", "-m", "-p", "*", "-s", "/bin/sh", "-G", GROUP, name], check=True)
    try:
        yield Person(names[0]), Person(names[1])
    finally:
        for name in names:
            subprocess.run(["pkill", "-KILL", "-u", name], check=False)
            subprocess.run(["userdel", "-r", "-f", name], check=False, capture_output=True)
        subprocess.run(["groupdel", GROUP], check=False)


@dataclass
class Site:
    """A daemon of the test's own user, and one host behind a real sshd."""

    cluster: RunningCluster
    socket: Path
    server: OpenSshServer

    def settings(self, text: str) -> None:
        (self.cluster.directory / "clusterd.toml").write_text(
            f'[daemon]\nssh_config = "{self.cluster.directory}/ssh_config"\nsocket_group = "{GROUP}"\n{text}'
        )


@pytest.fixture
def site(people: tuple[Person, Person]) -> Iterator[Site]:
    directory = Path(tempfile.mkdtemp(prefix="clusterd-accounts-"))
    directory.chmod(0o711)
    run = directory / "run"
    run.mkdir()
    os.chown(run, 0, grp.getgrnam(GROUP).gr_gid)
    run.chmod(0o750)
    state = directory / "state"
    state.mkdir(mode=0o700)
    server = OpenSshServer("node", directory / "node", make_key(state / "id_ed25519"))
    server.directory.mkdir(mode=0o700)
    server.start(own_keys=True)
    (state / "ssh_config").write_text(server.config(state / "known"))
    cluster = RunningCluster(state)
    cluster.environment |= {
        "CLUSTERD_CONFIG": str(state / "clusterd.toml"), "CLUSTERD_SOCKET": str(run / "clusterd.sock"),
        "HOME": str(state),
    }  # fmt: skip
    cluster.socket = run / "clusterd.sock"
    try:
        yield Site(cluster, cluster.socket, server)
    finally:
        cluster.close()
        server.stop()
        end_all(server.agent_home)
        shutil.rmtree(directory, ignore_errors=True)


def command(name: str, script: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": "command", "command": ["sh", "-c", script], "workdir": "/", **more}


def start_and_let_in(site: Site, person: Person) -> None:
    """Start a daemon that runs jobs as their owners, with one host, and let it into the person's account there."""
    site.settings('accounts = "own"\n')
    site.cluster.start()
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "2", "node")
    person.lets_in(person.calls(site.socket, "login")["key"])
    assert person.calls(site.socket, "login")["hosts"] == {"node": ""}


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
