"""Jobs that ended long ago leave the scheduler's state, and every command still finds them."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from clusterd.core import events as e
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.journal import codec
from clusterd.daemon.journal.check import check_file
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.daemon.storage import archived_jobs
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.errors import ClusterError, UsageError
from clusterd.replay import journal_batches
from clusterd.types import ArrayTask, JobId, JobSpec
from tests.conftest import RunningCluster, until

DAY_S = 86400.0

T = TypeVar("T")


class Archiving:
    """A journal with its engine, and what archives its jobs after a day."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path)
        self.engine = Engine(self.journal, Scheduler())
        self.engine.restore()
        self.archived = ArchivedJobs(self.engine, DAY_S)
        self._serving = ExitStack()
        self._serving.callback(self.journal.close)
        self._portal = self._serving.enter_context(start_blocking_portal())
        running = self._portal.start_task_soon(self.engine.run)
        self._serving.callback(running.cancel)
        self.run(self.archived.load)

    @property
    def in_state(self) -> list[str]:
        return sorted(self.engine.scheduler.state.jobs)

    def run(self, *steps: Any) -> None:
        """Await the steps: events to post, or calls."""
        for step in steps:
            if isinstance(step, e.Event):
                self._portal.call(self.engine.post, step)
            else:
                self._portal.call(step)

    def call(self, verb: Callable[[], Awaitable[T]]) -> T:
        """Result of a call."""
        return self._portal.call(verb)

    def close(self) -> None:
        self._serving.close()

    def ended(
        self, *jobs: str, name: str = "train", user: str = "ann", at_s: float = 1000.0, array: ArrayTask | None = None
    ) -> None:
        """Jobs that were cancelled while they waited, in 1970 unless told otherwise."""
        spec = JobSpec(name=name, command=("true",), user=user, array=array)
        for job in map(JobId, jobs):
            self.run(e.JobSubmitted(at_s=at_s, job=job, spec=spec), e.JobCancelled(at_s=at_s, job=job))

    def recall(self, user: str, **arguments: Any) -> None:
        self.run(lambda: self.archived.recall_named(user, arguments))


@pytest.fixture
def past(tmp_path: Path) -> Iterator[Archiving]:
    made = Archiving(tmp_path / "journal.db")
    yield made
    made.close()


def encoded(past: Archiving) -> bytes:
    return codec.encode(past.engine.scheduler.state)


def test_a_replay_without_the_table_leads_to_the_same_state(past: Archiving, tmp_path: Path) -> None:
    past.ended("1", "2", "3")
    past.run(past.archived.archive)
    past.recall("ann", job="2")
    assert past.in_state == ["2"]
    scheduler = Scheduler()
    for batch in journal_batches(past.journal.path):
        scheduler.replay(batch)
    assert codec.encode(scheduler.state) == encoded(past)
    other = Archiving(past.journal.path)
    assert encoded(other) == encoded(past)
    assert (other.archived.counts["cancelled"], other.archived.newest) == (2, "3")
    other.close()


def test_no_job_is_missing_or_counted_twice_while_it_is_moved(past: Archiving) -> None:
    """Regression: whoever asked between the change of the state and the next look into the table missed jobs."""
    past.ended("1", "2", "3")
    seen: list[int] = []

    def count(*_: object) -> None:
        seen.append(len(past.engine.scheduler.state.jobs) + past.archived.counts.total())

    past.engine.subscribe(count)
    past.run(past.archived.archive)
    past.recall("ann", job="2")
    assert (past.in_state, past.archived.counts["cancelled"]) == (["2"], 2)
    assert seen == [3, 3]


def test_a_task_of_an_array_that_ran_again_counts_once(past: Archiving) -> None:
    for job, index in (("9", 0), ("10", 1), ("11", 0)):
        past.ended(job, array=ArrayTask(id=JobId("9"), name="grid", index=index))
    past.run(past.archived.archive)
    assert past.in_state == []
    ((newest, count),) = past.call(partial(past.archived.arrays, ()))
    assert (newest.spec.name, count) == ("train", 2)
    ((_, others),) = past.call(partial(past.archived.arrays, [("9", 1)]))
    assert others == 1, "one task runs again"


def test_what_others_wait_for_stays(past: Archiving) -> None:
    past.ended("1", "2")
    waiting = JobSpec(name="next", command=("true",), after=(JobId("1:any"),))
    past.run(e.JobSubmitted(at_s=2000.0, job=JobId("3"), spec=waiting), past.archived.archive)
    assert past.in_state == ["1", "3"]


def test_recent_ends_stay_and_only_so_many(past: Archiving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archived_jobs, "ENDED_MAX", 2)
    past.ended("1", "2", "3", "4", at_s=time.time() - archived_jobs.LEAST_S - 60.0)
    past.ended("5", "6", at_s=time.time())
    past.run(past.archived.archive)
    assert past.in_state == ["5", "6"]
    past.ended("7", at_s=time.time())
    past.run(past.archived.archive)
    assert past.in_state == ["5", "6", "7"], "it has just ended: its logs may still be on the way"


def test_a_name_means_the_user_s_own_job_before_that_of_another(past: Archiving) -> None:
    past.ended("1", "2")
    past.ended("3", user="bob")
    past.run(past.archived.archive)
    past.ended("4", user="bob")
    past.recall("ann", job="train")
    assert past.in_state == ["2", "4"]
    past.recall("bob", job="train")
    past.recall("carol", job="train")
    assert past.in_state == ["2", "4"], "bob's newest is in the state, and carol means it too"


def test_the_beginning_of_a_name(past: Archiving) -> None:
    past.ended("1", name="gpt-small")
    past.ended("2", name="gpt-large")
    past.ended("3", name="vit")
    past.run(past.archived.archive)
    past.recall("ann", also=["vi", "nothing", 7], job="")
    assert past.in_state == ["3"]
    with pytest.raises(UsageError, match="write more of the name"):
        past.recall("ann", job="gpt-")
    past.recall("ann", spec={"after": ["gpt-l:any"], "restore": "1"}, changes={"after": None})
    assert past.in_state == ["1", "2", "3"]


def test_two_at_once_recall_one_job(past: Archiving) -> None:
    past.ended("1")
    past.run(past.archived.archive)

    async def twice() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(past.archived.recall_named, "ann", {"job": "1"})

    past.run(twice)
    assert past.in_state == ["1"]
    assert past.archived.counts.total() == 0
    past.run(past.archived.archive)
    assert past.in_state == ["1"], "who asked for it still reads it"


def test_a_damaged_row_is_named(past: Archiving) -> None:
    past.ended("1", "2")
    past.run(past.archived.archive)
    with closing(sqlite3.connect(past.journal.path, isolation_level=None)) as db:
        db.execute("UPDATE archived_jobs SET body = x'00' WHERE job = '1'")
    with pytest.raises(ClusterError, match="archived job 1 does not match its checksum"):
        past.recall("ann", job="1")
    assert check_file(past.journal.path)[1] == ["archived job 1 does not match its checksum"]
    past.recall("ann", job="2")
    assert past.in_state == ["2"]


# --- commands ---------------------------------------------------------------------------------------------------------


def archived(cluster: RunningCluster) -> set[str]:
    with closing(sqlite3.connect(f"file:{cluster.directory}/journal.db?mode=ro", uri=True)) as db:
        return {job for (job,) in db.execute("SELECT job FROM archived_jobs")}


def test_every_command_finds_archived_jobs(cluster: RunningCluster, tmp_path: Path) -> None:
    settings = cluster.directory / "clusterd.toml"
    settings.write_text('[daemon]\narchive_jobs_after = "1s"\n')
    cluster.environment["CLUSTERD_CONFIG"] = str(settings)
    cluster.start(hosts=1)
    work = tmp_path / "work"
    work.mkdir()
    run = ("run", "-d", "--name")
    for name in ("one", "two", "three", "four", "five", "six"):
        cluster.run(*run, name, "--", "sh", "-c", f"echo {name} > result; echo said {name}", cwd=work)
    cluster.run(*run, "broken", "--", "false", cwd=work)
    file = tmp_path / "sweep.toml"
    file.write_text('name = "swept"\ncommand = ["true"]\n')
    cluster.run("submit", "--sweep", "LR=0.1,0.2", str(file))
    numbers = {str(number) for number in range(1, 10)}
    until(lambda: archived(cluster) == numbers)
    # Lists read the archive, and leave it as it is.
    assert cluster.call("status")["jobs"] == {"finished": 8, "failed": 1}
    assert cluster.run("ls").stdout == ""
    for options in (("--all",), ("--since", "1d")):
        listed = json.loads(cluster.run("ls", *options, "-o", "json").stdout)
        assert {row["id"] for row in listed} == numbers
    assert {row["id"] for row in cluster.call("tasks", array="swept")} == {"8", "9"}
    (array,) = cluster.call("arrays", all=True)
    assert (array["name"], array["tasks"], array["states"]) == ("swept", 2, {"finished": 2})
    (me,) = cluster.call("report", since_s=0.0)
    assert me["submitted"] == 9
    assert archived(cluster) == numbers
    cluster.kill()
    cluster.start(hosts=1)
    # Whoever names a job finds it, by id or name.
    assert "finished" in cluster.run("show", "one").stdout
    assert "said two" in cluster.run("logs", "2").stdout
    assert "finished" in cluster.run("why", "three").stdout
    assert cluster.run("wait", "broken", check=False).returncode == 1
    cluster.run("get", "four", "result", "--to", str(tmp_path))
    assert (tmp_path / "result").read_text() == "four\n"
    late = cluster.run(*run, "late", "--after", "five", "--", "true", cwd=work).stdout.strip()
    assert late == "10"
    until(lambda: late in archived(cluster))
    answer = cluster.run("run", "--after", "broken", "--", "true", check=False, cwd=work)
    assert "job 7 (broken) is failed: nothing can start after it" in answer.stderr
    assert "is a command: it saves nothing" in cluster.run("resume", "six", check=False).stderr
    assert "6 (six) is finished already" in cluster.run("cancel", "6", check=False).stderr
    assert "2 jobs forgotten" in cluster.run("forget", "8").stderr, "the id of a sweep is all of it"
    assert "said one" in cluster.run("logs", "one").stdout
    assert "there is no job 'seven'" in cluster.run("show", "seven", check=False).stderr
    assert archived(cluster) == {late}
    assert cluster.run("wait", late).returncode == 0
    assert check_file(cluster.directory / "journal.db")[1] == []
