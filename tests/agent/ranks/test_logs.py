"""Logs of ranks that print without end stay within their limit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from clusterd.agent.host import files
from clusterd.agent.host.attempt_records import Attempt, Rank
from clusterd.agent.server import server
from clusterd.protocol.requests import Chunk
from tests.agent.client import accepted

MIB = 1 << 20


@pytest.fixture
def long_log(tmp_path: Path) -> Path:
    """16 MiB of numbered lines."""
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"".join(b"%015d\n" % number for number in range(MIB)))
    return path


def test_the_old_part_of_a_long_log_gives_its_disk_back(long_log: Path) -> None:
    with long_log.open("ab") as writer:  # as the rank has it open, which goes on as if nothing were
        assert files.trim(long_log, 32 * MIB) == 0
        (link := long_log.with_name("link")).symlink_to(long_log)
        assert files.trim(link, 4 * MIB) == 0, "a file that the job names is left whole"
        dropped = files.trim(long_log, 4 * MIB)
        if not dropped:
            pytest.skip("this file system knows no holes in files")
        assert dropped == 14 * MIB
        assert long_log.stat().st_size == 16 * MIB and long_log.stat().st_blocks * 512 <= 3 * MIB
        assert files.trim(long_log, 4 * MIB) == 0, "once is enough"
        writer.write(b"the end\n")
    end = files.pull(long_log, 16 * MIB, 100, True)
    assert end == Chunk(b"the end\n", offset=16 * MIB + 8, size=16 * MIB + 8, done=True)


def test_a_reader_of_dropped_output_is_told_and_continues_after_it(long_log: Path) -> None:
    if not files.trim(long_log, 4 * MIB):
        pytest.skip("this file system knows no holes in files")
    first = files.pull(long_log, 0, 32, False)
    message, _, rest = first.data.partition(b"]\n")
    assert b"14680064 bytes of this log were dropped" in message
    assert rest == b"%015d\n%015d\n" % (14 * MIB // 16, 14 * MIB // 16 + 1)
    assert first.offset == 14 * MIB + 32
    assert files.pull(long_log, first.offset, 16, False).data == b"%015d\n" % (14 * MIB // 16 + 2)


def test_a_log_is_shortened_once_more_when_its_rank_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: output since the last check, possibly gigabytes, stayed on the disk."""
    looked: list[Path] = []
    monkeypatch.setattr(server.files, "trim", lambda file: looked.append(file) or 0)
    attempt = Attempt(tmp_path, accepted(), ranks={0: Rank(0, state="running")})
    some: Any = Mock()
    work = server.Housekeeping(cast(Any, [attempt]), some, some, some, some, some, some)
    asyncio.run(work.shorten_logs())
    attempt.ranks[0].state = "exited"
    for _ in range(3):
        asyncio.run(work.shorten_logs())
    assert looked == [attempt.log(0)] * 2
