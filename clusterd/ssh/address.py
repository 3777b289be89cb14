"""Host addresses as users write them: an alias of their SSH configuration, or ``USER@HOST:PORT``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterd.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_IPV6 = re.compile(r"[0-9A-Fa-f:]+(\.[0-9.]+)?(%[A-Za-z0-9_.-]+)?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\+-]*\$?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host as the user wrote it; the SSH configuration supplies what is missing."""

    host: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        if self.port is None:
            return f"{user}{self.host}"
        return f"{user}[{self.host}]:{self.port}" if ":" in self.host else f"{user}{self.host}:{self.port}"


def parse(text: str) -> Address:
    """Parse an address: ``ALIAS``, ``USER@HOST``, ``HOST:PORT``, ``USER@[IPV6]:PORT``, or an IPv6 address.

    Text that a program could take for an option, or that holds characters no name has, is refused here, so that every
    later command line is safe.

    Raises:
        UsageError: the text is no address; the message says why.
    """
    user, at, rest = text.strip().rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(f"{text!r} is no host: {user!r} is no user name; write ALIAS or USER@HOST[:PORT]")
    host, port = _split_port(text, rest)
    if not (_NAME.fullmatch(host) or (":" in host and _IPV6.fullmatch(host))) or len(host) > 255:
        raise UsageError(f"{text!r} is no host: {host!r} is no name; write ALIAS or USER@HOST[:PORT]")
    return Address(host, user or None, port)


def _split_port(text: str, rest: str) -> tuple[str, int | None]:
    if rest.startswith("["):
        host, closed, after = rest[1:].partition("]")
        if not closed or (after and not after.startswith(":")):
            raise UsageError(f"{text!r} is no host: write an IPv6 address with a port as [ADDRESS]:PORT")
        port = after[1:] if after else None
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    else:
        host, port = rest, None
    if port is None:
        return host, None
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise UsageError(f"{text!r} is no host: {port!r} is no port; a port is a number from 1 to 65535")
    return host, int(port)
