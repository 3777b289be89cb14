"""Journals that end in the middle: a killed writer, a log that was cut off, a file that lost its end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from clusterd.errors import ClusterError
from tests.daemon.journal.test_journal import engine_of, post, submitted

WRITER = """
import sys, anyio
from pathlib import Path
from clusterd.daemon.journal.journal import Journal
from tests.daemon.journal.test_journal import engine_of, post, submitted

async def write(engine):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        number = 0
        while True:
            number += 1
            await engine.post(submitted(number))
            print(number, flush=True)

anyio.run(write, engine_of(Journal(Path(sys.argv[1])))[0])
"""


def restored(path: Path) -> Engine:
    """An engine on a journal, as the next daemon has it."""
    journal = Journal(path)
    try:
        engine, _ = engine_of(journal)
        engine.restore()
    finally:
        journal.close()
    return engine


async def one_by_one(engine: Engine, count: int) -> None:
    """Each in a commit of its own."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        for number in range(1, count + 1):
            await engine.post(submitted(number))
        tasks.cancel_scope.cancel()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("acknowledged", [1, 20, 133])
def test_a_writer_that_is_killed_has_written_all_that_it_acknowledged(tmp_path: Path, acknowledged: int) -> None:
    """SIGKILL arrives at whatever instant the writer has reached after so many answers."""
    path = tmp_path / "journal.db"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(acknowledged):
            writer.stdout.readline()
        writer.kill()
        heard = acknowledged + len([line for line in writer.stdout if line.endswith(b"\n")])
    jobs = restored(path).scheduler.state.jobs
    assert [int(job) for job in jobs] == list(range(1, len(jobs) + 1))
    assert len(jobs) in (heard, heard + 1)  # one may be written and not answered


def test_a_log_that_is_cut_off_anywhere_leaves_the_events_before(tmp_path: Path) -> None:
    """A power failure on a disk that had not written the end of SQLite's write-ahead log."""
    path = tmp_path / "journal.db"
    journal = Journal(path)
    engine, _ = engine_of(journal)
    anyio.run(one_by_one, engine, 12)
    whole = path.with_name("journal.db-wal").read_bytes()
    copy = tmp_path / "copy.db"
    found = []
    for end in range(0, len(whole) + 1, max(len(whole) // 40, 1)):
        shutil.copy(path, copy)
        copy.with_name("copy.db-shm").unlink(missing_ok=True)
        copy.with_name("copy.db-wal").write_bytes(whole[:end])
        state = restored(copy).scheduler.state
        assert [int(job) for job in state.jobs] == list(range(1, len(state.jobs) + 1))
        found.append(len(state.jobs))
    journal.close()
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] >= 11


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_file_that_lost_its_end_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "journal.db"
    journal = Journal(path)
    engine, _ = engine_of(journal)
    anyio.run(post, engine, *[submitted(n) for n in range(1, 300)])
    journal.close()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ClusterError, match=r"journal\.db (is damaged|cannot be used as the journal)"):
        restored(path)
