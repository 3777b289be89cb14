"""Agents of people's own accounts: believed about their own jobs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from clusterd.core import events as e
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.hosts.launch_records import LaunchRecord
from clusterd.daemon.hosts.links import AccountLinks, AgentOwners
from clusterd.daemon.hosts.reports import Reports
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.protocol import agent
from clusterd.ssh.host import LinkCallbacks
from clusterd.types import HostId, JobId, JobSpec
from tests.core.conftest import facts

HOST = HostId("a")


class Link:
    """A link that is up as soon as it is opened."""

    async def run(self) -> None:
        await anyio.sleep_forever()


def exited(job: str) -> dict[str, Any]:
    return {
        "event": "rank_exited", "job": job, "attempt": 1, "generation": 1, "rank": 0, "reason": "exit", "exit_code": 0,
    }  # fmt: skip


@pytest.fixture
def with_links(tmp_path: Path) -> Callable[..., None]:
    def run(act: Callable[[LinkCallbacks, list[object], Any], Any]) -> None:
        async def main() -> None:
            journal = Journal(tmp_path / "journal.db")
            engine = Engine(journal, Scheduler())
            published: list[object] = []
            reports = Reports()
            reports.subscribe(agent.RankExited, lambda host, report: published.append(report))
            made: list[LinkCallbacks] = []

            def make(host: HostId, address: str, account: str, callbacks: LinkCallbacks) -> Any:
                made.append(callbacks)
                return Link()

            async def nothing(host: HostId) -> None: ...

            async def no_records(*_: object) -> list[LaunchRecord]:
                return []

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.run)
                links = AccountLinks(engine, reports, tasks, make, AgentOwners([]), nothing, no_records)
                await engine.post(e.HostAdded(at_s=1.0, host=HOST))
                await engine.post(e.HostConnected(at_s=1.0, host=HOST, facts=facts("a", gpus=2)))
                for job, account in (("1", "ann"), ("2", "bob")):
                    spec = JobSpec(name=account, command=("true",), user=account, account=account)
                    await engine.post(e.JobSubmitted(at_s=1.0, job=JobId(job), spec=spec))
                links.open(HOST, "a", "ann")
                await act(made[0], published, engine.scheduler.state)
                tasks.cancel_scope.cancel()
            journal.close()

        anyio.run(main)

    return run


def test_reports_about_jobs_of_others_are_dropped(with_links: Callable[..., None]) -> None:
    async def act(callbacks: LinkCallbacks, published: list[object], _state: Any) -> None:
        await callbacks.on_event(exited("2"))
        assert published == []
        await callbacks.on_event(exited("1"))
        assert [report.job for report in published if isinstance(report, agent.RankExited)] == ["1"]
        await callbacks.on_event({"event": "rank_exited", "job": 1})  # malformed: dropped
        await callbacks.on_event({"event": "nonsense"})
        assert len(published) == 1

    with_links(act)


def test_attempts_of_others_in_its_records_neither_block_the_host_nor_count(with_links: Callable[..., None]) -> None:
    async def act(callbacks: LinkCallbacks, _published: list[object], state: Any) -> None:
        rank = {"rank": 0, "state": "running", "pid": 1}
        rows = [{"job": job, "attempt": 7, "generation": 1, "ranks": [rank]} for job in ("2", "99")]
        hello = {
            "agent": "x", "version": "1", "boot_id": "b", "now_s": 1.0, "attempts": rows,
            "facts": {"boot_id": "b", "cpu_cores": 1, "memory_bytes": 1, "gpus": [], "addresses": [], "cpu_ids": [0]},
        }  # fmt: skip
        await callbacks.on_up(hello)
        host = state.hosts[HOST]
        assert host.logins == {"ann": ""}
        assert host.unusable is None
        assert state.jobs["1"].state.value == "starting"

    with_links(act)
