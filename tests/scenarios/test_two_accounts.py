"""A second account of the machine: it becomes neither the daemon nor another member, and gets no more than is written.

The users are real ones, made for the test and removed after it, so it needs root.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterd.agent.host.bundle import bundle
from tests.conftest import until
from tests.scenarios.people import Person, Site, command, needs_users, people, site, start_and_let_in

__all__ = ["people", "site"]  # fixtures

pytestmark = needs_users


@pytest.fixture
def shared(site: Site) -> Iterator[Path]:
    """A directory that everybody may write to, as docs/configuration.md proposes for `agent_home`."""
    directory = site.cluster.directory.parent / "scratch"
    directory.mkdir()
    directory.chmod(0o1777)
    yield directory
    site.cluster.run("host", "remove", "node", check=False)  # ends the agents there
    until(
        lambda: subprocess.run(["pgrep", "-f", f"{directory}/agent-"], check=False, capture_output=True).returncode != 0
    )
    shutil.rmtree(directory)


def plant(folder: Path, marker: Path) -> None:
    """Make the folder of clusterd's code, whose name is public, with a program of one's own."""
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text(f"import os\nopen({str(marker)!r}, 'w').write(str(os.getuid()))\n")


def marker_of(shared: Path) -> Path:
    return shared / "executed"


@pytest.mark.parametrize("how", ["folder", "link"])
def test_code_that_another_account_planted_is_not_run_by_the_daemon(
    site: Site, people: tuple[Person, Person], shared: Path, how: str
) -> None:
    bob = people[1]
    code, theirs = shared / f"agent-{bundle().version}", bob.home / "planted"
    marker = marker_of(shared)
    bob.does(lambda: plant(code if how == "folder" else theirs, marker))
    if how == "link":
        bob.does(lambda: code.symlink_to(theirs))
    site.settings(f'accounts = "own"\n[hosts.node]\nagent_home = "{shared}"\n')
    site.cluster.start()
    refused = site.cluster.run("host", "add", "--yes", "--cpu-devices", "1", "node", check=False).stderr
    until(lambda: bob.name in (site.cluster.call("hosts") or [{"why": refused}])[0]["why"])
    assert not marker.exists()
    # With that folder out of the way the daemon makes its own, and the host is used.
    if how == "link":
        code.unlink()
    else:
        shutil.rmtree(code)
    site.cluster.run("host", "remove", "node", check=False)
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "1", "node")
    assert (code.stat().st_uid, code.stat().st_mode & 0o777) == (0, 0o700)


def test_a_folder_in_the_place_of_a_member_s_is_refused_with_the_remedy(
    site: Site, people: tuple[Person, Person], shared: Path
) -> None:
    ann, bob = people
    marker = marker_of(shared)
    bob.does(lambda: plant(shared / ann.name / f"agent-{bundle().version}", marker))
    site.settings(f'accounts = "own"\n[hosts.node]\nagent_home = "{shared}"\n')
    site.cluster.start()
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "1", "node")
    ann.lets_in(ann.calls(site.socket, "login")["key"])
    why = ""

    def is_refused() -> bool:
        nonlocal why
        why = ann.calls(site.socket, "login")["hosts"]["node"]
        return f"{shared}/{ann.name} belongs to {bob.name}" in why

    until(is_refused, explain=lambda: why)
    assert "agent_home" in why
    assert not marker.exists()


def test_a_shared_directory_without_the_sticky_bit_is_refused_with_the_remedy(site: Site, shared: Path) -> None:
    """In it everybody may rename and replace what others made."""
    shared.chmod(0o777)
    site.settings(f'[hosts.node]\nagent_home = "{shared}"\n')
    site.cluster.start()
    refused = site.cluster.run("host", "add", "--yes", "--cpu-devices", "1", "node", check=False)
    text = refused.stderr + "".join(row["why"] for row in site.cluster.call("hosts"))
    assert f"{shared} can be written by others" in text
    assert f"chmod +t {shared}" in text


def test_a_python_to_be_checked_is_run_by_who_asked(site: Site, people: tuple[Person, Person]) -> None:
    """Not by the daemon's account, which leads every host."""
    ann, bob = people
    start_and_let_in(site, ann)
    python, marker = ann.home / "python", ann.home / "executed-by"

    def write() -> None:
        python.write_text(f'#!/bin/sh\nid -un >> {marker}\nexec /usr/bin/python3 "$@"\n')
        python.chmod(0o755)

    ann.does(write)
    ann.home.chmod(0o755)
    assert ann.calls(site.socket, "host_check", python=str(python))
    assert set(marker.read_text().split()) == {ann.name}
    rows = bob.calls(site.socket, "host_check", python=str(python))  # whom no host has let in
    assert "failed" in {row["state"] for row in rows}
    assert set(marker.read_text().split()) == {ann.name}
    site.cluster.run("stop")
    site.settings("")
    site.cluster.start()
    assert "would run as root" in bob.calls(site.socket, "host_check", python=str(python))
    assert set(marker.read_text().split()) == {ann.name}


def test_compiled_code_is_read_from_where_its_owner_alone_writes(site: Site, people: tuple[Person, Person]) -> None:
    """Regression: torch ran what another account had put into /tmp/torchinductor_NAME before."""
    ann, bob = people
    start_and_let_in(site, ann)
    script = 'mkdir -p "$TORCHINDUCTOR_CACHE_DIR" && echo "$TORCHINDUCTOR_CACHE_DIR"'
    job = ann.calls(site.socket, "submit", spec=command("mine", script))["id"]
    site.cluster.wait_for(job, lambda row: row["state"] == "finished")
    cache = Path(site.cluster.run("logs", job).stdout.strip())
    assert cache.owner() == ann.name
    assert "Permission denied" in bob.does(lambda: os.listdir(cache))
    assert "Permission denied" in bob.does(lambda: os.mkdir(cache / "aa"))
    own = ann.calls(site.socket, "submit", spec=command("own", script, env={"TORCHINDUCTOR_CACHE_DIR": "$HOME/mine"}))
    site.cluster.wait_for(own["id"], lambda row: row["state"] == "finished")
    assert site.cluster.run("logs", own["id"]).stdout.strip() == f"{ann.home}/mine"


def test_clients_do_not_speak_to_a_daemon_of_somebody_else_s(site: Site, people: tuple[Person, Person]) -> None:
    """Bob may write to the directory of the socket, and serves one there; ann's job and secrets are not sent."""
    ann, bob = people
    place = site.socket.parent
    place.chmod(0o770)
    listening = bob.does(
        lambda: os.spawnlp(
            os.P_NOWAIT, "python3", "python3", "-c",
            f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(site.socket)!r}); s.listen();"
            f"import os; os.chmod({str(site.socket)!r}, 0o666); s.accept()[0].recv(1) and open('/dev/null')",
        )
    )  # fmt: skip
    try:
        until(site.socket.exists)
        refused = ann.calls(site.socket, "submit", spec=command("mine", "true"))
        assert f"is served by {bob.name}" in refused
    finally:
        os.kill(listening, 9)
        site.socket.unlink()
        place.chmod(0o750)


def packed(content: bytes) -> tuple[str, bytes]:
    """A packed working directory with one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("secret.txt")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    data = buffer.getvalue()
    return hashlib.sha256(data).hexdigest(), data


def test_who_knows_a_digest_does_not_get_the_files(site: Site, people: tuple[Person, Person]) -> None:
    """Whoever may see a job sees its digest: `show -o json` prints it."""
    ann, bob = people
    start_and_let_in(site, ann)
    bob.lets_in(bob.calls(site.socket, "login")["key"])
    digest, data = packed(b"of ann alone")
    put = {"digest": digest, "offset": 0, "data": data, "last": True}
    assert ann.calls(site.socket, "snapshot_put", **put) is None
    spec = command("mine", "cat secret.txt", workdir="/home/ann/project", snapshot=digest)
    job = ann.calls(site.socket, "submit", spec=spec)["id"]
    assert digest in str(bob.calls(site.socket, "job", job=job))
    site.cluster.wait_for(job, lambda row: row["state"] == "finished")

    theirs = {**spec, "name": "his"}
    assert not bob.calls(site.socket, "snapshot_has", digest=digest)["have"]
    assert "was not sent by you" in bob.calls(site.socket, "submit", spec=theirs)
    # Who has the same files sends them, and does not notice that they are stored already.
    assert bob.calls(site.socket, "snapshot_put", **put) is None
    his = bob.calls(site.socket, "submit", spec=theirs)["id"]
    site.cluster.wait_for(his, lambda row: row["state"] == "finished")
    # A job of one's own is the other permission, also for a daemon that has just started.
    site.cluster.kill()
    site.cluster.start()
    again = ann.calls(site.socket, "submit", spec={**spec, "name": "again"})
    assert again["name"] == "again"
    assert "was not sent by you" not in str(bob.calls(site.socket, "submit", spec=theirs))


def test_working_directories_that_no_job_names_are_limited(site: Site, people: tuple[Person, Person]) -> None:
    ann, bob = people
    site.settings('accounts = "shared"\nworkdir_max = "64KiB"\n')
    site.cluster.start()
    sent = [packed(os.urandom(40_000)) for _ in range(7)]
    answers = [ann.calls(site.socket, "snapshot_put", digest=d, offset=0, data=x, last=True) for d, x in sent]
    assert answers[0] is None
    assert "which is the limit" in answers[-1]
    stored = list((site.cluster.directory / "snapshots").iterdir())
    assert sum(file.stat().st_size for file in stored) <= 4 * (64 << 10)
    digest, data = sent[0]
    assert bob.calls(site.socket, "snapshot_put", digest=digest, offset=0, data=data, last=True) is None
    # A job that names them makes room.
    spec = command("mine", "true", workdir="/home/ann", snapshot=digest, waits_for_hosts=True)
    assert ann.calls(site.socket, "submit", spec=spec)["name"] == "mine"
    digest, data = sent[-1]
    assert ann.calls(site.socket, "snapshot_put", digest=digest, offset=0, data=data, last=True) is None


def test_rights_come_from_the_configuration_and_reload_changes_them(site: Site, people: tuple[Person, Person]) -> None:
    ann, bob = people
    tenants = f'[tenants.vision]\nmembers = ["{bob.name}"]\n'
    site.settings(f'accounts = "shared"\n{tenants}')
    site.cluster.start()
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "2", "node")

    def submit(person: Person, **more: object) -> str:
        return str(person.calls(site.socket, "submit", spec=command("mine", "sleep 600", **more)))

    assert "may not submit for tenant vision" in submit(ann, tenant="vision")
    assert "priority of [limits]" in submit(ann, priority=50)
    assert "guaranteed_devices of [limits]" in submit(ann, guaranteed=True, resources={"devices": 1})
    assert "'reason'" in submit(bob, tenant="vision", resources={"devices": 1})
    job = ann.calls(site.socket, "submit", spec=command("low", "sleep 600", resources={"devices": 2}))["id"]
    assert "priority of [limits]" in ann.calls(site.socket, "priority", job=job, priority=1)
    assert "guaranteed_devices" in ann.calls(site.socket, "edit", job=job, changes={"guaranteed": True})
    # The daemon's own account may do all that.
    assert site.cluster.call("priority", job=job, priority=7)["priority"] == 7
    assert "may not reload" in ann.calls(site.socket, "reload")
    # What an operator holds stays held.
    site.cluster.run("hold", job)
    assert "is held by root" in ann.calls(site.socket, "release", job=job)
    site.cluster.run("release", job)
    assert ann.calls(site.socket, "hold", job=job)["held_by"] == ann.name
    assert ann.calls(site.socket, "release", job=job)["held_by"] is None

    limits = f"[users.{ann.name}]\npriority = 100\nguaranteed_devices = 2\ndevices = 1\nqueued_jobs = 3\n"
    site.settings(f'accounts = "shared"\npolicy = "simple"\n{limits}')
    assert "it must be one of" in site.cluster.run("reload", check=False).stderr
    assert "priority of [limits]" in submit(ann, priority=50)
    site.settings(f'accounts = "shared"\nidle_after = "2h"\n{limits}')
    done = site.cluster.run("reload").stderr
    assert "changed: tenants, users" in done
    assert "at the next start: idle_after_s" in done
    assert "'reason'" in submit(ann, priority=50, resources={"devices": 1})
    assert "guaranteed_devices of [users." in submit(ann, guaranteed=True, resources={"devices": 3})
    waiting = ann.calls(site.socket, "submit", spec=command("second", "sleep 600", resources={"devices": 1}))["id"]
    assert f"{ann.name} may hold 1 device" in site.cluster.job(waiting)["reason"]
    assert "queued_jobs of [users." in submit(ann) + submit(ann) + submit(ann)
    assert "may not submit for tenant vision" in submit(bob, tenant="vision")
    for row in site.cluster.call("jobs"):
        site.cluster.run("cancel", "--now", row["id"])


def test_a_working_directory_that_is_closed_to_the_owner_fails_the_job_at_once(
    site: Site, people: tuple[Person, Person]
) -> None:
    """Regression: it was tried six times within two minutes, each "lost", as if the host were at fault."""
    ann, bob = people
    start_and_let_in(site, ann)
    closed = bob.home / "closed" / "code"
    closed.mkdir(parents=True)
    closed.parent.chmod(0o700)
    job = ann.calls(site.socket, "submit", spec=command("mine", "true", workdir=str(closed)))["id"]
    ended = site.cluster.wait_for(job, lambda row: row["ended_s"] is not None)
    assert (ended["state"], ended["attempt"]) == ("failed", 1)
    assert "may not enter its working directory" in ended["reason"]


def test_a_second_name_of_a_host_leaves_the_jobs_of_accounts_alone(site: Site, people: tuple[Person, Person]) -> None:
    """Regression: their agents were dialed there, too, and left the first name: each time their jobs were stopped."""
    ann, bob = people
    start_and_let_in(site, ann)
    job = ann.calls(site.socket, "submit", spec=command("mine", "sleep 600"))["id"]
    site.cluster.wait_for(job, lambda row: row["state"] == "running")
    with open(site.cluster.directory / "ssh_config", "a") as file:
        file.write(site.server.config(site.cluster.directory / "known").replace("Host node", "Host alias"))
    refused = site.cluster.run("host", "add", "--yes", "--cpu-devices", "1", "alias", check=False).stderr
    assert "it is node under another name" in refused
    assert ann.calls(site.socket, "login")["hosts"] == {"node": "", "alias": "not connected yet"}
    bob.lets_in(bob.calls(site.socket, "login")["key"])
    assert bob.calls(site.socket, "login")["hosts"] == {"node": "", "alias": "not connected yet"}
    site.cluster.run("host", "remove", "alias")
    quick = ann.calls(site.socket, "submit", spec=command("quick", "true"))["id"]
    ended = site.cluster.wait_for(quick, lambda row: row["ended_s"] is not None)
    # Whose it is tells everybody else, also where it is the only one.
    assert f"{job}   {ann.name}  mine" in site.cluster.run("ls").stdout
    row = site.cluster.job(job)
    assert (ended["state"], row["state"], row["attempt"]) == ("finished", "running", 1)
    site.cluster.run("cancel", "--now", job)
