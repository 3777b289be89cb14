"""A made-up cluster: rows as the daemon sends them, and a source that serves them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clusterd.errors import ClusterError
from clusterd.tui.app import Top
from clusterd.tui.model.view import Link, LinkState

if TYPE_CHECKING:
    from clusterd.submission.job_file import Request

NOW_S = 1_760_000_000.0
"""9 October 2025, 08:53:20 UTC."""

LIVE = Link(LinkState.LIVE, since_s=NOW_S - 60, user="ann", is_operator=True, version="0.1.0")
LOST = Link(
    LinkState.LOST,
    why="no daemon answers at /run/user/1000/clusterd/clusterd.sock (Connection refused): clusterd start",
    since_s=NOW_S - 42,
)
REFUSED = Link(
    LinkState.REFUSED,
    why="the daemon (0.9.0) speaks protocol 2, this client 1: use the clusterd command of the daemon's version",
    since_s=NOW_S - 3,
)


def job(number: int, name: str, state: str, **more: Any) -> dict[str, Any]:
    """A job's row."""
    return {
        "id": str(number), "name": name, "kind": "elastic", "state": state, "reason": "", "priority": 0, "user": "ann",
        "asked": 2, "submitted_s": NOW_S - 3600 + number, "attempt": 0, "devices": [], "hosts": [], **more,
    }  # fmt: skip


def host(name: str, state: str = "up", devices: int = 2, **more: Any) -> dict[str, Any]:
    """A host's row, with GPUs."""
    gpus = [
        {"id": f"{name}:gpu{n}", "kind": "cuda", "name": "RTX 3090", "memory_bytes": 24 << 30} for n in range(devices)
    ]
    return {
        "name": name, "state": state, "since_s": NOW_S - 7200, "address": "10.0.0.7", "cpu_cores": 32, "cores_used": 8,
        "memory_bytes": 128 << 30, "memory_used_bytes": 16 << 30, "devices": gpus, **more,
    }  # fmt: skip


def _spec(name: str, devices: int, *arguments: str) -> dict[str, Any]:
    """Job specification with many fields at their defaults."""
    plan = {"dp": devices, "tp": 1, "pp": 1, "zero": 1, "offload": "none", "shares": []}
    return {
        "name": name, "kind": "elastic", "command": ["python", "train.py", *arguments], "env": {}, "guaranteed": False,
        "resources": {"devices": devices, "kind": "cuda", "cpus": 4, "plan": plan}, "secrets": [], "time_limit_s": None,
    }  # fmt: skip


MOVE = {
    "number": 1, "from": "dp=4", "to": "dp=2,tp=2", "devices": ["gpu01:gpu0", "gpu01:gpu1"],
    "reason": "asked for by ann", "started_s": NOW_S - 900, "ended_s": NOW_S - 899, "step": 1200,
    "network_bytes": 3 << 20, "local_bytes": 120 << 20, "downtime_s": 0.212, "failure": "",
    "phases": [
        {"phase": "prepare", "seconds": 0.8, "what": "4 ranks ready; training goes on"},
        {"phase": "quiesce", "seconds": 0.05, "what": "training goes on to step 1200"},
        {"phase": "transfer", "seconds": 0.1, "what": "3 MiB over the network"},
        {"phase": "verify", "seconds": 0.02, "what": "step 1200 on 4 ranks"},
        {"phase": "resume", "seconds": 0.04, "what": ""},
    ],
}  # fmt: skip


def snapshot() -> dict[str, Any]:
    """Three hosts and six jobs in every state that matters."""
    hosts = [
        host("gpu01", devices=4),
        host("gpu02", drained="ann: new fan"),
        host("gpu03", state="unreachable", why="ssh: connection timed out"),
    ]
    for number in range(4):
        hosts[0]["devices"][number] |= {"job": "1", "job_name": "gpt-large"}
    hosts[1]["devices"][0]["foreign"] = "in use by bob (pid 4711)"
    hosts[0]["link"] = {"facts": {"gpus": [{"index": n, "utilisation": 0.9 + n / 100} for n in range(4)]}}
    jobs = [
        job(
            1, "gpt-large", "running", plan="dp=2,tp=2", devices=[f"gpu01:gpu{n}" for n in range(4)], hosts=["gpu01"],
            holds_devices=True, step=1500, steps=9000, first_loss=10.8, loss=3.21, step_time_s=0.42, attempt=2,
            predicted_step_time_s=0.40, started_s=NOW_S - 1800, asked=4, migrations=[MOVE], priority=10,
            next={"plan": "dp=4,zero=1", "devices": 4, "gain": 0.12, "move_cost_s": 0.3},
            reason="dp=2,tp=2: asked for by ann",
        ),
        job(2, "bert-tune", "queued", asked=4, steps=500,
            reason="waits for 4 free devices (with their cores and memory)"),
        job(3, "preprocess", "finished", kind="command", asked=0, attempt=1, exit_code=0, reason="finished",
            started_s=NOW_S - 3000, ended_s=NOW_S - 2500),
        job(4, "vit-broken", "failed", attempt=1, exit_code=1, reason="rank 0: exit code 1 (ValueError: no such file)",
            started_s=NOW_S - 2000, ended_s=NOW_S - 1990, user="bob"),
        job(5, "sweep-17", "queued", asked=1, priority=-5, reason="behind bert-tune", user="bob"),
        job(6, "old", "cancelled", attempt=1, reason="cancelled by ann", started_s=NOW_S - 3500, ended_s=NOW_S - 3400),
    ]  # fmt: skip
    return {
        "status": {"started_s": NOW_S - 86400},
        "jobs": jobs,
        "hosts": hosts,
        "order": {"2": [None, None], "5": ["2", "priority"]},
    }


def items() -> list[Any]:
    """Items that `watch` sends: the baseline, then one change."""
    change = {
        "number": 8,
        "at_s": NOW_S - 5,
        "events": [
            {
                "kind": "HostDisconnected",
                "id": 7,
                "at_s": NOW_S - 6,
                "host": "gpu03",
                "why": "ssh: connection timed out",
            },
            {
                "kind": "JobSubmitted",
                "id": 8,
                "at_s": NOW_S - 5,
                "job": "5",
                "spec": _spec("sweep-17", 1, "--lr", "3e-4"),
            },
        ],
        "decisions": [
            {"kind": "HoldJob", "cause": 8, "job": "5", "reason": "behind bert-tune, which waits for 4 devices"},
            {"kind": "SetTimer", "cause": 7, "reason": "gpu03 is given up when it stays away for 2 minutes"},
        ],
        "jobs": [],
        "hosts": [],
        "gone": [],
    }
    return [LIVE, {"snapshot": snapshot(), "number": 6}, change]


HISTORY = {
    "events": [
        {"kind": "JobSubmitted", "id": 1, "at_s": NOW_S - 3600, "job": "1", "spec": _spec("gpt-large", 4)},
        {"kind": "AttemptLaunched", "id": 2, "at_s": NOW_S - 1800, "job": "1", "attempt": 2, "generation": 3},
    ],
    "decisions": [
        {
            "kind": "LaunchAttempt",
            "cause": 1,
            "at_s": NOW_S - 1800,
            "job": "1",
            "reason": "4 devices are free on gpu01",
        },
        {"kind": "StartMigration", "cause": 2, "at_s": NOW_S - 900, "job": "1", "reason": "asked for by ann"},
    ],
}

DETAIL = {
    "id": "1", "name": "gpt-large", "state": "running",
    "attempts": [
        {"number": 1, "state": "ended", "plan": "dp=4", "started_s": NOW_S - 3500, "ended_s": NOW_S - 3000,
         "why": "gpu02 was lost", "ranks": [{"rank": 0, "end": "vanished without an exit record"}]},
        {"number": 2, "state": "running", "plan": "dp=2,tp=2", "started_s": NOW_S - 1800, "ranks": []},
    ],
}  # fmt: skip

PROFILE = {
    "model": "gpt",
    "trials": [{"plan": "dp=4", "devices": 4, "step_time_s": 0.47, "predicted_s": 0.45, "at_s": NOW_S - 1700}],
    "curve": [{"devices": n, "plan": f"dp={n}", "samples_per_s": 40.0 * n**0.9} for n in (1, 2, 4, 8)],
}

STEPS = b"".join(
    json.dumps({"step": n, "loss": 3 + 8 / (1 + n / 60), "time_s": 0.42 + (n % 7) / 100}).encode() + b"\n"
    for n in range(1, 1501, 10)
)


class Staged:
    """A source that tells what it was given, and answers from a table."""

    can_act = True
    player = None
    environment: Mapping[str, str] = {}

    def __init__(self, feed: Sequence[Any], log: bytes = b"step 1  loss 10.8\nstep 2  loss 9.9\n") -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self._published = list(feed)
        self._log = log
        self.log_begin = 0
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.rejected = ""
        self.answers: dict[str, Any] = {
            "history": HISTORY,
            "job": DETAIL,
            "steps": {"data": STEPS},
            "profile": PROFILE,
        }

    async def items(self) -> AsyncIterator[Any]:
        for item in self._published:
            yield item
        while True:
            yield await self.queue.get()

    def reject(self, why: str) -> None:
        self.rejected = why

    async def call(self, verb: str, **args: Any) -> Any:
        self.calls.append((verb, args))
        if verb not in self.answers:
            raise ClusterError(f"this daemon (0.1.0) does not know {verb!r}: is the client of another version?")
        return self.answers[verb]

    async def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        end = self.log_begin + len(self._log)
        yield {"attempt": 1, "generation": 1, "rank": 0, "data": self._log, "offset": end}
        await asyncio.Event().wait()

    async def submit(self, request: Request) -> dict[str, Any]:
        raise ClusterError("nothing is submitted here")

    async def close(self) -> None:
        pass


def staged(feed: Sequence[Any] | None = None, first: str = "queue", **more: Any) -> Top:
    """The interface on such a source."""
    source = Staged(items() if feed is None else feed)
    return Top(source, clock=lambda: NOW_S, first=first, ticks=False, **more)
