"""Data sets of jobs: each host serves its folders and knows the addresses of the others'."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable

import anyio.abc

from clusterd.core import events as e
from clusterd.core.data_locality import data_of, places_of
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.process import guarded
from clusterd.errors import AgentLost, ClusterError, TryLater
from clusterd.protocol.launch import Address, DatasetSpec
from clusterd.protocol.requests import ServeDataset, SetDatasets
from clusterd.types import HostId, JobSpec

log = logging.getLogger(__name__)

Where = dict[str, DatasetSpec]
"""Data sets by name."""


class DataSets:
    """Sets up serving and reading of data sets; holds no state that a restart would lose."""

    def __init__(self, engine: Engine, hosts: HostRegistry, key: str, tasks: anyio.abc.TaskGroup) -> None:
        """`key`: secret of the cluster, from which each job's tokens are derived."""
        self._engine = engine
        self._state = engine.state
        self._hosts = hosts
        self._key = key.encode()
        self._tasks = tasks

    async def where(self, job: str, spec: JobSpec, hosts: Iterable[HostId]) -> dict[HostId, Where]:
        """Data sets of a job as seen from each host; the hosts that have them serve them from now on.

        Raises:
            TryLater: no host that has one can be reached.
            ClusterError: a host that is named has no such folder, or is not part of the cluster.
        """
        found: dict[HostId, Where] = {host: {} for host in hosts}
        for name, text in data_of(spec).items():
            token = self.token(f"{job}/{name}")
            places = places_of(text)
            paths = {host: next((path for at, path in places if at in (None, host)), None) for host in found}
            serving: tuple[Address, ...] = ()
            if None in paths.values():
                serving = await self._serve_all(name, places, token, spec.account)
                if not serving:
                    raise TryLater(f"no host that has the data set {name!r} is connected ({text})")
            for host, mine in paths.items():
                found[host][name] = DatasetSpec(mine, serving if mine is None else (), token)
        return found

    def handled(self, events: Iterable[e.Event]) -> None:
        """Begin to set up serving on hosts whose agents connected."""
        for event in events:
            if isinstance(event, e.HostConnected | e.AccountConnected):
                self._tasks.start_soon(guarded, self._set_up_again, event.host)

    async def _set_up_again(self, host: HostId) -> None:
        """Set up serving on a host again after its agent restarted, and send its new address to readers."""
        for job_id in list(self._state.active):
            job = self._state.jobs[job_id]
            if job.attempt is None or not any(at == host for t in data_of(job.spec).values() for at, _ in places_of(t)):
                continue
            try:
                by_reader = await self.where(job_id, job.spec, job.attempt.all_hosts)
            except ClusterError as error:
                log.info("the ranks of %s are not told where their data is: %s", job_id, error)
                continue
            for reader, known in by_reader.items():
                try:
                    await self._hosts.request(reader, SetDatasets(job_id, job.attempt.number, known))
                except ClusterError as error:
                    log.info("%s is not told where the data of %s is: %s", reader, job_id, error)

    async def _serve_all(
        self, name: str, places: Iterable[tuple[str | None, str]], token: str, account: str
    ) -> tuple[Address, ...]:
        answers = [await self._serve(name, HostId(str(at)), path, token, account) for at, path in places]
        return tuple(address for address in answers if address is not None)

    async def _serve(self, name: str, host: HostId, path: str, token: str, account: str) -> Address | None:
        if host not in self._state.hosts:
            raise ClusterError(
                f"the data set {name!r} is on {host}, which is no host of ours: clusterd host add {host}"
            )
        try:
            return await self._hosts.slice_server(host, ServeDataset("", name, path, token), account=account)
        except AgentLost:
            return None

    def token(self, name: str) -> str:
        """Token for what a name stands for, the same after a restart."""
        return hmac.new(self._key, name.encode(), hashlib.sha256).hexdigest()[:32]
