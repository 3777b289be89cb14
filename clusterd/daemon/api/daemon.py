"""Verbs about the daemon itself, and about the accounts of its users on the hosts."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio

from clusterd import __version__, projection, protocol, rows
from clusterd.config import ACCOUNT_NAME, Config, agreements
from clusterd.core import events as e
from clusterd.core.host import Host
from clusterd.core.state import State
from clusterd.daemon.access import Peer
from clusterd.daemon.api.watch import Feed
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.settings import LiveSettings
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.errors import ClusterError, UsageError
from clusterd.ssh.host import LinkState
from clusterd.ssh.hostkeys import LoginKey
from clusterd.trusted_paths import account_name
from clusterd.types import JobState

NOTICE_MAX = 300
"""Characters of a notice, which terminals show in a few lines."""


class DaemonVerbs:
    """Greets clients, shows the daemon's state, reloads its settings, and stops it.

    Args:
        web: returns where pages are served.
    """

    def __init__(
        self,
        settings: LiveSettings,
        engine: Engine,
        archived: ArchivedJobs,
        feed: Feed,
        stop: anyio.Event,
        web: Callable[[], dict[str, str] | None],
    ) -> None:
        self._settings, self._engine, self._archived, self._feed = settings, engine, archived, feed
        self._stop, self._web = stop, web
        self._started_s = time.time()

    async def hello(self, peer: Peer, protocol_version: int = protocol.VERSION) -> dict[str, Any]:
        """Negotiate the protocol version."""
        if protocol_version != protocol.VERSION:
            raise ClusterError(
                f"the daemon ({__version__}) speaks protocol {protocol.VERSION}, this client {protocol_version}: "
                "use the clusterd command of the daemon's version"
            )
        return {
            "version": __version__,
            "protocol": protocol.VERSION,
            "user": peer.user,
            "is_operator": peer.is_operator,
            "is_reader": peer.is_reader,
        }

    async def status(self, peer: Peer) -> rows.Status:
        """Status of the daemon and its journal."""
        return self.status_row()

    def status_row(self) -> rows.Status:
        """Status of the daemon and its journal, for any user."""
        state, config = self._engine.state, self._settings()
        # Most of thousands of jobs are queued, and `value` is slow.
        others = Counter(job.state.value for job in state.jobs.values() if job.state is not JobState.QUEUED)
        queued = Counter({JobState.QUEUED.value: len(state.jobs) - others.total()})
        return rows.Status(
            version=__version__, json_version=projection.JSON_VERSION, pid=os.getpid(), started_s=self._started_s,
            epoch=state.epoch, state_dir=str(config.state_dir), socket=str(config.socket),
            workdir_bytes_max=config.workdir_bytes_max,
            config=str(self._settings.file) if self._settings.file else None, policy=self._engine.scheduler.policy.name,
            accounts=config.accounts, account=daemon_account(), jobs=dict(self._archived.counts + others + queued),
            hosts={h.id: h.state.value for h in state.hosts.values()},
            devices=sum(len(h.devices) for h in state.hosts.values()), leased=len(state.holders),
            events=self._feed.number, scheduling_s=self._engine.scheduling_s,
            recovering=sorted(state.recovering), trouble=self._engine.trouble, set_aside=self._engine.set_aside,
            notice=state.notice, web=self._web(),
        )  # fmt: skip

    async def reload(self, peer: Peer) -> dict[str, Any]:
        """Read the settings file again: roles, tenants and limits take effect, other changes at the next start."""
        return await self.read_again()

    async def read_again(self) -> dict[str, Any]:
        """Settings that have changed, and those that wait for the next start.

        Raises:
            ConfigError: the file is wrong; the settings stay as they are.
        """
        changed, later = self._settings.reload()
        if changed:
            await self._engine.post(e.SettingsReloaded(at_s=time.time(), **agreements(self._settings())))
        file = str(self._settings.file) if self._settings.file else None
        return {"config": file, "changed": changed, "at_next_start": later}

    async def notice(self, peer: Peer, text: str) -> None:
        """Show all users a text until another one replaces it; an empty one takes it back."""
        if not text.isprintable() or len(text) > NOTICE_MAX:
            raise UsageError(f"a notice is one line of at most {NOTICE_MAX} characters: leave out what does not print")
        await self._engine.post(e.NoticePosted(at_s=time.time(), text=text, by=peer.user))

    async def stop(self, peer: Peer) -> dict[str, Any]:
        """Stop the daemon; jobs go on."""
        state = self._engine.state
        running = [state.jobs[job].spec.name for job in state.active]
        self._stop.set()
        return {"running": running, "pid": os.getpid()}


LOOK_EVERY_S = 0.1
LOGIN_WAIT_S = 20.0
"""Wait for the hosts that have not answered a login yet."""


class Accounts:
    """Accounts of the users of this daemon, and the verb by which a user sees the own logins."""

    def __init__(self, config: Callable[[], Config], state: State, hosts: HostRegistry, key: LoginKey) -> None:
        self._config, self._state, self._hosts, self._key = config, state, hosts, key

    def of(self, peer: Peer) -> str:
        """Account on the hosts of a user's jobs; "": the daemon's own.

        Raises:
            ClusterError: the operator has not said under which account jobs of others run.
        """
        if peer.uid == os.getuid() or self._config().accounts == "shared":
            return ""
        if self._config().accounts is None:
            raise ClusterError(
                f"jobs of {peer.user} would run as {daemon_account()}, with all of that account's files and secrets: "
                'its operator sets accounts = "own" or "shared" under [daemon] (docs/security.md)'
            )
        settings = self._config().users.get(peer.user)
        account = (settings.account if settings is not None else "") or peer.user
        if not ACCOUNT_NAME.fullmatch(account):
            raise UsageError(f"{account!r} is no name of an account: an operator sets [users.{peer.user}] account")
        return account

    async def login(self, peer: Peer) -> dict[str, Any]:
        """Dial the user's account on every host now; returns the key to be authorised, and the result for each host."""
        account = self.of(peer)
        if not account:
            return {"account": "", "daemon": daemon_account(), "shared": peer.uid != os.getuid(), "hosts": {}}
        links = {host: self._hosts.accounts.get(host, account) for host in self._state.hosts}
        before = {host: link.state for host, link in links.items() if link is not None}
        await self._hosts.log_in(account, again=True)
        with anyio.move_on_after(LOGIN_WAIT_S):
            while any(self._is_dialed(h, account, before.get(h.id)) for h in self._state.hosts.values()):  # noqa: ASYNC110
                await anyio.sleep(LOOK_EVERY_S)
        return {
            "account": account,
            "key": self._key.authorized_line() if self._config().become == "ssh" else None,
            "hosts": {host.id: self._why_away(host, account) for host in self._state.hosts.values()},
        }

    def _why_away(self, host: Host, account: str) -> str:
        """Reason why an account's agent is not connected, with the number of failures; empty: it is."""
        why = host.logins.get(account, "not connected yet")
        return projection.repeated(self._hosts.accounts.failures(host.id, account)) or why if why else ""

    def _is_dialed(self, host: Host, account: str, before: LinkState | None) -> bool:
        """True until the try that was just asked for has a result."""
        link = self._hosts.accounts.get(host.id, account)
        if link is None or host.logins.get(account) == "":
            return False
        return link.state.name != "waiting" or link.state is before


def daemon_account() -> str:
    """Name of the account that the daemon runs as."""
    return account_name(os.getuid())
