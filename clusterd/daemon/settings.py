"""Validation of settings that depends on this version and this machine."""

from __future__ import annotations

import grp
import importlib.util
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

from clusterd.config import Config
from clusterd.core.policies import POLICIES
from clusterd.errors import ConfigError

RELOADED = ("operators", "readers", "tenants", "limits", "users", "fair_share_half_life_s", "device_weights")
"""Settings that `clusterd reload` changes; all others are read at the start."""


class LiveSettings:
    """The settings in force, by calling it, some of which are read again while the daemon serves.

    Args:
        load: reads the settings.
    """

    def __init__(self, config: Config, file: Path | None, load: Callable[[], Config]) -> None:
        self.file = file
        self._config, self._load = config, load

    def __call__(self) -> Config:
        return self._config

    def reload(self) -> tuple[list[str], list[str]]:
        """Read the settings again; returns those that changed, and those that change at the next start.

        Raises:
            ConfigError: they are wrong, and stay as they are.
        """
        read = self._load()
        refuse_unknown(read, str(self.file))
        differ = [f.name for f in fields(Config) if getattr(read, f.name) != getattr(self._config, f.name)]
        changed = [name for name in differ if name in RELOADED]
        self._config = replace(self._config, **{name: getattr(read, name) for name in changed})
        return changed, [name for name in differ if name not in RELOADED]


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
