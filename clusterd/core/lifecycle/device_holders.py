"""Devices given to attempts and freed again: each has one holder, and other jobs may share it beside that one."""

from __future__ import annotations

from clusterd.core.state import Attempt, Holder, State
from clusterd.types import DeviceId, HostId, JobId


def give_device(state: State, attempt: Attempt, device: DeviceId, host: HostId, generation: int) -> None:
    """Give a device to an attempt, or a place on it beside the jobs that share it."""
    if device in state.holders:
        state.sharers.setdefault(device, []).append(attempt.job)
    else:
        state.holders[device] = Holder(host, attempt.job, attempt.number, generation)


def free_device(state: State, device: DeviceId) -> None:
    """Free a device; where jobs share it, the next of them holds it."""
    host = state.holders.pop(device).host
    if not (others := state.sharers.get(device)):
        return
    attempt = state.jobs[others[0]].attempt
    assert attempt is not None, f"{others[0]} shares {device} without an attempt"
    stop_sharing(state, device, others[0])
    state.holders[device] = Holder(host, attempt.job, attempt.number, attempt.generation)


def stop_sharing(state: State, device: DeviceId, job: JobId) -> None:
    """Remove a job from those that share a device beside its holder."""
    state.sharers[device].remove(job)
    if not state.sharers[device]:
        del state.sharers[device]
