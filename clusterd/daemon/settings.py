"""Validation of settings that depends on this version and this machine."""

from __future__ import annotations

import grp
import importlib.util
from itertools import chain

from clusterd.config import Config
from clusterd.core.policies import POLICIES
from clusterd.errors import ConfigError


def refuse_unknown(config: Config, where: str) -> None:
    """Refuse unknown names; `where`: their origin, for the message.

    Raises:
        ConfigError: naming the key and what would be right.
    """
    if config.policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"{where}: [daemon]: policy is {config.policy!r}; it must be one of {known}")
    if config.notify is not None and (urls := [*config.notify.urls, *chain(*config.notify.users.values())]):
        if importlib.util.find_spec("apprise") is None:
            raise ConfigError(f"{where}: [notify]: urls need apprise: pip install 'clusterd[notify]', or set a command")
        import apprise

        for url in urls:
            if apprise.Apprise.instantiate(url, suppress_exceptions=True) is None:
                scheme = url.partition("://")[0]
                raise ConfigError(f"{where}: [notify]: urls: apprise does not understand one of {scheme}://")
    if config.socket_group:
        try:
            grp.getgrnam(config.socket_group)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{where}: [daemon]: socket_group is {config.socket_group!r}; there is no such group on this machine"
            ) from None
