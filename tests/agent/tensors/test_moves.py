"""Segments and messages of a migration in the agent, during the migration and after it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent.host.attempt_records import Attempt
from clusterd.agent.tensors.datasets import Datasets
from clusterd.agent.tensors.moves import Moves
from clusterd.protocol.control import (
    DeviceOpened,
    MakeSegment,
    PublishSegment,
    ReportDeviceOpened,
    SegmentMade,
    SegmentPublished,
)
from clusterd.protocol.messages import Event
from tests.agent.client import accepted

SIZE = 4 << 20

WRITER = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(file, int(sys.argv[2]))
mapped[0] = 7
print("writes", flush=True)
sys.stdin.readline()
mapped[:] = bytes([7]) * len(mapped)
"""
"""An old rank that fills its segment, and does so to the end."""


@pytest.fixture
def moves(tmp_path: Path) -> Iterator[Moves]:
    """Of an agent that no daemon listens to."""
    made = Moves(tmp_path, lambda *_: 0, lambda *_: None, lambda _: False, Datasets())
    yield made
    made.close()


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path / "j.1", accepted())


def segment(moves: Moves, attempt: Attempt, name: str, size: int = SIZE) -> Path:
    return Path(asyncio.run(moves.segment(attempt, MakeSegment(name, size))).path)


def publish(moves: Moves, attempt: Attempt, name: str, **more: Any) -> None:
    asyncio.run(moves.publish(attempt, PublishSegment(name, {"step": 1}, **more)))


@pytest.mark.parametrize(("move", "name"), [("j.1.2", "j.1.2.out0"), ("j.1.g1.snaps", "j.1.g1.snap0.0")])
def test_a_rank_that_still_writes_when_its_segment_is_dropped_harms_nobody(
    moves: Moves, attempt: Attempt, move: str, name: str
) -> None:
    """The abort reaches the rank later: it must not crash on an unmapped page, and its bytes must reach nobody else."""
    path = segment(moves, attempt, name)
    rank = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"writes\n"
    moves.drop(move)
    other = segment(moves, attempt, "other.1.3.out0", SIZE * 3 // 4)
    rank.communicate(b"go on\n", 20)
    assert rank.returncode == 0
    assert not any(other.read_bytes())


def test_a_snapshot_segment_is_not_used_again_between_two_snapshots(moves: Moves, attempt: Attempt) -> None:
    """The rank will write the segment again, whatever was published meanwhile."""
    inode = segment(moves, attempt, "j.1.g1.snap0.0").stat().st_ino
    publish(moves, attempt, "j.1.g1.snap0.0")
    moves.drop("j.1.g1.snaps")
    assert segment(moves, attempt, "other.1.3.out0").stat().st_ino != inode


@pytest.mark.parametrize(
    ("move", "name", "more"), [("j.1.2", "j.1.2.out0", {}), ("j.1.g1.snaps", "j.1.g1.snap0.0", {"wait": False})]
)
def test_released_segments_are_reused(
    moves: Moves, attempt: Attempt, move: str, name: str, more: dict[str, Any]
) -> None:
    """The next move finds its memory ready."""
    inode = segment(moves, attempt, name).stat().st_ino
    publish(moves, attempt, name, **more)
    moves.drop(move)
    assert segment(moves, attempt, "other.1.3.out0").stat().st_ino == inode


def test_an_attempt_that_is_over_leaves_nothing_of_its_moves(moves: Moves, attempt: Attempt) -> None:
    """A move that failed left its inbox in the new host's memory for as long as the agent lived."""
    left = [segment(moves, attempt, name) for name in ("j.1.2.in", "j.1.3.out0")]
    stored = [segment(moves, attempt, name) for name in ("j.1.g1.snap0.0", "j.11.2.in", "k.1.2.in")]
    moves.end("j", 1)
    assert [path.exists() for path in (*left, *stored)] == [False, False, True, True, True]


def test_ranks_learn_where_state_lies_on_their_device_and_who_has_opened_it(tmp_path: Path, attempt: Attempt) -> None:
    """A target rank that connects late asks for the descriptions published so far."""
    sent: list[Event] = []
    moves = Moves(tmp_path, lambda *_: 0, lambda *to_event: sent.append(to_event[-1]), lambda _: False, Datasets())
    path = segment(moves, attempt, "j.1.2.device1", 5)
    publish(moves, attempt, "j.1.2.device1")
    published = SegmentPublished("j.1.2", "j.1.2.device1", str(path), {"step": 1}, "device", 1)
    assert sent == [SegmentMade("j.1.2.device1", str(path), "j.1.2"), published]
    assert moves.segments("j.1.2").segments == (published,)
    moves.device_opened(attempt, ReportDeviceOpened("j.1.2", source=1, target=0, why_not="no handles"))
    assert sent[-1] == DeviceOpened("j.1.2", source=1, target=0, why_not="no handles")
    moves.close()
