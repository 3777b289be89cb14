"""State of one host: its agents, what they reported, and what keeps it from being used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from clusterd.core import transitions
from clusterd.core.transitions import History
from clusterd.types import Device, DeviceId, HostFacts, HostId, HostState, JobId

NO_REASON = "drained"
"""Value of `Host.drained` where nobody said by whom or why."""


@dataclass(slots=True)
class Fault:
    """Failure of a device under one of our ranks."""

    why: str
    times: int = 1
    is_left_out: bool = True  # until a timer offers the device again


@dataclass(slots=True)
class Host:
    """A machine, as its agent last reported it."""

    id: HostId
    state: HostState = HostState.CONNECTING
    facts: HostFacts | None = None
    agent: str = ""  # identity of the agent that answered last
    agent_home: str | None = None  # its directory by the settings of that time; "": the default; None: not recorded
    drained: str | None = None  # by whom and why; None: not drained
    jobs_stay: bool = False  # while it is drained: they run to their end there
    why: str = ""  # it is not up
    since_s: float = 0.0  # in this state
    # (job, attempt, generation) being stopped there, with the account whose agent reported it
    orphans: dict[tuple[JobId, int, int], str] = field(default_factory=dict)
    # likewise, newer than this state; left running
    unknown_attempts: dict[tuple[JobId, int, int], str] = field(default_factory=dict)
    logins: dict[str, str] = field(default_factory=dict)  # by account: why its agent is not connected; "": it is
    lost_accounts: set[str] = field(default_factory=set)  # whose ranks were given up while their agent is away
    cores_used: int = 0
    memory_used_bytes: int = 0
    claimed: dict[DeviceId, str] = field(default_factory=dict)  # by claims that are active, with their text
    withheld: dict[DeviceId, str] = field(default_factory=dict)  # account whose lost ranks may still use the device
    faults: dict[DeviceId, Fault] = field(default_factory=dict)  # since an operator or a reboot last cleared them
    # errors that drivers reported before an operator last cleared them
    cleared_faults: dict[DeviceId, str] = field(default_factory=dict)
    history: History = field(default_factory=list)

    def go(self, state: HostState, at_s: float, why: str = "") -> None:
        """Take a step of the host's state machine."""
        if state is not self.state:
            transitions.advance(self, transitions.HOST, state, at_s, f"host {self.id}")
            self.since_s = at_s
        self.why = why

    def reaches(self, account: str) -> bool:
        """True while the agent of an account is connected; "": the daemon's own."""
        return self.state is HostState.UP and not self.without_login(account)

    def without_login(self, account: str) -> str:
        """Reason why an account's jobs may not run here; empty: they may, as its agent is connected."""
        return self.logins.get(account, f"the agent of {account} is not connected yet") if account else ""

    def why_away(self, account: str) -> str:
        """Reason why the agent of an account is not connected."""
        return self.why or self.state.value if self.state is not HostState.UP else self.logins.get(account, "")

    def has_lost(self, account: str) -> bool:
        """True where the ranks of an account were given up, with the host or with the account's agent."""
        return self.state is HostState.LOST or account in self.lost_accounts

    @property
    def unusable(self) -> str | None:
        """Reason why nothing may be placed here now; None: something may."""
        if self.state is not HostState.UP:
            return f"{self.id} is {self.state.value}"
        if self.drained is not None:
            return f"{self.id} is drained{f' ({self.drained})' if self.drained != NO_REASON else ''}"
        if self.orphans:
            return f"{self.id} is being cleaned of {len({key[:2] for key in self.orphans})} old attempts"
        return self.unknown_attempts_notice or None

    @property
    def unknown_attempts_notice(self) -> str:
        """Message about attempts that run there and that this state does not know; empty: there are none."""
        jobs = sorted({str(job) for job, _, _ in self.unknown_attempts}, key=lambda job: (len(job), job))
        if not jobs:
            return ""
        names = f"job{'s' * (len(jobs) > 1)} {', '.join(jobs)}"
        return f"{self.id} runs {names} of a later state of this cluster: clusterd host undrain {self.id} ends that"

    @property
    def devices(self) -> tuple[Device, ...]:
        """Reported devices; faulty and claimed ones are marked like those in use by others, and are not offered."""
        return self._marked(self.claimed)

    @property
    def devices_beside_claims(self) -> tuple[Device, ...]:
        """The same as if nothing were claimed: what is faulty, or in use by others, is for no job of a booking."""
        return self._marked({})

    def _marked(self, claimed: Mapping[DeviceId, str]) -> tuple[Device, ...]:
        reported = self.facts.devices if self.facts else ()
        left_out = self.reported_faults
        if not self.faults and not self.withheld and not claimed and not left_out:
            return reported
        left_out |= {d.id: self.why_left_out(d.id) for d in reported if self.is_faulty(d.id)} | dict(claimed)
        return tuple(replace(d, foreign=left_out[d.id]) if d.id in left_out else d for d in reported)

    @property
    def reported_faults(self) -> dict[DeviceId, str]:
        """Errors that make devices unfit, as their driver reports them, without those that an operator cleared."""
        reported = self.facts.devices if self.facts is not None else ()
        return {d.id: d.fault for d in reported if d.fault and d.fault != self.cleared_faults.get(d.id)}

    def clear_faults(self) -> None:
        """Offer devices again that failed, until they fail again."""
        self.faults.clear()
        self.cleared_faults = {d.id: d.fault for d in self.facts.devices if d.fault} if self.facts is not None else {}

    def missing_labels(self, constraint: Iterable[str]) -> list[str]:
        """Labels that the host does not have."""
        return [label for label in constraint if self.facts is None or label not in self.facts.labels]

    def why_no_container(self, runtime: str) -> str:
        """Reason why containers of a runtime cannot run here; empty: they can, or none is asked for."""
        if not runtime or self.facts is None or self.facts.runtimes.get(runtime) == "":
            return ""
        fault = self.facts.runtimes.get(runtime)
        return f"{self.id} has no {runtime}" if fault is None else f"{runtime} on {self.id} cannot be used: {fault}"

    def why_left_out(self, device: DeviceId) -> str:
        """Reason why a faulty or withheld device is not offered."""
        if (account := self.withheld.get(device)) is not None:
            return f"ranks of {account} may still use it, whose agent is not connected"
        return self.faults[device].why

    def is_faulty(self, device: DeviceId) -> bool:
        """True while the device is left out: it failed, or lost ranks may still use it."""
        return device in self.withheld or (device in self.faults and self.faults[device].is_left_out)
