"""What can go wrong, by whose fault it is.

::

    ClusterError                exit 1
    ├── UsageError              exit 2    the user's input: what, where, what to do
    │   └── ConfigError                   a file of the user's: names file and key
    ├── DaemonAbsent            exit 69   nobody answers on the socket
    ├── TryLater                exit 75   right, but not now
    ├── HostError                         a machine's fault, or its network's
    │   ├── HostKeyChanged
    │   ├── HostKeyUnknown
    │   └── AgentLost
    └── InvalidTransition                 our bug; carries the story
"""

from __future__ import annotations


class ClusterError(Exception):
    """Root of all errors meant for a person; the message is complete and needs no traceback."""

    exit_code = 1
    is_permanent = False  # the same would be said again


class UsageError(ClusterError):
    """What the user asked for cannot be asked for."""

    exit_code = 2


class ConfigError(UsageError):
    """A file of the user's says something that cannot be; the message names file and key."""


class DaemonAbsent(ClusterError):
    """No daemon answers on the socket."""

    exit_code = 69


class TryLater(ClusterError):
    """The request is right, but cannot be served now."""

    exit_code = 75


class HostError(ClusterError):
    """A host, or the way to it, failed."""


class HostKeyUnknown(HostError):
    """No known_hosts file holds a key of this host."""


class HostKeyChanged(HostError):
    """The host shows another key than the known one."""


class AgentLost(HostError):
    """The connection to a host's agent ended before the answer came."""


def said_by(host: str, error: Exception) -> str:
    """The words of a host's refusal, for where the host is named already."""
    return str(error).removeprefix(f"{host}: ")


class NotStarted(HostError):
    """A host could not start the ranks that it was asked for."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(why)
        self.host = host


class InvalidTransition(ClusterError):
    """A state machine was asked for a step it does not have: a bug of ours, with its story."""
