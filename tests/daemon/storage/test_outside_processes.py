"""People whose processes hold a GPU outside the queue are told once, after a grace time."""

from __future__ import annotations

from typing import Any

from clusterd.daemon.hosts.facts import OutsideProcess
from clusterd.daemon.storage.usage import OutsideProcesses
from clusterd.types import DeviceId, HostId


def process(user: str, pid: int = 7, host: str = "gpu01") -> OutsideProcess:
    return OutsideProcess(HostId(host), DeviceId(f"{host}:gpu0"), pid, user, 12 << 30)


def test_hosts_have_grace_times_of_their_own() -> None:
    there = [process("ann", host=host) for host in ("gpu01", "gpu02", "gpu03", "gpu04")]
    told: list[dict[str, Any]] = []
    now_s = 0.0
    after_s = {"": 900.0, "gpu02": 60.0, "gpu03": 0.0, "gpu04": None}
    watch = OutsideProcesses(lambda: there, told.append, after_s, (), lambda: now_s)
    for at_s, hosts in ((0.0, []), (60.0, ["gpu02"]), (900.0, ["gpu01", "gpu04"]), (1e6, [])):
        now_s = at_s
        told.clear()
        watch.observe()
        assert [each["hosts"] for each in told] == [[host] for host in hosts]


def test_one_that_stays_is_told_of_once_and_one_that_goes_in_time_is_not() -> None:
    there: list[OutsideProcess] = []
    told: list[dict[str, Any]] = []
    now_s = 0.0
    watch = OutsideProcesses(lambda: there, told.append, {"": 900.0}, ("gdm",), lambda: now_s)

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
