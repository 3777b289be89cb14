"""Reports of an agent on its GPUs: to daemons when they change, and to a rank after an error that may be the GPU's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterd.agent.host.home import Home
from clusterd.agent.server.connection import Sessions
from clusterd.agent.server.hardware_reports import reportable
from clusterd.protocol.agent import FactsChanged
from clusterd.train.process import context as contexts
from clusterd.train.process import device_faults, exits
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control
from tests.agent.client import AgentClient, rank
from tests.agent.host.fake_nvml import fake_driver, needs_gcc, set_state
from tests.conftest import until

pytestmark = needs_gcc

LAUNCH = RuntimeError("CUDA error: unspecified launch failure")
MEMORY = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

Judge = Callable[[Exception], exits.TrainError | None]


@pytest.fixture
def judge(connect: Callable[..., AgentClient], tmp_path: Path) -> Iterator[Judge]:
    """Judge an error of a rank on the first GPU of the stand-in's."""
    fake_driver(tmp_path, "libnvidia-ml.so.1", used_gib=0)
    set_state(tmp_path, used0=0)
    agent = connect(env={"LD_LIBRARY_PATH": str(tmp_path)})
    device = {"kind": "cuda", "uuid": "GPU-1", "cores": [], "threads": 1}
    agent.launch(["sleep", "1000"], kind="elastic", ranks=[rank(device=device, plan={"dp": 1})])
    context: Context = contexts.read(
        {**os.environ, "CLUSTERD_RANK_FILE": str(Home(agent.root).attempt("j", 1) / "rank-0.json")}
    )
    control = Control(context)
    control.start()
    yield lambda error: device_faults.judge(error, exits.classify_error(error, where=""), context, control)
    control.close()


def test_a_launch_failure_is_the_scripts_unless_the_driver_knows_better(judge: Judge, tmp_path: Path) -> None:
    assert judge(LAUNCH) is None
    set_state(tmp_path, used0=0, ecc0=1)
    found = judge(LAUNCH)
    assert isinstance(found, exits.DeviceFault)
    assert str(found).startswith("the GPU failed (1 uncorrectable ECC error), rank 0 of 1 (dp=1): CUDA error")
    assert judge(ValueError("the script's own")) is None  # nothing is asked
    set_state(tmp_path, used0=0, lost0=1)
    for error in (LAUNCH, exits.NoTorch("torch cannot use it")):
        assert "GPU 0: the NVIDIA driver reports: Unknown Error" in str(judge(error))


def test_memory_that_others_hold_does_not_count_against_the_plan(judge: Judge, tmp_path: Path) -> None:
    assert isinstance(judge(MEMORY), exits.DeviceOutOfMemory)
    set_state(tmp_path)  # a process of another user holds 1 GiB
    found = judge(MEMORY)
    assert isinstance(found, exits.DeviceFault)
    assert "processes outside the queue hold 1.0 GiB of the GPU's memory" in str(found)
    assert judge(LAUNCH) is None  # which explains no launch failure


def test_a_process_that_takes_a_gpu_before_the_first_sample_is_reported(
    connect: Callable[..., AgentClient], tmp_path: Path
) -> None:
    fake_driver(tmp_path, "libnvidia-ml.so.1", used_gib=1)
    set_state(tmp_path, used0=0)
    agent = connect(hello=False, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert agent.hello()["facts"]["gpus"][0]["processes"] == []
    set_state(tmp_path)  # at once: the sample comes seconds later
    assert [process["pid"] for process in agent.event("facts")["facts"]["gpus"][0]["processes"]] == [1, 7]


class Daemon:
    """A leading daemon's connection."""

    def __init__(self, *, reads: bool = True) -> None:
        self.daemon, self.facts, self.reads = ("test", 1), None, reads
        self.received: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> bool:
        if self.reads:
            self.received.append(message)
        return self.reads


def test_facts_go_to_each_daemon_that_was_last_sent_others(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "epochs.json", tmp_path / "events.json")
    daemons = Daemon(), Daemon(reads=False)
    sessions._connections = dict.fromkeys(daemons)  # type: ignore[arg-type]
    for use in ("idle", "used", "used"):
        sessions.send_facts(FactsChanged({"gpus": use}), use)
    daemons[1].reads = True
    sessions.send_facts(FactsChanged({"gpus": "used"}), "used")
    assert [[sent["facts"]["gpus"] for sent in daemon.received] for daemon in daemons] == [["idle", "used"], ["used"]]


def test_a_rank_that_begins_to_use_a_gpu_is_a_change_and_its_growing_memory_is_none() -> None:
    def seen(*processes: dict[str, Any]) -> object:
        gpu = {"uuid": "GPU-1", "unlisted_bytes": 0, "processes": list(processes)}
        return reportable({"gpus": [gpu], "gpu_error": None, "cpu_ids": [0]})

    own = {"pid": 7, "memory_bytes": 1 << 30, "ours": True}
    assert seen() != seen(own) == seen({**own, "memory_bytes": 8 << 30}) != seen({**own, "ours": False})


def test_a_sample_has_the_memory_that_each_job_holds_on_each_gpu(
    connect: Callable[..., AgentClient], tmp_path: Path
) -> None:
    fake_driver(tmp_path, "libnvidia-ml.so.1", used_gib=0)
    set_state(tmp_path, used0=0)
    agent = connect(env={"LD_LIBRARY_PATH": str(tmp_path)})
    device = {"kind": "cuda", "uuid": "GPU-1", "cores": [], "threads": 1}
    file = tmp_path / "pid"
    agent.launch(["sh", "-c", f"echo $$ > {file}; exec sleep 1000"], kind="command", ranks=[rank(device=device)])
    until(lambda: file.exists() and bool(file.read_text().strip()))
    set_state(tmp_path, pid0=int(file.read_text()), gib0=50)
    until(lambda: [use.get("device_memory") for use in agent.event("usage")["attempts"]] == [{"GPU-1": 50 << 30}])
