"""Read-only pages over HTTP: the verbs that look, for visitors without a name."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from clusterd.config import load
from clusterd.daemon.access import RULES, Callers
from clusterd.daemon.web.pages import ROUTES
from clusterd.errors import ConfigError
from tests.cli.test_metrics import read
from tests.conftest import RunningCluster, until
from tests.tui.browser import chromium, opened

PICTURE = "<img src=x onerror=alert(1)>"
"""An argument that would be a picture, were it not escaped."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serving(cluster: RunningCluster, visibility: str, hosts: int = 1) -> int:
    """Start the cluster with pages; returns their port."""
    port = free_port()
    settings = cluster.directory / "clusterd.toml"
    settings.write_text(f'[web]\nport = {port}\nvisibility = "{visibility}"\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=hosts)
    until(lambda: cluster.call("status")["web"]["trouble"] == "")
    return port


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def rows(port: int, path: str) -> Any:
    status, body, _ = ask(port, path)
    assert status == 200, body
    return json.loads(body)


def sleep(cluster: RunningCluster, name: str, *command: str) -> str:
    """A running job with one device; returns its id."""
    job = cluster.run("run", "-d", "--no-snapshot", "--devices", "1", "--name", name, "--", *command).stdout.strip()
    cluster.wait_for(job, lambda row: row["state"] == "running")
    return job


def train(cluster: RunningCluster) -> str:
    """A job that wrote metrics and is over."""
    script = """
import torch
from clusterd import train

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.full((4,), i / 64), torch.full((1,), i / 64)

train.run(
    model=lambda: torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss, data=Numbers(),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01), global_batch=8, steps=12,
)
"""
    job = cluster.submit_script(script, "linear")
    row = cluster.wait_for(job, lambda row: row["state"] in ("finished", "failed"))
    assert row["state"] == "finished", row["reason"]
    return job


def test_a_visitor_reads_what_the_command_line_prints(cluster: RunningCluster) -> None:
    port = serving(cluster, "all")
    job = sleep(cluster, "sleeper", "sleep", "1000")
    assert f"http://127.0.0.1:{port}/ (read-only, visibility all)" in cluster.run("status").stdout
    (row,) = rows(port, "/api/jobs")
    printed = json.loads(cluster.run("ls", "-o", "json").stdout)[0]
    assert row == {**printed, "left_s": row["left_s"]} and row["name"] == "sleeper"
    assert rows(port, f"/api/jobs/{job}")["spec"]["command"] == ["sleep", "1000"]
    assert rows(port, f"/api/jobs/{job}/why")["holders"] == {"sleeper": 1}
    assert [host["name"] for host in rows(port, "/api/hosts")] == ["local0"]
    assert rows(port, "/api/hosts/local0")["devices"][0]["job"] == job
    assert rows(port, "/api/history?limit=3")["events"][0]["kind"]
    assert rows(port, "/api/report?since_s=0&by=user")[0]["jobs"] == 0
    assert read(ask(port, "/metrics")[1])['clusterd_jobs{state="running"}'] == 1
    for path, status in (
        ("/api/jobs/none", 404), ("/api/history?limit=many", 400), ("/api/history?nothing=1", 400),
        ("/api/report", 400), ("/api/stop", 404), ("/api", 404), ("/nothing", 404), ("/static/..%2fpages.py", 404),
    ):  # fmt: skip
        assert ask(port, path)[0] == status, path
    assert "below /api: status, jobs, jobs/{job}, " in ask(port, "/api")[1]


def test_no_page_changes_anything(cluster: RunningCluster) -> None:
    """Not by another method, and none of the verbs behind the addresses is one that changes."""
    assert {RULES[verb].callers for verb in ROUTES.values()} == {Callers.EVERYBODY}
    port = serving(cluster, "all", hosts=0)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        status, _, headers = ask(port, "/api/status", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    status, body, headers = ask(port, "/", "HEAD")
    assert (status, body) == (200, "") and int(headers["Content-Length"]) > 100


def test_only_this_machine_s_own_pages_read_it(cluster: RunningCluster) -> None:
    """A site whose name leads to 127.0.0.1 is refused, and no page of another site may load or frame these."""
    port = serving(cluster, "own", hosts=0)
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost:80@evil", "", "[::2]:80"):
        assert ask(port, "/api/status", Host=host)[0] == 421, host
    for host in ("localhost:9000", f"127.0.0.1:{port}", "LOCALHOST", "[::1]", "[::1]:80"):
        assert ask(port, "/api/status", Host=host)[0] == 200, host
    for path in ("/", "/api/status", "/static/page.js", "/none"):
        headers = ask(port, path)[2]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert (headers["X-Content-Type-Options"], headers["Cross-Origin-Resource-Policy"]) == (
            "nosniff",
            "same-origin",
        )
        assert "Access-Control-Allow-Origin" not in headers


def test_a_visitor_sees_of_jobs_what_the_setting_says(cluster: RunningCluster) -> None:
    """By default that they are there; with `names`, no command line and no metrics. They all are somebody's."""
    port = serving(cluster, "own")
    job = sleep(cluster, "secret-plan", "sleep", "1000")
    (row,) = rows(port, "/api/jobs")
    assert (row["name"], row["user"], row["state"]) == ("another-user's-job", "another-user", "running")
    for path in ("secret-plan", "secret", "none", job, f"{job}/why", f"{job}/steps"):
        assert ask(port, f"/api/jobs/{path}")[0] == 403
    pages = (
        "report?since_s=0&by=job",
        "report?since_s=0&by=model",
        "jobs?all=1",
        "hosts",
        "hosts/local0",
        "history",
        "usage",
        "status",
        "arrays",
        "claims",
    )
    seen = "".join(ask(port, f"/api/{page}")[1] for page in pages) + ask(port, "/metrics")[1]
    assert "secret-plan" not in seen and "sleep" not in seen
    cluster.run("stop")
    (cluster.directory / "clusterd.toml").write_text(f'[web]\nport = {port}\nvisibility = "names"\n')
    cluster.start()
    until(lambda: cluster.call("status")["web"]["trouble"] == "")
    shown = rows(port, f"/api/jobs/{job}")
    assert (shown["name"], shown["spec"]["command"]) == ("secret-plan", [])
    assert ask(port, f"/api/jobs/{job}/steps")[0] == 403


def test_a_taken_port_is_said_and_taken_when_it_is_free(cluster: RunningCluster) -> None:
    """Jobs matter more than pages: the daemon starts."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        settings = cluster.directory / "clusterd.toml"
        settings.write_text(f"[web]\nport = {port}\n")
        cluster.environment["CLUSTERD_CONFIG"] = str(settings)
        cluster.start()
        until(lambda: "in use" in cluster.call("status")["web"]["trouble"])
        assert "FAILS: port" in cluster.run("status").stdout
    until(lambda: cluster.call("status")["web"]["trouble"] == "")
    assert ask(port, "/")[0] == 200


def test_visitors_who_misbehave_hold_up_nobody(cluster: RunningCluster) -> None:
    """Connections that say nothing, garbage, and a request without end."""
    port = serving(cluster, "own", hosts=0)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for data in (
        b"\x00\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /%ff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(data)
            assert one.recv(100).split()[1] in (b"400", b"421"), data
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 20000)
        assert one.recv(100).split()[1] == b"431"
    with socket.create_connection(("127.0.0.1", port)) as gone:
        gone.sendall(b"GET /api/history HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert ask(port, "/api/status")[0] == 200
    for one in silent:
        one.close()
    assert "failed" not in cluster.log()


def test_visitors_never_see_more_than_users(tmp_path: Path) -> None:
    file = tmp_path / "clusterd.toml"
    for text, why in (
        ('[daemon]\nvisibility = "own"\n[web]\nport = 80\nvisibility = "names"\n', "must not see more"),
        ("[web]\n", "port is missing; it must be a whole number"),
        ("[web]\nport = 70000\n", "from 1 to 65535"),
        ('[web]\nport = 80\nvisibility = "some"\n', "must be one of own, names, all"),
        ("[web]\nport = 80\naddress = '0.0.0.0'\n", "address"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            load(file)


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no Chromium on PATH")
def test_a_browser_shows_queue_fleet_and_a_job_with_its_metrics(cluster: RunningCluster, tmp_path: Path) -> None:
    """An argument that is HTML is shown as it was written."""
    port = serving(cluster, "all")
    job = train(cluster)
    sleeper = sleep(cluster, "sleeper", "sh", "-c", "sleep 1000", PICTURE)

    command = ("run", "-d", "--no-snapshot", "--name", "night", "--array", "1-3%1", "--", "sleep", "1000")
    tasks = cluster.run(*command).stdout.split()
    cluster.wait_for(tasks[0], lambda row: row["state"] == "running")
    wide = ("run", "-d", "--no-snapshot", "--name", "wide", "--devices", "2", "--", "true")
    waiting = cluster.run(*wide).stdout.strip()
    url = f"http://127.0.0.1:{port}/"

    async def look() -> None:
        browser = chromium()
        assert browser is not None
        async with opened(browser, url, tmp_path / "profile") as page:
            await page.text_with("sleeper", "running", "1 of 2 devices leased", "Read-only")
            await page.text_with("night", "3 tasks: 1 running, 2 queued")
            await page.go(f"{url}?all")
            await page.text_with("linear", "finished", "12/12", "3 tasks")
            await page.go(f"{url}?all&array={tasks[0]}")
            await page.text_with("Tasks of", "night_1", "night_2", "night_3")
            await page.go(f"{url}fleet")
            await page.text_with("local0", "up", "free", "sleeper")
            await page.go(f"{url}calendar")
            await page.text_with("Calendar", "local0", "now", f"sleeper ({sleeper})")
            await page.go(f"{url}history")
            await page.text_with("Device-hours by day", "Busy and idle", "local0\t", "Waiting times", "submitted by")
            assert await page.evaluate("document.querySelectorAll('svg.bar rect').length") >= 3
            await page.go(f"{url}jobs/{waiting}")
            await page.text_with("Waits for", "sleeper holds 1 device", "expected start")
            await page.go(f"{url}jobs/{job}")
            await page.text_with("linear", "Story", "loss", "step time (s)", "steps 1 to 12")
            assert await page.evaluate("document.querySelectorAll('svg.chart polyline').length") >= 2
            await page.go(f"{url}jobs/{sleeper}")
            await page.text_with(PICTURE, "started on local0")
            assert await page.evaluate("document.querySelectorAll('main img').length") == 0
            await page.go(f"{url}jobs/none")
            await page.text_with("there is no job 'none'")
            await page.resize(420)
            narrow = {"?all": "All jobs", "calendar": "sleeper", "history": "Waiting times", f"jobs/{job}": "Attempts"}
            for path, word in narrow.items():
                await page.go(url + path)
                await page.text_with(word)
                assert await page.evaluate("document.querySelector('main').scrollWidth <= innerWidth"), path

    asyncio.run(look())
