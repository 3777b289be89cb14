"""Starts, migrations and preemptions that bring jobs to their target allocations, as few as possible.

Devices that other jobs must leave first are freed in this pass and granted in a later one, as the same targets give the
same answer then. Jobs in the middle of a launch, migration, stop or trial keep what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from clusterd.core.estimates.can_migrate import may_change
from clusterd.core.ledger import bind, by_type, of_ranks, shape_of
from clusterd.core.performance_table import Estimate
from clusterd.core.state import Attempt, Job
from clusterd.core.view import Move, Preempt, Proposal, Refusal, Start, View
from clusterd.types import Device, HostId, JobId
from clusterd.units import counted


@dataclass(frozen=True, slots=True)
class Target:
    """A job that is to run under the first of its options that fits."""

    job: Job
    options: Sequence[Estimate]
    reason: str
    keep: bool = False  # it stays as it is, whatever the options


@dataclass(slots=True)
class _Running:
    """A running job with its target and the devices that it holds."""

    target: Target
    rank: int  # of the target
    attempt: Attempt
    devices: list[Device]

    @property
    def per_host(self) -> dict[HostId, int]:
        found: dict[HostId, int] = {}
        for device in self.devices:
            found[device.host] = found.get(device.host, 0) + 1
        return found


def current(job: Job, view: View) -> tuple[str, tuple[int, ...]]:
    """Device type and shape of what a running job holds."""
    attempt = job.attempt
    assert attempt is not None
    devices = of_ranks(view.hosts, attempt)
    return (devices[0].name if devices else "", shape_of(devices))


def apply_targets(view: View, targets: Sequence[Target], *, among: Iterable[Job], others: str) -> Proposal:
    """Propose actions so that these jobs run as their targets say, and no other one among `among` runs.

    Args:
        among: all jobs that were weighed against each other; the rest are left as they are.
        others: why those of them that run and are not by_job are stopped.
    """
    return _Pass(view, targets, {job.id for job in among}, others).run()


class _Pass:
    def __init__(self, view: View, targets: Sequence[Target], among: set[JobId], others: str) -> None:
        self.view, self.targets, self.among, self.others = view, targets, among, others
        self.proposal = Proposal()
        self.ledger = view.free.copy()
        self.now_free = {device for types in self.ledger.devices.values() for some in types.values() for device in some}
        self.staying: list[_Running] = []
        self.displaced: list[_Running] = []

    def run(self) -> Proposal:
        by_job = {target.job.id: (rank, target) for rank, target in enumerate(self.targets)}
        changing: list[tuple[int, Target, _Running | None]] = [
            (rank, target, None) for rank, target in by_job.values() if target.job.attempt is None
        ]
        for job in self.view.running:
            attempt = job.attempt
            if (
                attempt is None
                or not may_change(job, self.view)
                or attempt.plan is None
                or job.pinned is not None
                or job.id not in self.among
            ):
                continue
            devices = of_ranks(self.view.hosts, attempt)
            found = by_job.get(job.id)
            if found is None:
                self.proposal.preempts.append(Preempt(job.id, self.others))
                self.ledger.put(devices, attempt.booked)
                continue
            rank, target = found
            leaving = self.view.leaving(attempt)
            if leaving:
                target = replace(target, reason=leaving)
            held = _Running(target, rank, attempt, devices)
            if not leaving and (target.keep or _is_current(target, attempt, devices)):
                self.staying.append(held)
            else:
                changing.append((rank, target, held))

        # Those who give devices back come before those who wait for them.
        def gives(held: _Running | None, target: Target) -> bool:
            return held is not None and target.options[0].devices <= len(held.devices)

        # Among those the widest first: what is left over scattered still serves the narrow.
        changing.sort(key=lambda item: (not gives(item[2], item[1]), -item[1].options[0].devices, item[0]))
        self.staying.sort(key=lambda s: s.rank)
        for rank, target, old in changing:
            if not self._place(target, old) and not self._make_place(rank, target, old) and old is None:
                sizes = sorted({x.devices for x in target.options})
                least = f"{sizes[0]} to " if len(sizes) > 1 else ""
                reason = f"waits for {least}{counted(sizes[-1], 'device')} on hosts where it is known to run"
                self.proposal.refusals.append(Refusal(target.job.id, reason))
        return self.proposal

    def _place(self, target: Target, old: _Running | None) -> bool:
        if old is not None:
            self._leave(old)
        found = self._find(target, old)
        if found is None:
            if old is not None:
                self._stay(old)
            return False
        self._emit(target, old, *found, target.reason)
        return True

    def _find(self, target: Target, old: _Running | None) -> tuple[Estimate, list[Device]] | None:
        """The first option that there is room for, taken."""
        own = {d.id for d in old.devices} if old is not None else set()
        for option in target.options:
            devices = self.ledger.find(target.job, option, old.per_host if old is not None else None, own)
            if devices is not None:
                where = bind(target.job, option, devices)
                self.ledger.take(devices, where.booked)
                return option, devices
        return None

    def _emit(self, target: Target, old: _Running | None, option: Estimate, devices: list[Device], why: str) -> None:
        job, where = target.job, bind(target.job, option, devices)
        own = {d.id for d in old.devices} if old is not None else set()
        now = all(d.id in own or d.id in self.now_free for d in devices)
        if old is None and now:
            reason = f"{option.plan} on {', '.join(where.booked.cores)}: {why}"
            self.proposal.starts.append(Start(job.id, option.plan, where.ranks, where.booked, reason))
        elif old is None:
            self.proposal.refusals.append(Refusal(job.id, f"its {option.devices} devices are being freed"))
        elif (option.plan, {d.id for d in devices}) != (old.attempt.plan, own):
            if now:
                reason = f"{option.plan}: {why}"
                self.proposal.moves.append(Move(job.id, option.plan, where.ranks, where.booked, reason))
            elif old in self.displaced:
                # Others wait for what it has, and it for what others have: it stops, and starts there.
                self.proposal.preempts.append(Preempt(job.id, why))

    def _leave(self, held: _Running) -> None:
        self.ledger.put(held.devices, held.attempt.booked)

    def _stay(self, held: _Running) -> None:
        self.ledger.take(held.devices, held.attempt.booked)

    def _make_place(self, rank: int, target: Target, old: _Running | None) -> bool:
        """There are devices enough, but scattered: narrower jobs that come later make way, and sit elsewhere.

        Nothing is done where one of them could not sit down again.
        """
        width = target.options[0].devices
        movable = [s for s in self.staying if s.rank > rank and not s.target.keep and len(s.devices) < width]
        movable.sort(key=lambda s: (len(s.devices), -s.rank))
        gone: list[_Running] = []
        found: tuple[Estimate, list[Device]] | None = None
        if old is not None:
            self._leave(old)
        for held in movable:
            self._leave(held)
            gone.append(held)
            found = self._find(target, old)
            if found is not None:
                break
        taken: list[tuple[_Running, Estimate | None, list[Device]]] = []
        for held in sorted(gone, key=lambda s: -len(s.devices)) if found is not None else ():
            if all(d.id in self.ledger.devices.get(d.host, {}).get(d.name, {}) for d in held.devices):
                self._stay(held)
                taken.append((held, None, held.devices))
                continue
            again = self._find(held.target, held)
            if again is None:
                break
            taken.append((held, *again))
        if found is None or len(taken) < len(gone):
            for held, option, devices in taken:
                self._untake(held, option, devices)
            if found is not None:
                where = bind(target.job, *found)
                self.ledger.put(found[1], where.booked)
            for held in [*gone, *([old] if old is not None else [])]:
                self._stay(held)
            return False
        self._emit(target, old, *found, target.reason)
        for held, option, devices in taken:
            if option is not None:
                self.staying.remove(held)
                self.displaced.append(held)
                self._emit(held.target, held, option, devices, f"makes place for {target.job.spec.name}")
        return True

    def _untake(self, held: _Running, option: Estimate | None, devices: list[Device]) -> None:
        if option is None:
            self._leave(held)
        else:
            where = bind(held.target.job, option, devices)
            self.ledger.put(devices, where.booked)


def _is_current(target: Target, attempt: Attempt, devices: Sequence[Device]) -> bool:
    shape = shape_of(devices)
    types = {name: len(some) for name, some in by_type(devices).items()}
    return any(x.plan == attempt.plan and x.shape == shape and x.by_type == types for x in target.options)
