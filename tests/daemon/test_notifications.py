"""The operator's command receives notifications."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from clusterd import config
from clusterd.cli.head_node.daemon import _has_ended
from clusterd.core import events as e
from clusterd.core.host import Host
from clusterd.core.state import State, Used
from clusterd.core.timers import TimerKind
from clusterd.daemon import notifications
from clusterd.daemon.notifications import Notifier
from clusterd.daemon.settings import refuse_unknown
from clusterd.errors import ConfigError
from clusterd.types import HostId, HostState
from tests.conftest import RunningCluster, crash_host, until
from tests.core.allocation.test_bookings import book
from tests.core.conftest import Lab


@pytest.mark.slow
def test_ends_of_jobs_are_told_in_order(cluster: RunningCluster, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    teller = tmp_path / "teller"
    # It fails the first time: what comes later is told all the same.
    teller.write_text(
        f"#!/bin/sh\nsleep 0.2\ncat >> {inbox}\ntest -e {inbox}.failed || {{ touch {inbox}.failed; exit 1; }}\n"
    )
    teller.chmod(0o755)
    settings = tmp_path / "clusterd.toml"
    settings.write_text(f'[notify]\ncommand = ["{teller}"]\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=1)
    cluster.run("run", "--no-snapshot", "--name", "good", "--", "true")
    cluster.run("run", "--no-snapshot", "--name", "bad", "--", "sh", "-c", "exit 9", check=False)
    gone = cluster.run("run", "-d", "--no-snapshot", "--name", "gone", "--", "sleep", "1000").stdout.strip()
    cluster.run("cancel", "--wait", gone)  # by default, whoever cancelled it knows
    cluster.run("run", "--no-snapshot", "--name", "last", "--", "true")

    def notifications() -> list[dict[str, Any]]:
        return [json.loads(line) for line in inbox.read_text().splitlines()] if inbox.exists() else []

    until(lambda: len(notifications()) == 3, 30.0, lambda: str(notifications()))
    assert [(one["kind"], one["name"], one["exit_code"]) for one in notifications()] == [
        ("job finished", "good", 0),
        ("job failed", "bad", 9),
        ("job finished", "last", 0),
    ]
    assert notifications()[1]["text"].startswith("bad (2) failed: ")
    assert f"notify: {teller} ended with 1" in cluster.log()


def test_a_job_that_starts_again_is_told_of(cluster: RunningCluster, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    settings = tmp_path / "clusterd.toml"
    settings.write_text(f'[notify]\ncommand = ["tee", "-a", "{inbox}"]\non = ["job queued again"]\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=2)
    cluster.wait_until_up(2)
    command = ("run", "-d", "--devices", "1", "--name", "long", "--", "sleep", "1000")
    job = cluster.run(*command, cwd=tmp_path).stdout.strip()
    host = cluster.wait_for(job, lambda row: row["state"] == "running")["hosts"][0]
    crash_host(cluster.directory, int(host.removeprefix("local")))
    until(lambda: inbox.exists() and inbox.read_text().endswith("\n"), 30.0, cluster.log)
    notification = json.loads(inbox.read_text())
    assert notification["text"].startswith("long (1): attempt 1 was lost")
    assert notification["text"].count("again") == 1
    assert (notification["job"], notification["hosts"]) == (job, [host])


@pytest.mark.parametrize("command", [("true",), ("no-such-command",), ("sleep", "1000")])
def test_a_command_that_does_not_work_harms_nothing(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifications, "PATIENCE_S", 0.1)
    host = Host(HostId("gpu01"), HostState.LOST, why="x" * 1_000_000)  # more than a pipe takes
    notifier = Notifier(config.Notify(command, config.NOTIFICATIONS), State(hosts={host.id: host}))
    notifier.handled([], [])
    anyio.run(notifier.deliver)
    assert ("it was to tell that gpu01 is lost" in caplog.text) == (command != ("true",))


def test_an_owner_is_told_of_idle_devices_once_they_are(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit("gpt", user="ann")
    lab.run(job)
    notifier = Notifier(config.Notify(("tee", "-a", str(inbox)), config.NOTIFICATIONS), lab.scheduler.state)
    for since_s in (lab.now_s - 3600.0, None):
        event = e.IdlenessObserved(**lab.at(), job=job, attempt=1, since_s=since_s)
        notifier.handled([event], lab.tell(event))
    anyio.run(notifier.deliver)
    (told,) = [json.loads(line) for line in inbox.read_text().splitlines()]
    assert (told["kind"], told["user"]) == ("job idle", "ann")
    assert told["text"] == f"gpt ({job}) is idle: its devices have done nothing for 1h00m"


def test_an_owner_is_told_that_a_booking_is_released(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    lab = Lab()
    lab.host("a", gpus=1)
    number = book(lab, "a:gpu0", owner="ann")
    notifier = Notifier(config.Notify(("tee", "-a", str(inbox)), config.NOTIFICATIONS), lab.scheduler.state)
    notifier.handled([], lab.fire(e.Timer(TimerKind.CLAIM, number)))
    anyio.run(notifier.deliver)
    (told,) = [json.loads(line) for line in inbox.read_text().splitlines()]
    assert (told["kind"], told["user"]) == ("booking released", "ann")
    assert told["text"] == "a:gpu0 is free for others: no job of booking 1 used it for 15m00s; it is over"


def test_an_owner_is_told_once_that_checkpoints_fail(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit("gpt", user="ann")
    lab.run(job)
    notifier = Notifier(config.Notify(("tee", "-a", str(inbox)), config.NOTIFICATIONS), lab.scheduler.state)
    of = {"job": job, "attempt": 1}
    for event in (
        e.CheckpointFailed(**lab.at(), **of, step=10, why="no space left"),
        e.CheckpointFailed(**lab.at(), **of, step=20, why="no space left"),
        e.CheckpointTaken(**lab.at(), **of, step=30, path="/shared/0"),
        e.CheckpointFailed(**lab.at(), **of, step=40, why="no space left"),
    ):
        notifier.handled([event], lab.tell(event))
    anyio.run(notifier.deliver)
    told = [json.loads(line)["text"] for line in inbox.read_text().splitlines()]
    assert told == [
        f"gpt ({job}): step 10 was not saved: no space left (the newest checkpoint: none)",
        f"gpt ({job}): step 40 was not saved: no space left (the newest checkpoint: of step 30)",
    ]


def test_an_owner_is_told_once_that_a_disk_is_full(tmp_path: Path) -> None:
    """It is tried every five minutes, for as long as nobody makes room."""
    inbox = tmp_path / "inbox"
    lab = Lab()
    lab.host("a", gpus=1)
    job, _ = lab.submit("gpt", user="ann")
    notifier = Notifier(config.Notify(("tee", "-a", str(inbox)), config.NOTIFICATIONS), lab.scheduler.state)
    for number in (1, 2, 3):
        full = {"host": HostId("a"), "why": "no space left", "is_full_disk": True}
        lab.tell(e.LaunchFailed(**lab.at(), job=job, attempt=number, generation=1, **full))
        notifier.handled([], lab.stopped(job))
        lab.fire(e.Timer(TimerKind.RETRY, job))
    anyio.run(notifier.deliver)
    (told,) = [json.loads(line)["text"] for line in inbox.read_text().splitlines()]
    assert told.startswith(f"gpt ({job}): attempt 1 was lost: a did not start it: no space left")


def test_a_host_is_told_of_when_it_is_lost_and_when_it_is_back(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    host = Host(HostId("gpu01"), HostState.UP)
    notifier = Notifier(config.Notify(("tee", "-a", str(inbox)), config.NOTIFICATIONS), State(hosts={host.id: host}))
    for state in (HostState.UNREACHABLE, HostState.LOST, HostState.CONNECTING, HostState.UP):
        host.go(state, 0.0, "no answer" if state is HostState.LOST else "")
        notifier.handled([], [])
    anyio.run(notifier.deliver)
    notifications = [json.loads(line) for line in inbox.read_text().splitlines()]
    assert [(one["kind"], one["text"]) for one in notifications] == [
        ("host lost", "gpu01 is lost: no answer"),
        ("host back", "gpu01 is back"),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("notify = 3", "must be a table"),
        ("[notify]", "has nobody to tell"),
        ('[notify]\ncommand = "mail"', "must be a command"),
        ('[notify]\ncommand = ["mail"]\non = ["job done"]', "job finished"),
        ('[notify]\ncommand = ["mail"]\nonly = []', "unknown key 'only'"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "clusterd.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        config.load(file)


def test_a_slow_notification_delays_neither_stop_nor_its_own_children(cluster: RunningCluster, tmp_path: Path) -> None:
    """The first ends and leaves a child with its streams open; the second would take an hour."""
    inbox, child = tmp_path / "inbox", tmp_path / "child"
    teller = tmp_path / "teller"
    teller.write_text(
        f"#!/bin/sh\ncat >> {inbox}\nif test -e {inbox}.once; then echo $$ > {child}; exec sleep 3600; fi\n"
        f"touch {inbox}.once; sleep 3600 & echo $! > {child}.left\n"
    )
    teller.chmod(0o755)
    settings = tmp_path / "clusterd.toml"
    settings.write_text(f'[notify]\ncommand = ["{teller}"]\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=1)
    for name in ("first", "second"):
        cluster.run("run", "--no-snapshot", "--name", name, "--", "true")
    until(lambda: child.exists() and child.read_text().strip() != "", 30.0)
    os.kill(int(Path(f"{child}.left").read_text()), signal.SIGKILL)  # nobody's but the teller's
    cluster.run("stop")
    assert not Path(f"/proc/{child.read_text().strip()}").exists()


def test_stop_is_done_when_nobody_takes_the_exit_code() -> None:
    """The first process of a container may not collect exit codes."""
    with subprocess.Popen(["true"]) as nobody_waits:
        until(lambda: _has_ended(nobody_waits.pid))
        assert Path(f"/proc/{nobody_waits.pid}").exists()
    assert _has_ended(nobody_waits.pid) and not _has_ended(os.getpid())


@pytest.fixture
def service() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A web hook: its URL for apprise, and what it received."""
    received: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append({"path": self.path, **body})
            self.send_response(500 if self.path == "/fails" else 200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"json://user:secret@127.0.0.1:{server.server_port}", received
        server.shutdown()


def test_services_get_the_text_and_users_that_of_their_own_jobs(
    service: tuple[str, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    url, received = service
    to = config.Notify(urls=(f"{url}/all", f"{url}/fails"), users={"ann": (f"{url}/ann",)}, on=config.NOTIFICATIONS)
    notifier = Notifier(to, State())
    for user in ("ann", "bob"):
        notifier.tell({"kind": "job failed", "text": f"{user}'s job failed", "user": user})
    notifier.tell({"kind": "host lost", "text": "gpu01 is lost"})
    anyio.run(notifier.deliver)
    told = [(one["path"], one["message"]) for one in received if one["path"] != "/fails"]
    assert told == [
        ("/all", "ann's job failed"),
        ("/ann", "ann's job failed"),
        ("/all", "bob's job failed"),
        ("/all", "gpu01 is lost"),
    ]
    assert "1 service refused; it was to tell that gpu01 is lost" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "text, said",
    [
        ("[notify]", "nobody to tell"),
        ("[notify]\nurls = 'slack://x'", "must be a list of URLs"),
        ("[notify]\nurls = ['nosuch://pass:word@x']", "does not understand one of nosuch://"),
        ("[notify]\nusers = ['ann']", "it must be a table"),
        ("[notify]\nusers = { ann = 'mailto://x' }", "users.ann must be a list of URLs"),
    ],
)
def test_receivers_that_cannot_be_told_are_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "clusterd.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        refuse_unknown(config.load(file), str(file))
    assert "pass:word" not in str(error.value)


def test_a_budget_is_told_of_when_most_of_it_is_used_and_when_all_is() -> None:
    lab = Lab()
    lab.tell(e.DaemonStarted(**lab.at(), epoch=1, budgets={"ann": 10.0}))
    lab.now_s = time.time()
    month_s = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    state = lab.scheduler.state
    notifier = Notifier(config.Notify(on=("budget",)), state)
    told = []
    for hours in (7.9, 8.1, 9.9, 10.0, 12.0):
        state.used = {"default": {"ann": Used(month_s=hours * 3600.0, at_s=max(lab.now_s, month_s))}}
        notifier.handled([], [])
        told.append([each["text"] for each in notifier._waiting])
        notifier._waiting.clear()
    most, all_ = (f"ann has used {part}% of the month's 10 device-hours" for part in (80, 100))
    assert told == [[], [most], [], [all_], []]
