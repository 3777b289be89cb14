"""Users and operators of one simulation, who submit jobs and change their minds."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

from clusterd.errors import ClusterError
from tests.soak.daemon import Killed

if TYPE_CHECKING:
    from tests.soak.simulation import Simulation

MEAN_PAUSE_S = 10.0


class Users:
    """Requests of clients, drawn from the seed.

    Attributes:
        accepted: jobs whose submission was acknowledged.
        cancelled: jobs whose cancellation was acknowledged.
    """

    def __init__(self, simulation: Simulation, randomness: random.Random) -> None:
        self.accepted: dict[str, None] = {}
        self.cancelled: dict[str, None] = {}
        self.requests = 0
        self._simulation, self._random = simulation, randomness

    async def run(self) -> None:
        """Make requests until cancelled."""
        kinds = (self._submit,) * 6 + (
            self._cancel, self._requeue, self._hold, self._release, self._prioritise, self._drain, self._undrain,
            self._claim, self._migrate, self._migrate, self._migrate, self._book, self._cancel_booking, self._edit,
        )  # fmt: skip
        while True:
            await asyncio.sleep(self._random.expovariate(1.0 / MEAN_PAUSE_S))
            asyncio.ensure_future(self._try(self._random.choice(kinds)))  # noqa: RUF006 - a client waits for itself alone

    async def _try(self, request: Any) -> None:
        self.requests += 1
        try:
            await request()
        except (ClusterError, Killed):
            return
        except Exception as error:
            self._simulation.wrong(f"{request.__name__} of a client raised {error!r}")

    async def set_right(self) -> None:
        """Undo what keeps jobs waiting for a person: drained hosts, held jobs, claims."""
        call, state = self._simulation.call, self._simulation.state
        for host in list(state.hosts):
            await call("host_undrain", host=host)
        for job in list(state.jobs.values()):
            if job.held_by is not None and not job.state.is_final:
                await call("release", job=job.id)
        for claim in list(state.device_claims):
            await call("claim_remove", claim=claim)
        for job in list(state.jobs.values()):
            if job.spec.booking and not job.state.is_final:
                await call("cancel", job=job.id)

    async def _submit(self) -> None:
        draw = self._random
        nodes = draw.choice((1, 1, 1, 2))
        devices = nodes * draw.choice((0, 1, 1, 2)) if nodes == 1 else nodes * draw.choice((0, 1))
        kind = draw.choice(("command", "command", "checkpointable")) if nodes == 1 and devices else "command"
        if devices and draw.random() < 0.4:
            kind, nodes = "elastic", 1
        outcome = draw.choice(("ok", "ok", "ok", "fail", "oom"))
        manner = draw.choice(("obeys", "obeys", "ignores"))
        spec = {
            "name": f"job-{self.requests}",
            "kind": kind,
            "command": ["sim", f"{draw.expovariate(1 / 40.0):.3f}", outcome, manner, "{ranks}"],
            "workdir": "/work",
            "resources": {"devices": devices, "nodes": nodes, "cpus": draw.choice((0, 4))},
            "priority": draw.choice((0, 0, 1, 5)),
            "guaranteed": draw.random() < 0.2,
            "retries": draw.choice((0, 0, 2)),
            "grace_s": draw.choice((0.0, 5.0, 30.0)),
            "time_limit_s": draw.choice((None, None, 60.0)),
            "hold": draw.random() < 0.05,
            "begin_s": time.time() + draw.uniform(0.0, 60.0) if draw.random() < 0.1 else None,
            "booking": draw.choice([*self._simulation.state.device_claims, ""]) if draw.random() < 0.2 else "",
            "after": [f"{draw.choice(list(self.accepted))}:any"] if self.accepted and draw.random() < 0.2 else [],
            "waits_for_hosts": True,
            "trials": False,
        }
        answer = await self._simulation.call("submit", spec=spec)
        self.accepted[answer.id] = None

    def _job(self) -> str:
        if not self.accepted:
            raise ClusterError("there is no job yet")
        return self._random.choice(list(self.accepted)[-8:])

    async def _cancel(self) -> None:
        job, now = self._job(), self._random.random() < 0.3
        await self._simulation.call("cancel", job=job, now=now)
        self.cancelled[job] = None

    async def _requeue(self) -> None:
        await self._simulation.call("requeue", job=self._job(), hold=self._random.random() < 0.2)

    async def _migrate(self) -> None:
        jobs = [job for job in self.accepted if self._simulation.is_training(job)]
        if not jobs:
            raise ClusterError("no job trains")
        plan = self._random.choice(("dp=1", "dp=2", "tp=2", "dp=2,zero=1", "dp=2,tp=2", None))
        hosts = [host for host in self._simulation.network.machines if self._random.random() < 0.5]
        devices = [] if plan else hosts
        await self._simulation.call("migrate", job=self._random.choice(jobs), plan=plan, devices=devices or None)

    async def _hold(self) -> None:
        await self._simulation.call("hold", job=self._job())

    async def _release(self) -> None:
        await self._simulation.call("release", job=self._job())

    async def _prioritise(self) -> None:
        await self._simulation.call("priority", job=self._job(), priority=self._random.randint(0, 5))

    def _host(self) -> str:
        return self._random.choice(list(self._simulation.network.machines))

    async def _edit(self) -> None:
        changes = self._random.choice(({"begin_s": None}, {"time_limit_s": 90.0}, {"resources": {"exclude": ["h1"]}}))
        await self._simulation.call("edit", job=self._job(), changes=changes)

    async def _book(self) -> None:
        draw, now_s = self._random, time.time()
        begins_s, length_s = now_s + draw.uniform(0.0, 60.0), draw.uniform(20.0, 120.0)
        await self._simulation.call("booking_add", devices=draw.choice((1, 2)), for_s=length_s, from_s=begins_s)

    async def _cancel_booking(self) -> None:
        claims = self._simulation.state.device_claims
        booked = [claim.id for claim in claims.values() if claim.owner]
        if not booked:
            raise ClusterError("nothing is booked")
        await self._simulation.call("booking_cancel", booking=self._random.choice(booked))

    async def _drain(self) -> None:
        stays = self._random.random() < 0.3
        await self._simulation.call("host_drain", host=self._host(), why="a check", jobs_stay=stays)

    async def _undrain(self) -> None:
        await self._simulation.call("host_undrain", host=self._host())

    async def _claim(self) -> None:
        length_s, drains = self._random.uniform(5.0, 60.0), self._random.random() < 0.5
        await self._simulation.call("claim_add", devices=[self._host()], reason="a check", for_s=length_s, drain=drains)
