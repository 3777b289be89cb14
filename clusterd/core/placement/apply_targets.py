"""From who should have what to what is to be done now: starts, moves and preemptions, as few as will do.

What others must leave first is asked for in this pass and taken in a later one; the same wants give the same answer
then. Jobs in the middle of a launch, a move, a stop or a trial are left alone with what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from clusterd.core.allocation.resize_unmodelled import SETTLE_AFTER_FAILURE_S
from clusterd.core.ledger import Room, by_type, of_ranks, seat, shape_of
from clusterd.core.performance_table import Estimate
from clusterd.core.state import Attempt, Job
from clusterd.core.view import Move, Preempt, Proposal, Refusal, Start, View
from clusterd.types import AttemptState, Device, HostId, HostState, JobId


@dataclass(frozen=True, slots=True)
class Want:
    """A job that is to run, as the first of these that there is room for."""

    job: Job
    options: Sequence[Estimate]
    reason: str
    keep: bool = False  # it stays as it is, whatever the options


@dataclass(slots=True)
class _Seat:
    """Where a running job is, and where it is to be."""

    want: Want
    rank: int  # of the want
    attempt: Attempt
    devices: list[Device]

    @property
    def per_host(self) -> dict[HostId, int]:
        found: dict[HostId, int] = {}
        for device in self.devices:
            found[device.host] = found.get(device.host, 0) + 1
        return found


def is_settled(job: Job) -> bool:
    """Running, and not in the middle of anything: it may be moved or stopped."""
    attempt = job.attempt
    return (
        attempt is not None
        and attempt.state is AttemptState.RUNNING
        and attempt.migration is None
        and not attempt.resuming
        and not attempt.retired
        and not attempt.orphaned
        and job.trial is None
    )


def may_change(job: Job, view: View) -> bool:
    """Settled, with all its ranks there, and its last move did not fail a moment ago."""
    attempt = job.attempt
    if attempt is None or not is_settled(job):
        return False
    if any(h not in view.hosts or view.hosts[h].state is not HostState.UP for h in attempt.hosts):
        return False
    last = job.migrations[-1] if job.migrations else None
    if last is None or last.ended_s is None:
        return True
    return view.now_s - last.ended_s >= job.calm_s(SETTLE_AFTER_FAILURE_S)


def current(job: Job, view: View) -> tuple[str, tuple[int, ...]]:
    """Device type and shape of what a running job holds."""
    attempt = job.attempt
    assert attempt is not None
    devices = of_ranks(view.hosts, attempt)
    return (devices[0].name if devices else "", shape_of(devices))


def realise(view: View, wants: Sequence[Want], *, among: Iterable[Job], others: str) -> Proposal:
    """What is to be done so that these jobs run so, the first named first, and no other one among some does.

    Args:
        among: all jobs that were weighed against each other; the rest are left as they are.
        others: why those of them that run and are not wanted are stopped.
    """
    return _Pass(view, wants, {job.id for job in among}, others).run()


class _Pass:
    def __init__(self, view: View, wants: Sequence[Want], among: set[JobId], others: str) -> None:
        self.view, self.wants, self.among, self.others = view, wants, among, others
        self.proposal = Proposal()
        self.room = Room(view.free)
        self.now_free = {device for types in self.room.devices.values() for some in types.values() for device in some}
        self.kept: list[_Seat] = []
        self.displaced: list[_Seat] = []

    def run(self) -> Proposal:
        wanted = {want.job.id: (rank, want) for rank, want in enumerate(self.wants)}
        changing: list[tuple[int, Want, _Seat | None]] = [
            (rank, want, None) for rank, want in wanted.values() if want.job.attempt is None
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
            found = wanted.get(job.id)
            if found is None:
                self.proposal.preempts.append(Preempt(job.id, self.others))
                self.room.put(devices, attempt.cores, attempt.memory_bytes)
                continue
            rank, want = found
            leaving = self.view.leaving(attempt)
            if leaving:
                want = replace(want, reason=leaving)
            seat_ = _Seat(want, rank, attempt, devices)
            if not leaving and (want.keep or _is_kept(want, attempt, devices)):
                self.kept.append(seat_)
            else:
                changing.append((rank, want, seat_))

        # Those who give devices back come before those who wait for them.
        def gives(seat_: _Seat | None, want: Want) -> bool:
            return seat_ is not None and want.options[0].devices <= len(seat_.devices)

        # Among those the widest first: what is left over scattered still serves the narrow.
        changing.sort(key=lambda item: (not gives(item[2], item[1]), -item[1].options[0].devices, item[0]))
        self.kept.sort(key=lambda s: s.rank)
        for rank, want, old in changing:
            if not self._place(want, old) and not self._make_place(rank, want, old) and old is None:
                sizes = sorted({x.devices for x in want.options})
                what = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
                said = f"waits for {what} devices on hosts where it is known to run"
                self.proposal.refusals.append(Refusal(want.job.id, said))
        return self.proposal

    def _place(self, want: Want, old: _Seat | None) -> bool:
        if old is not None:
            self._leave(old)
        found = self._find(want, old)
        if found is None:
            if old is not None:
                self._stay(old)
            return False
        self._emit(want, old, *found, want.reason)
        return True

    def _find(self, want: Want, old: _Seat | None) -> tuple[Estimate, list[Device]] | None:
        """The first option that there is room for, taken."""
        own = {d.id for d in old.devices} if old is not None else set()
        for option in want.options:
            devices = self.room.find(want.job, option, old.per_host if old is not None else None, own)
            if devices is not None:
                where = seat(want.job, option, devices)
                self.room.take(devices, where.cores, where.memory_bytes)
                return option, devices
        return None

    def _emit(self, want: Want, old: _Seat | None, option: Estimate, devices: list[Device], why: str) -> None:
        job, where = want.job, seat(want.job, option, devices)
        own = {d.id for d in old.devices} if old is not None else set()
        now = all(d.id in own or d.id in self.now_free for d in devices)
        if old is None and now:
            reason = f"{option.plan} on {', '.join(where.cores)}: {why}"
            self.proposal.starts.append(
                Start(job.id, option.plan, where.ranks, where.cores, where.memory_bytes, reason)
            )
        elif old is None:
            self.proposal.refusals.append(Refusal(job.id, f"its {option.devices} devices are being freed"))
        elif (option.plan, {d.id for d in devices}) != (old.attempt.plan, own):
            if now:
                reason = f"{option.plan}: {why}"
                self.proposal.moves.append(
                    Move(job.id, option.plan, where.ranks, where.cores, where.memory_bytes, reason)
                )
            elif old in self.displaced:
                # Others wait for what it has, and it for what others have: it stops, and starts there.
                self.proposal.preempts.append(Preempt(job.id, why))

    def _leave(self, seat_: _Seat) -> None:
        self.room.put(seat_.devices, seat_.attempt.cores, seat_.attempt.memory_bytes)

    def _stay(self, seat_: _Seat) -> None:
        self.room.take(seat_.devices, seat_.attempt.cores, seat_.attempt.memory_bytes)

    def _make_place(self, rank: int, want: Want, old: _Seat | None) -> bool:
        """There are devices enough, but scattered: narrower jobs that come later make way, and sit elsewhere.

        Nothing is done where one of them could not sit down again.
        """
        width = want.options[0].devices
        movable = [s for s in self.kept if s.rank > rank and not s.want.keep and len(s.devices) < width]
        movable.sort(key=lambda s: (len(s.devices), -s.rank))
        gone: list[_Seat] = []
        found: tuple[Estimate, list[Device]] | None = None
        if old is not None:
            self._leave(old)
        for seat_ in movable:
            self._leave(seat_)
            gone.append(seat_)
            found = self._find(want, old)
            if found is not None:
                break
        taken: list[tuple[_Seat, Estimate | None, list[Device]]] = []
        for seat_ in sorted(gone, key=lambda s: -len(s.devices)) if found is not None else ():
            if all(d.id in self.room.devices.get(d.host, {}).get(d.name, {}) for d in seat_.devices):
                self._stay(seat_)
                taken.append((seat_, None, seat_.devices))
                continue
            again = self._find(seat_.want, seat_)
            if again is None:
                break
            taken.append((seat_, *again))
        if found is None or len(taken) < len(gone):
            for seat_, option, devices in taken:
                self._untake(seat_, option, devices)
            if found is not None:
                where = seat(want.job, *found)
                self.room.put(found[1], where.cores, where.memory_bytes)
            for seat_ in [*gone, *([old] if old is not None else [])]:
                self._stay(seat_)
            return False
        self._emit(want, old, *found, want.reason)
        for seat_, option, devices in taken:
            if option is not None:
                self.kept.remove(seat_)
                self.displaced.append(seat_)
                self._emit(seat_.want, seat_, option, devices, f"makes place for {want.job.spec.name}")
        return True

    def _untake(self, seat_: _Seat, option: Estimate | None, devices: list[Device]) -> None:
        if option is None:
            self._leave(seat_)
        else:
            where = seat(seat_.want.job, option, devices)
            self.room.put(devices, where.cores, where.memory_bytes)


def _is_kept(want: Want, attempt: Attempt, devices: Sequence[Device]) -> bool:
    shape = shape_of(devices)
    types = {name: len(some) for name, some in by_type(devices).items()}
    return any(x.plan == attempt.plan and x.shape == shape and x.by_type == types for x in want.options)
