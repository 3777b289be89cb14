"""People whose processes hold a GPU outside the queue are told once, after a grace time."""

from __future__ import annotations

from typing import Any

from clusterd.daemon.hosts.facts import OutsideProcess
from clusterd.daemon.storage.usage import OutsideProcesses
from clusterd.types import DeviceId, HostId


def process(user: str, pid: int = 7) -> OutsideProcess:
    return OutsideProcess(HostId("gpu01"), DeviceId("gpu01:gpu0"), pid, user, 12 << 30)


def test_one_that_stays_is_told_of_once_and_one_that_goes_in_time_is_not() -> None:
    there: list[OutsideProcess] = []
    told: list[dict[str, Any]] = []
    now_s = 0.0
    watch = OutsideProcesses(lambda: there, told.append, 900.0, ("gdm",), lambda: now_s)

    def minutes(count: int) -> list[str]:
        nonlocal now_s
        told.clear()
        for _ in range(count):
            now_s += 60.0
            watch.observe()
        return [each["user"] for each in told]

    there[:] = [process("ann"), process("gdm", 8)]
    assert minutes(15) == []
    assert minutes(60) == ["ann"]
    there[:] = []
    assert minutes(5) == []
    there[:] = [process("bob", 7)]
    assert minutes(10) == []
    there[:] = [process("bob", 9)]  # another process, another time
    assert minutes(10) == []
    assert minutes(10) == ["bob"]
    assert told[0]["kind"] == "outside the queue" and told[0]["pid"] == 9
    expected = "bob holds 12.0 GiB of gpu01:gpu0 outside the queue for 15m00s (pid 9): clusterd run --gpus 1 -- COMMAND"
    assert told[0]["text"].startswith(expected)
