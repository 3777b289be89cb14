"""Gavel's first-come-first-served policy as its published simulator runs it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from clusterd.core.estimates.candidate_plans import CandidatePlansCache, PlanFreedom
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.apply_targets import Target, apply_targets
from clusterd.core.state import Job
from clusterd.core.view import Proposal, View
from clusterd.types import JobId


class GavelFifo:
    """`fifo` of Gavel's simulator: first come first served, each job on one device type for its whole life.

    Types are assigned when jobs arrive or complete, at least `reset_s` after the last assignment. The job at the head
    of the queue takes over the type of a completed job, else draws one from those with free devices. In each round the
    jobs of a type run in order of the device time that they have received since the last assignment.
    """

    name = "gavel-fifo"

    def __init__(self, faults: bool = True, seed: int = 0, round_s: float = 360.0, reset_s: float = 1920.0) -> None:
        self.faults, self.reset_s = faults, reset_s
        self.interval_s: float | None = round_s
        self._random = random.Random(seed)
        self._candidates = CandidatePlansCache()
        self._types: dict[JobId, str] = {}  # of jobs that have one, the ended ones until types are given out again
        self._known: frozenset[JobId] = frozenset()
        self._got_s: dict[JobId, float] = {}  # since types were last given out
        self._short_s: dict[JobId, float] = {}  # of what was due, over its life
        self._round: dict[JobId, int] = {}  # who runs in it, and the steps made before
        self._given_s = 0.0
        self._is_due = False
        self._now_s = float("-inf")

    def propose(self, view: View) -> Proposal:
        """Decision of this round; repeated calls within a round return the same decision."""
        jobs = {j.id: j for j in sorted([*view.queued, *view.running], key=lambda j: (j.submitted_s, len(j.id), j.id))}
        candidates_cache = {name: self._candidates_of(job, view) for name, job in jobs.items()}
        if view.now_s != self._now_s:
            self._now_s = view.now_s
            self._credit(jobs, candidates_cache)
            if self._is_due and (view.now_s - self._given_s >= self.reset_s or self._given_s == 0.0):
                self._give_types(view, jobs, candidates_cache)
            self._choose(view, jobs, candidates_cache)
        wants = [
            Target(job, candidates_cache[name][self._types[name]], self.name)
            for name, job in jobs.items()
            if name in self._round
        ]
        return apply_targets(view, wants, among=jobs.values(), others=f"{self.name}: others have had less of this type")

    def _candidates_of(self, job: Job, view: View) -> dict[str, Sequence[Estimate]]:
        candidates = self._candidates.of(job, view.performance_tables, PlanFreedom.ASKED)
        return (
            {kind: next(iter(sizes.values())) for kind, sizes in candidates.sizes.items()}
            if candidates is not None
            else {}
        )

    def _credit(
        self, jobs: Mapping[JobId, Job], candidates_cache: Mapping[JobId, Mapping[str, Sequence[Estimate]]]
    ) -> None:
        """Add the device time of the last round, in whole steps."""
        for name, before in self._round.items():
            if name in jobs:
                self._got_s[name] += (jobs[name].progress.step - before) * candidates_cache[name][self._types[name]][
                    0
                ].step_time_s
        for name in jobs:
            if name not in self._known:
                self._got_s[name] = self._short_s[name] = 0.0
        if frozenset(jobs) != self._known:
            self._known, self._is_due = frozenset(jobs), True

    def _give_types(
        self, view: View, jobs: Mapping[JobId, Job], candidates_cache: Mapping[JobId, Mapping[str, Sequence[Estimate]]]
    ) -> None:
        passed_s = view.now_s - self._given_s
        for name in jobs:
            self._short_s[name] += (passed_s if name in self._types else 0.0) - self._got_s[name]
            self._got_s[name] = 0.0
        self._given_s, self._is_due = view.now_s, False
        left = devices_of(view)
        waiting = [name for name in jobs if name not in self._types]

        def width(name: JobId) -> int:
            return max(jobs[name].spec.resources.devices, 1)

        if not self.faults:
            for name in [name for name in self._types if name not in jobs]:
                del self._types[name]
        for name, kind in sorted(self._types.items(), key=lambda item: (len(item[0]), item[0])):
            if name in jobs:
                left[kind] -= width(name)
                continue
            del self._types[name]
            if waiting and width(waiting[0]) <= left[kind] and kind in candidates_cache[waiting[0]]:
                heir = waiting.pop(0)
                self._types[heir] = kind
                left[kind] -= width(heir)
        kinds = sorted(kind for kind, count in left.items() if count > 0)
        while waiting and kinds:
            name = waiting.pop(0)
            fitting = [
                kind for kind in kinds if left[kind] >= width(name) and (self.faults or kind in candidates_cache[name])
            ]
            if not fitting:
                break
            drawn = fitting[self._random.randrange(len(fitting))]
            kind = kinds[-1] if self.faults else drawn
            if kind in candidates_cache[name]:
                self._types[name] = kind
                left[kind] -= width(name)
                if left[kind] == 0:
                    kinds.remove(drawn)

    def _choose(
        self, view: View, jobs: Mapping[JobId, Job], candidates_cache: Mapping[JobId, Mapping[str, Sequence[Estimate]]]
    ) -> None:
        left = devices_of(view)
        typed = [name for name in jobs if name in self._types]
        self._round = {}
        for name in sorted(typed, key=lambda name: (self._got_s[name], -self._short_s[name])):
            kind = self._types[name]
            count = candidates_cache[name][kind][0].devices
            if count <= left[kind]:
                left[kind] -= count
                self._round[name] = jobs[name].progress.step


def devices_of(view: View) -> dict[str, int]:
    """Devices of each type on usable hosts."""
    found: dict[str, int] = {}
    for host in view.hosts.values():
        if host.unusable is None:
            for device in host.devices:
                found[device.name] = found.get(device.name, 0) + 1
    return found
