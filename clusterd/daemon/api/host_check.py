"""Checks of hosts for what jobs will need, before a job fails there: `clusterd host check`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from clusterd.core.host import Host
from clusterd.core.queueing import admission
from clusterd.daemon.access import Peer
from clusterd.daemon.api.daemon import Accounts
from clusterd.daemon.hosts.facts import slot_bytes_per_s
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.errors import ClusterError
from clusterd.protocol.launch import Address
from clusterd.protocol.messages import to_map
from clusterd.protocol.requests import CheckHost, ServeSegments
from clusterd.types import HostId, HostState
from clusterd.units import counted, duration, size

DISK_LEAST_BYTES = 10 << 30
SHM_LEAST_SHARE = 1 / 8
"""Share of the host's memory that /dev/shm should have: containers have 64 MB, and migrations go through it."""

SKEW_MOST_S = 5.0

COPY_LEAST_SHARE = 0.5
"""Share of a PCIe slot's rate that copies from and to pinned memory should reach; four fifths are usual."""

Row = dict[str, Any]
Answer = dict[str, Any] | ClusterError


class HostChecks:
    """Runs checks on hosts through their agents."""

    def __init__(self, engine: Engine, hosts: HostRegistry, accounts: Accounts) -> None:
        self._engine, self._hosts, self._accounts = engine, hosts, accounts

    async def host_check(self, peer: Peer, hosts: Sequence[str] = (), python: str | None = None) -> list[Row]:
        """Check these hosts, or all; returns rows of `host`, `check`, `state` (ok, warning, failed) and `said`.

        Args:
            python: an interpreter or environment, as jobs name it, that is to be there with a torch that will do. It
                is executed under the account of the user's jobs.
        Raises:
            ClusterError: `python` is given, and jobs of this user do not run here.
        """
        account = ""
        try:
            account = self._accounts.of(peer)
        except ClusterError:
            if python is not None:
                raise
        state = self._engine.state
        asked = [admission.find_host(state, name) for name in hosts] or list(state.hosts.values())
        names = {host.id for host in asked}
        up = [host for host in state.hosts.values() if host.state is HostState.UP]
        places: dict[HostId, Address] = {}

        async def serve_segments(host: Host) -> Row:
            places[host.id] = await self._hosts.slice_server(host.id, ServeSegments())
            return {}

        await self._each([host for host in up if host.facts is not None], serve_segments)

        async def check(host: Host) -> Row:
            # Both ways, for firewalls are of one host each; who was not asked about tries only who was.
            towards = set(places) if host.id in names else names
            peers: dict[str, Address] = {
                name: place for name, place in places.items() if name in towards and name != host.id
            }
            mine = python if host.id in names else None
            # A context on a GPU that a job uses takes memory that the job may need.
            idle = [d.uuid for d in host.devices if d.kind == "cuda" and not d.foreign and d.id not in state.holders]
            request = CheckHost(peers, mine, tuple(idle) if mine is not None else ())
            of = account if mine is not None else ""
            answer = await self._hosts.request(host.id, request, timeout_s=None, account=of)
            if of != account and host.reaches(account):  # the login that counts is that of the user's jobs
                own = await self._hosts.request(host.id, CheckHost({}), timeout_s=None, account=account)
                answer = replace(answer, login_fault=own.login_fault, login_note=own.login_note)
            return to_map(answer)

        answers = await self._each(up, check)
        return [
            row
            for host in asked
            for row in (*self._of(host, answers.get(host.id), python), *_network(host.id, answers, places, names))
        ]

    async def _each(self, hosts: Iterable[Host], ask: Callable[[Host], Awaitable[Row]]) -> dict[HostId, Answer]:
        """Reply of each host, or its error."""
        answers: dict[HostId, Answer] = {}

        async def one(host: Host) -> None:
            try:
                answers[host.id] = await ask(host)
            except ClusterError as error:
                answers[host.id] = error

        async with anyio.create_task_group() as group:
            for host in hosts:
                group.start_soon(one, host)
        return answers

    def _of(self, host: Host, answer: Answer | None, python: str | None) -> Iterator[Row]:
        """Rows about one host by itself."""
        link = self._hosts.link_row(host.id)
        if host.state is not HostState.UP or host.facts is None:
            yield _row(host.id, "connection", "failed", f"{host.state.value}: {host.why or 'not connected yet'}")
            return
        up = f"up for {duration(max(time.time() - host.since_s, 0.0))}, reached as {link.get('address', host.id)}"
        yield _row(host.id, "connection", "ok", f"{up}; other hosts reach it at {host.facts.address}")
        now = {"disk_free_bytes": answer.get("disk_free_bytes")} if isinstance(answer, dict) else {}
        facts = {**link.get("facts", {}), **{k: v for k, v in now.items() if v is not None}}
        yield from _facts(host, facts)
        if isinstance(answer, ClusterError):
            yield _row(host.id, "agent", "failed", str(answer))
        elif answer is not None:
            yield from _tried(host.id, answer, python)
            yield from _computed(host, answer, facts.get("gpus", ()))


def _row(host: str, check: str, state: str, text: str) -> Row:
    return {"host": host, "check": check, "state": state, "said": text}


def _facts(host: Host, facts: Mapping[str, Any]) -> Iterator[Row]:
    """Rows that follow from the host's facts."""
    names = Counter(d.name if d.kind == "cuda" else "CPU device" for d in host.devices)
    there = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    if facts.get("gpu_error"):
        yield _row(host.id, "devices", "failed", f"{facts['gpu_error']}: offered are {there}")
    else:
        yield _row(host.id, "devices", "ok", there)
    for runtime, fault in sorted(facts.get("runtimes", {}).items()):
        text = f"{runtime} cannot be used: {fault}" if fault else f"{runtime} runs containers of jobs"
        yield _row(host.id, "containers", "warning" if fault else "ok", text)
    for device_id, why in host.reported_faults.items():
        again = f"reset or replace it; clusterd host undrain {host.id} then offers it again"
        yield _row(host.id, "devices", "failed", f"{device_id} is not given to jobs: {why}; {again}")
    users = [process for gpu in facts.get("gpus", ()) for process in gpu["processes"]]
    if any(process.get("memory_bytes") is None for process in users):
        what = "the driver does not report memory by process"
        yield _row(host.id, "devices", "warning", f"{what}: a job above its share of a device is not noticed")
    for gpu in facts.get("gpus", ()):
        for note in gpu.get("notes", ()):  # absent from what an older agent reports
            yield _row(host.id, "devices", "warning", f"{_gpu(host, gpu['uuid'])}: {note}")
    for device in host.devices:
        if device.foreign and device.id not in host.reported_faults:
            yield _row(host.id, "devices", "warning", f"{device.id} is not given to jobs: {device.foreign}")
    shm, memory = facts.get("shm_bytes", 0), facts.get("memory_bytes", 0)
    shared_memory = f"{size(shm)} of shared memory"
    if shm < SHM_LEAST_SHARE * memory:
        slow = "states beyond that move through the disk; in a container, --shm-size gives more"
        yield _row(host.id, "memory", "warning", f"{shared_memory} beside {size(memory)} of memory: {slow}")
    else:
        yield _row(host.id, "memory", "ok", f"{size(memory)}, {shared_memory}")
    free = f"{size(facts.get('disk_free_bytes', 0))} free where jobs write"
    enough = facts.get("disk_free_bytes", 0) >= DISK_LEAST_BYTES
    yield _row(host.id, "disk", "ok" if enough else "warning", free)
    skew_s = facts.get("clock_skew_s")
    if skew_s is not None:
        good = abs(skew_s) <= SKEW_MOST_S
        text = f"{skew_s:+.2f} s from this machine's" + ("" if good else ": times in its logs are off by that")
        yield _row(host.id, "clock", "ok" if good else "warning", text)


def _tried(host: HostId, answer: Row, python: str | None) -> Iterator[Row]:
    """Rows that follow from what the agent tried."""
    if answer["ends_at_logout"]:
        what = "logind ends what is left of a login (KillUserProcesses): agents and jobs end with the connection"
        yield _row(host, "logout", "failed", f"{what}; an administrator can name its user in KillExcludeUsers")
    elif answer["ends_at_logout"] is not None:
        yield _row(host, "logout", "ok", "what runs outlives the connection")
    if answer.get("lingers") is not None:
        yield _limits(host, answer)
    if (fault := answer.get("login_fault")) is not None:
        note = answer.get("login_note", "")
        state = "failed" if fault else "warning" if note else "ok"
        yield _row(host, "login", state, fault or note or "jobs get the variables of the account's login")
    if python is not None:
        found = answer["environment"]
        has = ", ".join(f"{what} {found[what]}" for what in ("python", "torch") if what in found)
        if found.get("cuda"):
            has += f" for CUDA {found['cuda']}, which sees {found['gpus']} GPUs"
        state = "failed" if "error" in found else "ok"
        yield _row(host, "python", state, ": ".join(filter(None, (python, has, found.get("error")))))


def _computed(host: Host, answer: Row, gpus: Sequence[Row]) -> Iterator[Row]:
    """Rows about what idle GPUs computed and copied, alone and with each other."""
    kernels: Row = answer.get("kernels", {})
    able = [result["seconds"] for result in kernels.values() if "seconds" in result]
    for uuid, result in kernels.items():
        if "error" in result:
            yield _row(host.id, "compute", "failed", f"{_gpu(host, uuid)} does not compute: {result['error']}")
    if able:
        yield _row(host.id, "compute", "ok", f"{counted(len(able), 'idle GPU')} computed within {max(able):.1f} s")
    slots = {g["uuid"]: slot_bytes_per_s(g.get("pcie_generation", 0), g.get("pcie_width", 0)) for g in gpus}
    copied = {uuid: result for uuid, result in kernels.items() if "to_bytes_per_s" in result}
    for uuid, result in copied.items():  # absent from the reply of an older agent
        to, back, slot = result["to_bytes_per_s"], result["from_bytes_per_s"], slots.get(uuid, 0.0)
        rate = f"{_gpu(host, uuid)} copies {to / 1e9:.1f} GB/s from pinned memory and {back / 1e9:.1f} GB/s to it"
        is_slow = min(to, back) < COPY_LEAST_SHARE * slot
        why = f" of the {slot / 1e9:.0f} of its slot: `nvidia-smi -q` shows the link's width and generation now"
        yield _row(host.id, "copies", "warning" if is_slow else "ok", rate + (why if is_slow else ""))
    if copied and answer.get("small_pages"):
        remedy = "`mount -o remount,huge=within_size /dev/shm` as root: moves of jobs then prepare faster"
        yield _row(host.id, "memory", "ok", f"/dev/shm has small pages; {remedy}")
    access, reduced = answer.get("access") or {}, answer.get("all_reduce")
    for pair in access.get("without_access", ()):
        apart = " and ".join(_gpu(host, uuid) for uuid in pair)
        text = "do not reach each other's memory: their collectives go through the host's; in a virtual machine or with"
        yield _row(host.id, "access", "warning", f"{apart} {text} an IOMMU, its settings forbid it")
    if "error" in access:
        yield _row(host.id, "access", "failed", f"its GPUs cannot be asked for access: {access['error']}")
    elif access.get("without_access") == []:
        yield _row(host.id, "access", "ok", "its GPUs reach each other's memory")
    if reduced is not None and "error" in reduced:
        yield _row(host.id, "nccl", "failed", f"an all-reduce over its GPUs fails: {reduced['error']}")
    elif reduced is not None:
        yield _row(host.id, "nccl", "ok", f"an all-reduce over {len(able)} GPUs took {reduced['seconds']:.1f} s")


def _gpu(host: Host, uuid: str) -> str:
    """Id of a GPU of the host; its uuid where it is offered no more."""
    return next((device.id for device in host.devices if device.uuid == uuid), uuid)


def _limits(host: HostId, answer: Row) -> Row:
    """Row about the enforcement of memory and CPU shares."""
    enforced = answer["enforced"]
    if enforced is not None and len(enforced) == 2:
        held = "jobs are held to the host memory that they ask for, and to their share of cores"
        return _row(host, "limits", "ok", held)
    lacks = "more than its share of cores" if "memory" in (enforced or ()) else "more host memory than a job asks for"
    if enforced is None and not answer["lingers"]:
        remedy = "`loginctl enable-linger` there and a new agent (`kill` this one: its jobs go on) mend that"
        remedy += "; a container needs a writable /sys/fs/cgroup"
    else:
        remedy = "an administrator can delegate the controllers, of cgroup version 2, to its user"
        remedy += " (Delegate=memory cpu in user@.service)"
    return _row(host, "limits", "warning", f"nothing stops a job from using {lacks}; {remedy}")


def _network(
    host: HostId, answers: Mapping[HostId, Answer], places: Mapping[HostId, Sequence[Any]], asked: Container[HostId]
) -> Iterator[Row]:
    """Rows about connections between hosts, both ways."""
    answer = answers.get(host)
    if not isinstance(answer, dict):
        return
    tries = [(host, HostId(other), text) for other, text in answer["peers"].items()]
    reached = [text["seconds"] for _, _, text in tries if "seconds" in text]
    if reached:
        how_many = f"{len(reached)} of {len(tries)} hosts" if len(tries) > 1 else "the other host"
        yield _row(host, "network", "ok", f"reaches {how_many} within {max(reached) * 1e3:.1f} ms")
    tries += [
        (other, host, its["peers"][host])
        for other, its in answers.items()
        if other not in asked and isinstance(its, dict) and host in its["peers"]
    ]
    for start, end, text in tries:
        if "error" in text:
            address, port = places[end]
            why = f"{start} does not reach {end} at {address}:{port}: {text['error']}"
            yield _row(host, "network", "failed", f"{why}; jobs on both need TCP between them, on any port")
