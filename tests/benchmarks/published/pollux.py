"""Tiresias and Optimus as Pollux's published simulator runs them beside Pollux.

Both assign devices every 60 s and place alike: a job with an unchanged count keeps its devices, the others take theirs
repeatedly from the host with most free devices. A job whose devices change restarts. Hosts are homogeneous.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from clusterd.core.ledger import bind, of_ranks, shape_of
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.apply_targets import Target
from clusterd.core.policies.base import Baseline
from clusterd.core.policies.optimus import Optimus
from clusterd.core.policies.tiresias import Tiresias
from clusterd.core.state import Job
from clusterd.core.view import Preempt, Proposal, Refusal, Start, View
from clusterd.types import Device, JobId


class _MostFreeFirst:
    """Placement of a baseline's targets on the hosts with most free devices."""

    def __init__(self, baseline: Baseline, narrow_first: bool) -> None:
        self.baseline, self.narrow_first = baseline, narrow_first
        self.name, self.interval_s = baseline.name, baseline.interval_s
        self._now_s = float("-inf")
        self._places: dict[JobId, tuple[Estimate, list[Device]]] = {}

    def propose(self, view: View) -> Proposal:
        """Decisions of this round: first the releases, then, at the same instant, the grants."""
        if view.now_s != self._now_s:
            self._now_s = view.now_s
            jobs = sorted(self.baseline.managed(view), key=lambda j: (j.submitted_s, len(j.id), j.id))
            self._places = self._place(view, self.baseline.wants(view, jobs))
        proposal = Proposal()
        for job in view.running:
            mine = self._places.get(job.id)
            if job.attempt is not None and (mine is None or ids(mine[1]) != set(job.attempt.devices)):
                proposal.preempts.append(Preempt(job.id, f"{self.name}: its devices change"))
        for job in view.queued:
            if job.id not in self._places:
                proposal.refusals.append(Refusal(job.id, f"{self.name}: others come first"))
                continue
            estimate, devices = self._places[job.id]
            if ids(devices) <= {d.id for d in view.free.all_devices()}:
                where = bind(job, estimate, devices)
                view.free.take_places(where.ranks, where.booked)
                start = (job.id, estimate.plan, where.ranks, where.booked, self.name)
                proposal.starts.append(Start(*start))
        return proposal

    def _place(self, view: View, wants: Sequence[Target]) -> dict[JobId, tuple[Estimate, list[Device]]]:
        left = {name: list(host.devices) for name, host in view.hosts.items() if host.unusable is None}
        found: dict[JobId, tuple[Estimate, list[Device]]] = {}
        moving: list[Target] = []
        for want in wants:
            devices = _devices_of(want.job, view)
            if len(devices) == want.options[0].devices:
                found[want.job.id] = want.options[0], devices
                for device in devices:
                    left[device.host].remove(device)
            else:
                moving.append(want)
        if self.narrow_first:
            moving.sort(key=lambda want: want.options[0].devices)
        for want in moving:
            devices = []
            while len(devices) < want.options[0].devices:
                most = max(left, key=lambda host: len(left[host]))
                count = want.options[0].devices - len(devices)
                devices += left[most][:count]
                left[most] = left[most][count:]
            estimate = next((x for x in want.options if x.shape == shape_of(devices)), None)
            if estimate is not None:
                found[want.job.id] = estimate, devices
        return found


def _devices_of(job: Job, view: View) -> list[Device]:
    return of_ranks(view.hosts, job.attempt) if job.attempt is not None else []


def ids(devices: Iterable[Device]) -> set[str]:
    """Ids of these devices."""
    return {device.id for device in devices}


class PolluxTiresias(_MostFreeFirst):
    """Two queues with a limit of 16 device-hours; first come first served within a queue."""

    def __init__(self) -> None:
        super().__init__(Tiresias(limits_device_s=(57_600.0,), running_first=False), narrow_first=False)
        self.name = "pollux-tiresias"
        self.interval_s = 60.0


class _ByEpochs(Optimus):
    """Remaining steps without those of the current epoch."""

    def left(self, job: Job) -> float:
        steps = super().left(job)
        assert job.inspection.shape is not None, "simulated models are described"
        epoch = float(job.inspection.shape["samples"]) / float(job.inspection.shape["global_batch"])
        return max((math.ceil(steps / epoch - 1e-9) - 1) * epoch, 1.0)


class PolluxOptimus(_MostFreeFirst):
    """Assignment every 60 s by the epochs that remain after the current one; the narrowest jobs are placed first."""

    def __init__(self) -> None:
        super().__init__(_ByEpochs(interval_s=60.0), narrow_first=True)
        self.name = "pollux-optimus"
