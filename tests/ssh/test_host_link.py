"""The link to a host: connected, cut, connected again, without loss in between."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent.host.bundle import Bundle, bundle, pack
from clusterd.agent.host.home import Home, read_json
from clusterd.daemon.hosts.links import AgentOwners
from clusterd.errors import AgentLost
from clusterd.ssh.connection import Dialer
from clusterd.ssh.embedded import EmbeddedHost
from clusterd.ssh.host import AgentRefused, HostLink, Leader, LinkCallbacks, LinkState
from clusterd.types import HostId
from tests.agent.client import KEY, launch
from tests.hang import HANG_S

pytestmark = pytest.mark.anyio


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for what no event tells: a file, or a state that was passed through."""
    deadline = asyncio.get_running_loop().time() + HANG_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited 30 s for {what}"
        await asyncio.sleep(0.01)


class Watched:
    """A link, and everything it said."""

    def __init__(
        self,
        host: EmbeddedHost,
        dialer: Dialer,
        epoch: int = 1,
        on_identity: Callable[[str], None] | None = None,
        **more: Any,
    ) -> None:
        self.states: list[LinkState] = []
        self.hellos: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()
        self.change_route: dict[str, Any] = {}

        async def route() -> Any:
            return replace(host.route, **self.change_route)

        self.link = HostLink(
            host.name,
            route,
            dialer,
            Leader("test", epoch, KEY),
            LinkCallbacks(
                on_state=self._on_state,
                on_up=lambda hello: self._keep(self.hellos, hello),
                on_event=lambda event: self._keep(self.events, event),
                on_identity=on_identity,
            ),
            jitter=random.Random(0),
            **more,
        )

    def _on_state(self, state: LinkState) -> None:
        self.states.append(state)

    async def _keep(self, where: list[dict[str, Any]], message: dict[str, Any]) -> None:
        async with self._changed:
            where.append(message)
            self._changed.notify_all()

    async def up(self, times: int = 1) -> dict[str, Any]:
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: len(self.hellos) >= times), 30)
        return self.hellos[times - 1]

    async def event(self, name: str, **fields: Any) -> dict[str, Any]:
        def find() -> dict[str, Any] | None:
            for event in self.events:
                if event["event"] == name and all(event.get(k) == v for k, v in fields.items()):
                    return event
            return None

        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(find), 30)
        found = find()
        assert found is not None
        return found

    async def waiting(self, failures: int = 1) -> LinkState:
        """The state of the wait after so many failures in a row."""

        def find() -> list[LinkState]:
            return [s for s in self.states if s.name == "waiting" and s.failures == failures]

        await until(find, f"a wait after {failures} failures")
        return find()[-1]


@asynccontextmanager
async def linked(host: EmbeddedHost, dialer: Dialer, **more: Any) -> AsyncIterator[Watched]:
    watched = Watched(host, dialer, **more)
    task = asyncio.create_task(watched.link.run())
    try:
        yield watched
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_link_comes_up_and_shows_its_way(host: EmbeddedHost, dialer: Dialer) -> None:
    async with linked(host, dialer) as watched:
        hello = await watched.up()
        assert [state.name for state in watched.states] == ["dialing", "bootstrapping", "up"]
        assert hello["version"] == bundle().version
        assert hello["agent_home"] == str(host.agent_home)
        assert (await watched.link.request("facts"))["boot_id"] == hello["boot_id"]
    assert watched.link.state.name == "closed"
    with pytest.raises(AgentLost, match="gpu01 is not connected: closed"):
        await watched.link.request("facts")


async def test_a_machine_under_a_second_name_keeps_its_first_link(host: EmbeddedHost, dialer: Dialer) -> None:
    """Its agent would leave the first link for the second, and the daemon dial both again and again."""
    agents = AgentOwners([])

    def named(name: str) -> Callable[[str], None]:
        return lambda identity: agents.claim(HostId(name), identity)

    async with linked(host, dialer, on_identity=named("a")) as first:
        await first.up()
        async with linked(host, dialer, on_identity=named("b")) as second:
            assert "it is a under another name" in (await second.waiting(failures=2)).why
        assert (await first.link.request("facts"))["boot_id"]
        assert [state.name for state in first.states] == ["dialing", "bootstrapping", "up"]


async def test_a_job_runs_through_cut_connections(host: EmbeddedHost, dialer: Dialer) -> None:
    """The ranks run on, the request in flight fails and says so, and what happened meanwhile is reported."""
    async with linked(host, dialer) as watched:
        await watched.up()
        request = launch(
            ["sh", "-c", "while [ ! -e go ]; do sleep 0.02; done; echo done; exit 3"], job="ends-in-the-dark"
        )
        await watched.link.request("launch", **request)
        deaf = "trap '' TERM; touch deaf; while [ ! -e go ]; do sleep 0.02; done; exit 4"
        await watched.link.request("launch", **launch(["sh", "-c", deaf], job="held"))
        home = Home(host.agent_home)
        await until((home.attempt("held", 1) / "work" / "deaf").exists, "it to hear no SIGTERM any more")
        in_flight = asyncio.create_task(
            watched.link.request("stop", job="held", attempt=1, generation=1, grace_s=60.0, reason="x")
        )
        await until((home.attempt("held", 1) / "stop.json").exists, "the stop to be written down")
        watched.change_route = {"port": 1}  # the network is down for a while
        host.hang_up()
        with pytest.raises(AgentLost, match="gpu01: the connection ended"):
            await in_flight
        (home.attempt("ends-in-the-dark", 1) / "work" / "go").touch()
        await watched.waiting()
        record = home.attempt("ends-in-the-dark", 1) / "rank-0.state.json"
        await until(lambda: '"exited"' in record.read_text(), "the end to be written down")
        watched.change_route = {}
        watched.link.retry_now()
        hello = await watched.up(2)
        reports = {report["job"]: report["ranks"][0] for report in hello["attempts"]}
        if reports["ends-in-the-dark"]["state"] == "running":  # its sweep was still going on
            await watched.event("rank_exited", job="ends-in-the-dark", exit_code=3)
        else:
            assert reports["ends-in-the-dark"]["exit_code"] == 3
        logs = await watched.link.request("logs", job="ends-in-the-dark", attempt=1, rank=0, offset=0, limit=100)
        assert (logs["data"], logs["done"]) == (b"done\n", True)
        # The stop that was asked for goes on without its caller, and a second one joins it.
        assert reports["held"]["state"] == "running"
        (home.attempt("held", 1) / "work" / "go").touch()
        stopped = await watched.link.request("stop", job="held", attempt=1, generation=1, grace_s=60.0, reason="x")
        assert (stopped["ranks"][0]["exit_code"], stopped["ranks"][0]["reason"]) == (4, "stopped")


async def test_events_come_after_the_report_that_precedes_them(host: EmbeddedHost, dialer: Dialer) -> None:
    async with linked(host, dialer) as watched:
        await watched.up()
        for number in range(5):
            await watched.link.request("launch", **launch(["true"], job=f"j{number}"))
        for number in range(5):
            assert (await watched.event("rank_exited", job=f"j{number}"))["exit_code"] == 0


class OddHost(EmbeddedHost):
    """Of an account that is older than the encoding of its machine."""

    @property
    def agent_home(self) -> Path:
        return self.directory / os.fsdecode(b"lat\xfc\xff")


async def test_a_host_whose_home_is_no_utf8_runs_jobs(dialer: Dialer, tmp_path: Path, agent_homes: list[Path]) -> None:
    """Paths reach the host's jobs unchanged, and can be displayed."""
    host = OddHost("gpu01", tmp_path / "gpu01")
    agent_homes.append(host.agent_home)
    await host.start()
    async with linked(host, dialer) as watched:
        hello = await watched.up()
        assert "lat\\udcfc\\udcff" in hello["agent_home"]
        await watched.link.request("launch", **launch(["sh", "-c", "pwd"]))
        await watched.event("rank_exited", exit_code=0)
        log = await watched.link.request("logs", job="j", attempt=1, rank=0, offset=0, limit=1000)
        assert b"lat\xfc\xff" in log["data"]
    await host.stop()


async def test_a_refusal_that_is_no_utf8_can_be_written_down(dialer: Dialer, tmp_path: Path) -> None:
    host = OddHost("gpu01", tmp_path / "gpu01")
    await host.start()
    host.agent_home.rmdir()
    host.agent_home.write_text("not a directory")
    async with linked(host, dialer) as watched:
        why = (await watched.waiting()).why
        assert "Not a directory" in why
        assert "lat\\udcfc" in why.encode().decode()
    await host.stop()


async def test_a_killed_agent_is_started_again_and_finds_its_ranks(host: EmbeddedHost, dialer: Dialer) -> None:
    async with linked(host, dialer) as watched:
        await watched.up()
        started = await watched.link.request("launch", **launch(["sleep", "100"]))
        os.kill((read_json(Home(host.agent_home).record) or {})["pid"], signal.SIGKILL)
        hello = await watched.up(2)
        assert hello["attempts"][0]["ranks"][0]["pid"] == started["ranks"][0]["pid"]
        assert hello["attempts"][0]["ranks"][0]["state"] == "running"
        await watched.link.request("stop", job="j", attempt=1, generation=1, grace_s=5.0, reason="x")


async def test_an_agent_that_hangs_loses_its_link(host: EmbeddedHost, dialer: Dialer) -> None:
    """Regression: the host's sshd kept the connection alive, so the host looked up for ever."""
    async with linked(host, dialer, lost_after_s=4.0) as watched:
        await watched.up()
        pid = (read_json(Home(host.agent_home).record) or {})["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            assert "gpu01 did not answer 'heartbeat' within 3 s" in (await watched.waiting()).why
        finally:
            os.kill(pid, signal.SIGCONT)
        await watched.up(2)


async def test_an_agents_refusal_has_a_kind(host: EmbeddedHost, dialer: Dialer) -> None:
    async with linked(host, dialer) as watched:
        await watched.up()
        with pytest.raises(AgentRefused, match="gpu01: attempt 1 of j was never here") as refused:
            await watched.link.request("logs", job="j", attempt=1, rank=0, offset=0, limit=1)
        assert refused.value.kind == "unknown"


async def test_a_host_that_is_away_is_dialed_ever_less_often(host: EmbeddedHost, dialer: Dialer) -> None:
    watched = Watched(host, dialer)
    watched.change_route = {"port": 1}
    task = asyncio.create_task(watched.link.run())
    for failures in range(1, 8):
        wait = await watched.waiting(failures)
        assert wait.until_s is not None
        pause_s = wait.until_s - wait.at_s
        longest_s = min(60.0, 0.5 * 2 ** (failures - 1))
        assert longest_s / 2 - 0.01 <= pause_s <= longest_s + 0.01
        assert "nothing listens on port 1" in wait.why
        watched.link.retry_now()
    watched.change_route = {}
    watched.link.retry_now()
    await watched.up()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def newer(code: Bundle) -> Bundle:
    """The same code with a file more."""
    return pack([*files_of(code), ("newer", b"")])


def files_of(code: Bundle) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(code.data)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


async def test_an_idle_agent_of_an_older_version_is_replaced(host: EmbeddedHost, dialer: Dialer) -> None:
    async with linked(host, dialer) as watched:
        first = await watched.up()
    async with linked(host, dialer, code=newer(bundle()), epoch=2) as watched:
        second = await watched.up()
    assert second["version"] != first["version"]
    assert second["agent"] == first["agent"]  # the host's identity stays
    assert [state.name for state in watched.states[:4]] == ["dialing", "bootstrapping", "bootstrapping", "up"]


async def test_a_busy_agent_of_an_older_version_is_left_alone(host: EmbeddedHost, dialer: Dialer) -> None:
    async with linked(host, dialer) as watched:
        first = await watched.up()
        await watched.link.request("launch", **launch(["sleep", "100"]))
    async with linked(host, dialer, code=newer(bundle()), epoch=2) as watched:
        second = await watched.up()
        assert second["version"] == first["version"]
        assert second["attempts"][0]["ranks"][0]["state"] == "running"
        await watched.link.request("stop", job="j", attempt=1, generation=1, grace_s=5.0, reason="x")


def before_proofs(code: Bundle) -> Bundle:
    """The same code with an agent that knows no challenge and obeys whoever says hello."""
    files = dict(files_of(code))
    text = files["clusterd/agent/server/server.py"]
    text = text.replace(b"connection.nonce = new_nonce()", b'raise Refused("verb", "no such verb")')
    text = text.replace(b"self._check_proof(connection, hello)", b"connection.proven = True")
    return pack([*{**files, "clusterd/agent/server/server.py": text}.items()])


async def test_an_agent_that_asks_for_no_proof_is_led_until_its_jobs_are_over(
    host: EmbeddedHost, dialer: Dialer
) -> None:
    async with linked(host, dialer, code=before_proofs(bundle())) as watched:
        first = await watched.up()
        await watched.link.request("launch", **launch(["sleep", "100"]))
    async with linked(host, dialer, epoch=2) as watched:
        second = await watched.up()
        assert second["version"] == first["version"]
        assert second["attempts"][0]["ranks"][0]["state"] == "running"
        await watched.link.request("stop", job="j", attempt=1, generation=1, grace_s=5.0, reason="x")
    async with linked(host, dialer, epoch=3) as watched:
        assert (await watched.up())["version"] == bundle().version


async def test_a_daemon_that_is_superseded_hears_of_it_at_once(host: EmbeddedHost, dialer: Dialer) -> None:
    """Regression: the daemon went on using a link over which every request was refused."""
    async with linked(host, dialer, epoch=1) as old:
        await old.up()
        async with linked(host, dialer, epoch=2) as new:
            await new.up()
            assert "a newer daemon (epoch 2) leads this host; epoch 1 is over" in (await old.waiting()).why


async def test_a_daemon_that_was_succeeded_waits_and_says_why(host: EmbeddedHost, dialer: Dialer) -> None:
    async with linked(host, dialer, epoch=2) as new:
        await new.up()
        async with linked(host, dialer, epoch=1) as old:
            state = await old.waiting()
            assert "a newer daemon (epoch 2) leads this host; epoch 1 is over" in state.why


async def test_a_large_log_comes_through(host: EmbeddedHost, dialer: Dialer) -> None:
    async with linked(host, dialer) as watched:
        await watched.up()
        await watched.link.request("launch", **launch(["sh", "-c", "head -c 20000000 /dev/zero"]))
        await watched.event("rank_exited")
        offset, done = 0, False
        while not done:
            chunk = await watched.link.request("logs", job="j", attempt=1, rank=0, offset=offset, limit=1 << 22)
            offset, done = chunk["offset"], chunk["done"]
        assert offset == 20_000_000


async def test_an_answer_that_does_not_come_in_time_breaks_the_link(host: EmbeddedHost, dialer: Dialer) -> None:
    """The caller cannot know the outcome; the report of the next connection tells, so the link reconnects."""
    async with linked(host, dialer) as watched:
        await watched.up()
        pid = (read_json(Home(host.agent_home).record) or {})["pid"]
        os.kill(pid, signal.SIGSTOP)
        other = asyncio.create_task(watched.link.request("facts"))
        with pytest.raises(AgentLost, match="gpu01 did not answer 'facts' within 0 s"):
            await watched.link.request("facts", timeout_s=0.2)
        with pytest.raises(AgentLost, match="gpu01 did not answer 'facts' within 0 s"):
            await other
        assert "gpu01 did not answer 'facts'" in (await watched.waiting()).why
        os.kill(pid, signal.SIGCONT)
        await watched.up(2)
        assert (await watched.link.request("facts"))["hostname"]
