"""Accounts of jobs on the hosts: which one a user's jobs run under, and the user's logins there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import anyio

from clusterd import projection
from clusterd.config import ACCOUNT_NAME, Config
from clusterd.core.host import Host
from clusterd.core.state import State
from clusterd.daemon.access import Peer
from clusterd.daemon.hosts.registry import HostRegistry
from clusterd.errors import ClusterError, UsageError
from clusterd.ssh.host import LinkState
from clusterd.ssh.hostkeys import LoginKey
from clusterd.trusted_paths import account_name

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
