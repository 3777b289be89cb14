"""Acknowledged events survive any end of the daemon, and an untrustworthy journal is refused."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from click.testing import CliRunner

from clusterd.cli.history import journal as journal_command
from clusterd.core import events as e
from clusterd.core.scheduler import Scheduler
from clusterd.core.view import Proposal, Refusal, View
from clusterd.daemon.journal import checksums
from clusterd.daemon.journal import journal as module
from clusterd.daemon.journal.check import check_file
from clusterd.daemon.journal.checksums import FORMAT
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.errors import ClusterError
from clusterd.replay import journal_batches
from clusterd.types import HostId, JobId, JobSpec
from tests.conftest import RunningCluster
from tests.core.conftest import facts
from tests.hang import HANG_S

SPEC = JobSpec(name="job", command=("true",))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal.db")
    yield made
    made.close()


def engine_of(journal: Journal) -> tuple[Engine, list[e.Event]]:
    handled: list[e.Event] = []
    engine = Engine(journal, Scheduler())
    engine.subscribe(lambda events, _: handled.extend(events))
    return engine, handled


async def post(engine: Engine, *events: e.Event) -> None:
    """All at once, as a burst of clients would."""
    async with anyio.create_task_group() as outer:
        outer.start_soon(engine.run)
        async with anyio.create_task_group() as group:
            for event in events:
                group.start_soon(engine.post, event)
        outer.cancel_scope.cancel()


def submitted(number: int) -> e.JobSubmitted:
    return e.JobSubmitted(at_s=float(number), job=JobId(str(number)), spec=SPEC)


def test_a_second_daemon_finds_what_the_first_one_took(tmp_path: Path) -> None:
    """Killed right after the answer: same state, same ids, in batches as they came."""
    first = Journal(tmp_path / "journal.db")
    engine, _ = engine_of(first)
    anyio.run(post, engine, *[submitted(n) for n in range(1, 50)])
    second = Journal(tmp_path / "journal.db")
    again, _ = engine_of(second)
    assert again.restore() == 49
    assert again.scheduler.state == engine.scheduler.state
    assert second.last_event_id() == 49
    first.close()
    second.close()


def test_a_snapshot_shortens_the_replay_and_changes_nothing(journal: Journal) -> None:
    """The state goes through its bytes and is equal."""
    engine, _ = engine_of(journal)

    async def run() -> None:
        await post(engine, *[submitted(n) for n in range(1, 20)])
        await engine.snapshot()
        await post(engine, submitted(20), e.HostAdded(at_s=21.0, host=HostId("a")))

    anyio.run(run)
    again, _ = engine_of(journal)
    assert again.restore() == 2
    assert again.scheduler.state == engine.scheduler.state


class Contrary:
    """Another policy, or the same of another version: it wants nothing that was done."""

    name = "contrary"
    interval_s = None

    def propose(self, view: View) -> Proposal:
        return Proposal(refusals=[Refusal(job.id, "not today") for job in view.queued])


def lab_of_events() -> list[e.Event]:
    host = HostId("a")
    return [
        e.HostAdded(at_s=0.0, host=host),
        e.HostConnected(at_s=1.0, host=host, facts=facts("a", gpus=1), attempts=()),
        submitted(2),
        submitted(3),
        e.AttemptLaunched(at_s=4.0, job=JobId("2"), attempt=1, generation=1),
    ]


@pytest.mark.parametrize(("share", "is_written"), [(0.0, True), (1e9, False)])
def test_a_snapshot_is_written_when_the_replay_would_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, is_written: bool
) -> None:
    """A snapshot of a large state costs more than the replay of a few thousand events."""
    monkeypatch.setattr("clusterd.daemon.journal.engine.SNAPSHOT_EVERY", 5)
    monkeypatch.setattr("clusterd.daemon.journal.engine.SNAPSHOT_SHARE", share)
    monkeypatch.setattr("clusterd.daemon.journal.engine.REPLAY_S", 1e9)
    path = tmp_path / "journal.db"
    journal = Journal(path)
    engine, _ = engine_of(journal)

    async def run() -> None:
        for number in range(1, 21):
            await post(engine, submitted(number))

    engine._encoding_s = 1.0
    anyio.run(run)
    journal.close()
    again = Journal(path)
    replayed = engine_of(again)[0].restore()
    assert replayed <= 10 if is_written else replayed == 20
    again.close()


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_replay_keeps_decisions_that_the_next_policy_would_not_take(journal: Journal, snapshot: bool) -> None:
    """Killed, and started again with another policy or version: jobs run where they run."""
    engine, _ = engine_of(journal)

    async def run() -> None:
        for number, event in enumerate(lab_of_events()):
            await post(engine, event)
            if snapshot and number == 1:
                await engine.snapshot()

    anyio.run(run)
    running = engine.scheduler.state.jobs[JobId("2")]
    assert running.attempt is not None
    for _ in range(2):
        again = Engine(journal, Scheduler(Contrary()))
        again.restore()
        assert again.scheduler.state == engine.scheduler.state


def test_the_last_batch_without_a_proposal_asks_the_policy_once(journal: Journal) -> None:
    """The daemon died between the event's commit and the next one."""
    engine, _ = engine_of(journal)

    async def lose_the_last() -> None:
        for event in lab_of_events()[:3]:
            await post(engine, event)
        await journal.execute([("DELETE FROM proposals WHERE batch = 3", ())])

    anyio.run(lose_the_last)
    second, _ = engine_of(journal)
    second.restore()
    assert second.scheduler.state == engine.scheduler.state
    anyio.run(post, second, submitted(4))
    third = Engine(journal, Scheduler(Contrary()))
    third.restore()
    assert third.scheduler.state == second.scheduler.state


def test_a_journal_of_a_development_version_is_refused_whole(tmp_path: Path) -> None:
    """Its events cannot be read: the message says what to do, and the file is not changed."""
    path = tmp_path / "journal.db"
    first = Journal(path)
    engine, _ = engine_of(first)
    anyio.run(post, engine, *[submitted(n) for n in range(1, 5)])
    first.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=2")
    db.close()
    with pytest.raises(ClusterError, match=r"development version .*move the state directory away"):
        Journal(path)
    with pytest.raises(ClusterError, match="is of format 2"):
        list(journal_batches(path))
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM events").fetchone() == (4,)
    db.close()


def test_a_full_disk_refuses_the_submit_and_goes_on(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it happened; the next one, with room again, is taken."""
    engine, handled = engine_of(journal)
    real = journal.append

    async def full(*_: object) -> None:
        raise ClusterError("the journal cannot be written: disk full")

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(engine.run)
            monkeypatch.setattr(journal, "append", full)
            with pytest.raises(ClusterError, match="disk full"):
                await engine.post(submitted(1))
            monkeypatch.setattr(journal, "append", real)
            await engine.post(submitted(2))
            group.cancel_scope.cancel()

    anyio.run(run)
    assert [event.job for event in handled if isinstance(event, e.JobSubmitted)] == ["2"]
    assert list(engine.scheduler.state.jobs) == ["2"]


@pytest.mark.parametrize("removed", ["the file", "all of its files", "its directory"])
def test_a_journal_that_is_removed_under_the_daemon_is_put_back(tmp_path: Path, removed: str) -> None:
    """By a cleaner of temporary files, or a slip: what was accepted is in the daemon's hands still."""
    directory = tmp_path / "state"
    first = Journal(directory / "journal.db")
    engine, _ = engine_of(first)
    anyio.run(post, engine, *[submitted(n) for n in range(1, 50)])
    if removed == "its directory":
        shutil.rmtree(directory)
    else:
        for file in directory.glob("journal.db" if removed == "the file" else "*"):
            file.unlink()
    for number in (50, 51):
        engine, _ = engine_of(first)
        engine.restore()
        anyio.run(post, engine, submitted(number))
    second = Journal(directory / "journal.db")
    again, _ = engine_of(second)
    assert again.restore() == 51
    assert again.scheduler.state == engine.scheduler.state
    first.close()
    second.close()


def test_a_journal_that_another_one_replaced_is_not_written_over(tmp_path: Path) -> None:
    """A copy of yesterday was put back, and the daemon not restarted."""
    first = Journal(tmp_path / "journal.db")
    engine, _ = engine_of(first)
    Journal(tmp_path / "other.db").close()
    (tmp_path / "other.db").replace(tmp_path / "journal.db")
    with pytest.raises(BaseExceptionGroup) as refused:
        anyio.run(post, engine, submitted(1))
    assert refused.group_contains(ClusterError, match="was replaced while the daemon runs: put the old file back")
    first.close()


def test_a_journal_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    """Going back to an older clusterd."""
    path = tmp_path / "journal.db"
    Journal(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version={FORMAT + 1}")
    db.close()
    with pytest.raises(ClusterError, match="was written by a newer clusterd"):
        Journal(path)


def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    """Overwritten by something else."""
    path = tmp_path / "journal.db"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(ClusterError, match="cannot be used as the journal"):
        Journal(path)


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home on NFS: SQLite's locks do not hold there."""
    monkeypatch.setattr(module, "_file_system", lambda _: ("nfs4", "/home"))
    with pytest.raises(ClusterError, match=r"network file system \(nfs4 at /home\).*CLUSTERD_STATE_DIR"):
        Journal(tmp_path / "journal.db")


def test_a_journal_that_is_damaged_or_of_another_program(tmp_path: Path) -> None:
    """Cut off in the middle, holding an event that nobody knows, or some browser's: one line each, no traceback."""
    cut, unknown_attempts_notice, foreign = (tmp_path / name / "journal.db" for name in ("cut", "strange", "foreign"))
    for path in (cut, unknown_attempts_notice):
        made = Journal(path)
        engine, _ = engine_of(made)
        anyio.run(post, engine, *[submitted(n) for n in range(1, 300)])
        made.close()
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size // 2)
    with sqlite3.connect(unknown_attempts_notice) as db:
        (before,) = db.execute("SELECT checksum FROM events WHERE id = 298").fetchone()
        row = db.execute("SELECT id, batch, at_s, 'Teleported', body FROM events WHERE id = 299").fetchone()
        db.execute(
            "UPDATE events SET kind = 'Teleported', checksum = ? WHERE id = 299", (checksums.of_event(before, *row),)
        )
    db.close()
    foreign.parent.mkdir()
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE cookies (name TEXT)")
    db.close()
    with pytest.raises(ClusterError, match=r"cannot be used as the journal|is damaged"):
        engine_of(Journal(cut))[0].restore()
    opened = Journal(unknown_attempts_notice)
    with pytest.raises(ClusterError, match=r"has events that this version does not know.*Teleported"):
        engine_of(opened)[0].restore()
    opened.close()
    with pytest.raises(ClusterError, match="a database of another program"):
        Journal(foreign)


@pytest.mark.slow
def test_a_host_that_returns_does_not_record_ended_attempts_again(local_cluster: RunningCluster) -> None:
    """A thousand finished jobs made a long event of every start of the daemon."""
    job = local_cluster.run("run", "-d", "--no-snapshot", "--", "true").stdout.strip()
    local_cluster.wait_for(job, lambda row: row["state"] == "finished")
    runs = local_cluster.run("run", "-d", "--no-snapshot", "--", "sleep", "600").stdout.strip()
    local_cluster.wait_for(runs, lambda row: row["state"] == "running")
    local_cluster.kill()
    local_cluster.start()
    local_cluster.wait_until_up(2)
    events = local_cluster.call("history")["events"]
    newest = {event["host"]: event for event in events if event["kind"] == "HostConnected"}
    assert [report["job"] for event in newest.values() for report in event["attempts"]] == [runs]
    local_cluster.run("cancel", "--wait", runs)


def test_a_changed_event_is_refused_by_name(tmp_path: Path) -> None:
    """A flipped bit that the database itself does not see: it was replayed as if it had happened."""
    path = tmp_path / "journal.db"
    first = Journal(path)
    engine, _ = engine_of(first)
    anyio.run(post, engine, *[submitted(n) for n in range(1, 10)])
    first.close()
    assert check_file(path) == (9, [])
    assert "9 events: sound" in CliRunner().invoke(journal_command, ["check", str(tmp_path)]).output
    with sqlite3.connect(path) as db:
        (body,) = db.execute("SELECT body FROM events WHERE id = 7").fetchone()
        at = body.index(b"true")
        db.execute("UPDATE events SET body = ? WHERE id = 7", (body[:at] + b"tsue" + body[at + 4 :],))
    db.close()
    opened = Journal(path)
    with pytest.raises(ClusterError, match=r"is damaged: event 7 \(JobSubmitted\) .*clusterd start --restored"):
        engine_of(opened)[0].restore()
    opened.close()
    with pytest.raises(ClusterError, match=r"is damaged: event 7"):
        list(journal_batches(path))
    assert check_file(path) == (6, ["event 7 (JobSubmitted) does not match its checksum"])
    said = CliRunner().invoke(journal_command, ["check", str(path)])
    assert isinstance(said.exception, ClusterError)
    assert "6 events before the damage are sound\nevent 7 (JobSubmitted)" in str(said.exception)


def test_a_removed_event_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    first = Journal(path)
    engine, _ = engine_of(first)
    anyio.run(post, engine, *[submitted(n) for n in range(1, 10)])
    first.close()
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM events WHERE id = 4")
    db.close()
    opened = Journal(path)
    with pytest.raises(ClusterError, match="is damaged: event 5"):
        engine_of(opened)[0].restore()
    opened.close()


def test_a_damaged_journal_snapshot_costs_only_a_longer_replay(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    first = Journal(path)
    engine, _ = engine_of(first)

    async def run() -> None:
        await post(engine, *[submitted(n) for n in range(1, 10)])
        await engine.snapshot()

    anyio.run(run)
    first.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE snapshots SET body = CAST(substr(body, 1, length(body) - 1) || x'01' AS BLOB)")
    db.close()
    opened = Journal(path)
    again = engine_of(opened)[0]
    assert again.restore() == 9
    assert again.scheduler.state == engine.scheduler.state
    opened.close()
    assert check_file(path)[1] == ["the journal snapshot at event 9 does not match its checksum"]


def test_bytes_flipped_anywhere_in_the_file_are_refused_or_do_no_harm(tmp_path: Path) -> None:
    """A failing disk: the daemon either refuses the file, or has exactly the state from before."""
    path = tmp_path / "journal.db"
    first = Journal(path)
    engine, _ = engine_of(first)
    anyio.run(post, engine, *[submitted(n) for n in range(1, 300)])
    first.close()
    sound = path.read_bytes()
    for at in range(2048, len(sound) - 600, len(sound) // 40):
        path.write_bytes(sound[:at] + bytes(byte ^ 0x15 for byte in sound[at : at + 600]) + sound[at + 600 :])
        try:
            damaged = Journal(path)
        except ClusterError:
            continue
        again = engine_of(damaged)[0]
        try:
            again.restore()
        except ClusterError:
            continue
        finally:
            damaged.close()
        assert again.scheduler.state == engine.scheduler.state


def test_requests_that_are_read_one_after_the_other_are_one_batch(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client pipelines its submits: each is read in another turn of the event loop."""
    monkeypatch.setattr("clusterd.daemon.journal.engine.GATHER_S", HANG_S)
    batches: list[int] = []
    engine = Engine(journal, Scheduler())
    engine.subscribe(lambda events, _: batches.append(len(events)))

    async def read() -> None:
        async with anyio.create_task_group() as outer:
            outer.start_soon(engine.run)
            async with anyio.create_task_group() as group:
                for number in range(1, 101):
                    group.start_soon(engine.post, submitted(number))
                    await anyio.lowlevel.checkpoint()
            outer.cancel_scope.cancel()

    anyio.run(read)
    assert batches == [100]
