"""What the baselines share: jobs in some order get devices by count, and the rest is `realise`'s."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from clusterd.core.allocation import evacuate_by_restart
from clusterd.core.allocation.unmodelled import Grant, allocate
from clusterd.core.estimates.candidate_plans import Choice, Menu, Menus
from clusterd.core.ledger import of_ranks
from clusterd.core.performance_table import Estimate
from clusterd.core.placement.apply_targets import Want, may_change, realise
from clusterd.core.state import Job
from clusterd.core.view import Proposal, Refusal, Start, View


class Capacity:
    """Devices by type that one round may give."""

    def __init__(self, view: View, jobs: Iterable[Job]) -> None:
        """All that is free, and all that these running jobs hold."""
        self.left: dict[str, int] = {}
        for host in view.free.hosts.values():
            for device in host.devices:
                self.left[device.name] = self.left.get(device.name, 0) + 1
        for job in jobs:
            if job.attempt is None:
                continue
            for device in of_ranks(view.hosts, job.attempt):
                if view.hosts[device.host].unusable is None:
                    self.left[device.name] = self.left.get(device.name, 0) + 1

    @classmethod
    def of(cls, left: Mapping[str, int]) -> Capacity:
        """So many of each type."""
        found = cls.__new__(cls)
        found.left = dict(left)
        return found

    @property
    def total(self) -> int:
        """Of all types."""
        return sum(self.left.values())

    def fits(self, estimates: Iterable[Estimate]) -> list[Estimate]:
        """Those whose type has so many devices left."""
        return [x for x in estimates if all(self.left.get(name, 0) >= n for name, n in x.by_type.items())]

    def take(self, estimate: Estimate) -> None:
        """It is given."""
        for name, count in estimate.by_type.items():
            self.left[name] = self.left.get(name, 0) - count  # who runs may count on a type of which no host is up


class Baseline(ABC):
    """A policy that gives devices by count, on the menu of its `choice`, in an order of its own.

    Jobs of which no speed is known, commands among them, are black boxes: started as they ask, in the order of their
    arrival, and never stopped. In the daemon a preempted elastic job goes on from its newest checkpoint; one that has
    nowhere to save starts over.
    """

    name = "baseline"
    interval_s: float | None = None
    published = Choice.ASKED
    strict = False  # who cannot be served holds up those behind
    preempts = True

    def __init__(self, plans: bool = False) -> None:
        """`plans`: the best plan for whatever is allocated, instead of the user's."""
        self.plans = plans
        self.choice = _freed(self.published) if plans else self.published
        self.menus = Menus()
        if plans:
            self.name = f"{self.name}+plans"

    def propose(self, view: View) -> Proposal:
        """Everybody in order, as far as devices go; who is none of its business leaves drained hosts all the same."""
        known = [job.id for job in view.running if self.menu(job, view) is not None]
        leaving = evacuate_by_restart.evacuations(view, skip=known)
        jobs = self.managed(view)
        wants = self.wants(view, jobs)
        proposal = realise(view, wants, among=jobs, others=f"{self.name}: others come first")
        named = {w.job.id for w in wants}
        proposal.refusals += [
            Refusal(job.id, f"{self.name}: others come first")
            for job in jobs
            if not job.attempt and job.id not in named
        ]
        black_boxes(view, self.menus, self.choice, proposal)
        proposal.moves += leaving
        return proposal

    def managed(self, view: View) -> list[Job]:
        """Jobs whose speed is known and that wait or run undisturbed."""
        waiting = [j for j in view.queued if j.not_before_s <= view.now_s]
        return [
            j for j in [*waiting, *view.running] if self.menu(j, view) and (j.attempt is None or may_change(j, view))
        ]

    def menu(self, job: Job, view: View) -> Menu | None:
        """What the job could run as under this policy."""
        return self.menus.of(job, view.outlooks, self.choice)

    def wants(self, view: View, jobs: list[Job]) -> list[Want]:
        """Who is to run and how."""
        capacity = Capacity(view, jobs)
        wants: list[Want] = []
        for job in self.order(view, jobs):
            menu = self.menu(job, view)
            assert menu is not None, "only managed jobs are asked"
            options = self.options(job, view, menu, capacity)
            if not options:
                if self.strict:
                    break
                continue
            capacity.take(options[0])
            wants.append(Want(job, options, self.name))
        return wants

    def options(self, job: Job, view: View, menu: Menu, capacity: Capacity) -> Sequence[Estimate]:
        """How the job would run now, best first, all on as many devices; none: it does not."""
        size = asked_size(job, menu)
        return capacity.fits(menu.by_speed[size])

    @abstractmethod
    def order(self, view: View, jobs: list[Job]) -> list[Job]:
        """Who comes first."""


def _freed(choice: Choice) -> Choice:
    return Choice.SIZE if choice is Choice.ASKED else Choice.ANY


def asked_size(job: Job, menu: Menu) -> int:
    """What the job asks for, or the next that is known to run."""
    asked = max(job.spec.resources.devices, 1)
    return next((n for n in menu.counts if n >= asked), menu.counts[-1])


def black_boxes(view: View, menus: Menus, choice: Choice, proposal: Proposal) -> None:
    """Start what is not known in what the proposal leaves free."""
    for start in proposal.starts:
        view.free.take(start.ranks, start.cores, start.memory_bytes)
    for move in proposal.moves:
        view.free.take(move.ranks, {h: n for h, n in move.cores.items() if h in view.free.hosts}, move.memory_bytes)
    for job in sorted(view.queued, key=lambda j: (-j.priority, j.submitted_s)):
        if menus.of(job, view.outlooks, choice) is not None:
            continue
        answer = allocate(job, view)
        if isinstance(answer, Grant):
            where = answer.placement
            view.quotas.take(job.spec.tenant, sum(place.device is not None for place in where.ranks))
            view.free.take(where.ranks, where.cores, where.memory_bytes)
            proposal.starts.append(
                Start(job.id, answer.plan, where.ranks, where.cores, where.memory_bytes, answer.reason)
            )
        else:
            proposal.refusals.append(answer)


def step_s(job: Job, menu: Menu, size: int) -> float:
    """Believed step time on so many devices."""
    return menu.by_speed[size][0].step_time_s
