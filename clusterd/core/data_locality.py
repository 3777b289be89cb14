"""Location of a job's data sets, and whether a host that holds each is up."""

from __future__ import annotations

from collections.abc import Mapping

from clusterd.core.host import Host
from clusterd.types import HostId, HostState, JobSpec


def places_of(text: str) -> list[tuple[str | None, str]]:
    """Parse ``gpu01:/data, gpu02:/data`` into pairs of host and folder; host None: every host has the folder."""
    found: list[tuple[str | None, str]] = []
    for place in (part.strip() for part in text.split(",")):
        host, colon, path = place.partition(":")
        found.append((host, path) if colon and not place.startswith("/") else (None, place))
    return found


CHECKPOINT = "checkpoint-to-start-from"
"""Name under which hosts serve the checkpoint that a job starts from, if only one of them has it."""


def data_of(spec: JobSpec) -> dict[str, str]:
    """All that a job reads by name: its data sets, and a checkpoint that one host has."""
    place, _ = split_step(spec.restore or "")
    return {**spec.datasets, **({CHECKPOINT: place} if place and not place.startswith("/") else {})}


def split_step(place: str) -> tuple[str, str]:
    """Split a checkpoint's place from its step: ``/folder@120`` to ``/folder`` and ``@120``, which may be empty."""
    folder, at, step = place.rpartition("@")
    return (folder, f"@{step}") if at and step.isdigit() else (place, "")


def waits_for(spec: JobSpec, hosts: Mapping[HostId, Host]) -> str | None:
    """Message naming a data set whose hosts are all away; None: all data is available."""
    for name, text in data_of(spec).items():
        named = [hosts.get(HostId(at)) if at is not None else None for at, _ in places_of(text)]
        away = [host for host in named if host is not None and host.state is not HostState.UP]
        if named and len(away) == len(named):
            hosts_text = " and ".join(f"{host.id}, which is {host.state.value}" for host in away)
            return f"waits for the data set {name!r} on {hosts_text}"
    return None
