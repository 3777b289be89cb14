"""Errors meant for a user, by cause.

::

    ClusterError                exit 1
    ├── UsageError              exit 2    invalid input of the user
    │   └── ConfigError                   an invalid file: names file and key
    ├── DaemonAbsent            exit 69   no daemon answers on the socket
    ├── TryLater                exit 75   valid, but not possible now
    ├── HostError                         a failure of a host or its network
    │   ├── HostKeyChanged
    │   ├── HostKeyUnknown
    │   └── AgentLost
    └── InvalidTransition                 a bug in clusterd
"""

from __future__ import annotations


class ClusterError(Exception):
    """Base class of all errors meant for a user; the message is complete without a traceback."""

    exit_code = 1
    is_permanent = False  # a retry would fail alike
    is_of_job = False  # any other host would fail alike, too
    is_full_disk = False  # of a host: a retry succeeds once somebody has made room


class UsageError(ClusterError):
    """The user's request is invalid."""

    exit_code = 2


class ConfigError(UsageError):
    """A file of the user has an invalid value; the message names file and key."""


class DaemonAbsent(ClusterError):
    """No daemon answers on the socket."""

    exit_code = 69


class TryLater(ClusterError):
    """The request is valid, but cannot be served now."""

    exit_code = 75


class HostError(ClusterError):
    """A host or the connection to it failed."""


class HostKeyUnknown(HostError):
    """No known_hosts file holds a key of this host."""


class HostKeyChanged(HostError):
    """The host presents a key other than the known one."""


class AgentLost(HostError):
    """The connection to a host's agent ended before the reply arrived."""


def without_host(host: str, error: Exception) -> str:
    """Message of a host's error without the leading host name."""
    return str(error).removeprefix(f"{host}: ")


class NotStarted(HostError):
    """A host could not start the requested ranks."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(why)
        self.host = host


class InvalidTransition(ClusterError):
    """A state machine has no such transition: a bug in clusterd; the message holds the history."""


def of_exit_code(exit_code: int | None, message: str) -> ClusterError:
    """Error of a command's exit code, as the daemon sends it to clients."""
    kinds = {kind.exit_code: kind for kind in (UsageError, DaemonAbsent, TryLater)}
    return kinds.get(exit_code or 1, ClusterError)(message)


def first_of(error: BaseException) -> BaseException:
    """First exception inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):  # noqa: F821 - not called on hosts, some of which have Python 3.10
        error = error.exceptions[0]
    return error
