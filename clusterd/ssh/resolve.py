"""Route to a host as OpenSSH resolves it: by ``ssh -G``; its configuration files are never parsed here."""

from __future__ import annotations

import asyncio
import getpass
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from clusterd.errors import HostError, UsageError

TIMEOUT_S = 20.0
"""`ssh -G` may run `Match exec` programs and look names up."""

HOPS_MAX = 8

_SAFE_HOST = re.compile(r"[A-Za-z0-9_.:%-]+")


@dataclass(frozen=True, slots=True)
class Route:
    """Complete connection parameters of one host, without defaults left open."""

    name: str  # name as the user wrote it, used in errors
    host: str  # name or address to connect to
    port: int
    user: str
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    identity_agent: str | None = None  # path of the agent's socket; None: no agent
    identities_only: bool = False
    via: Route | None = None  # jump host before this one
    proxy_command: str | None = None
    host_key_alias: str | None = None
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    connect_timeout_s: float = 15.0
    remedy: str = ""  # advice where the host refuses the keys; "": how to make ``ssh NAME`` work
    trusted_keys: tuple[str, ...] = field(default=(), repr=False)  # in OpenSSH's public form, for embedded hosts

    @property
    def lookup_name(self) -> str:
        """Name of the host in known_hosts files."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"

    @property
    def hops(self) -> tuple[Route, ...]:
        """All routes on the path, in the order of connection; this one is last."""
        return (*(self.via.hops if self.via else ()), self)

    @property
    def command(self) -> str:
        """The ``ssh`` that people type for it."""
        address = parse_address(self.name)
        return f"ssh -p {address.port} {replace(address, port=None)}" if address.port else f"ssh {self.name}"

    def __str__(self) -> str:
        place = str(Address(self.host, self.user, self.port))
        return place if self.name in (self.host, place) else f"{self.name} ({place})"


async def resolve(
    address: Address, *, config: Path | None = None, program: str = "ssh", timeout_s: float = TIMEOUT_S
) -> Route:
    """Resolve the route that ``ssh ADDRESS`` would take, with each jump host resolved by its own name.

    Args:
        config: file to read in place of the user's and the system's configuration, as by ``ssh -F``.
    Raises:
        HostError: no ssh program, a configuration that it refuses (with its own words), or jumps that go in circles.
    """
    return await _resolve(address, config, program, timeout_s, ())


async def _resolve(
    address: Address,
    config: Path | None,
    program: str,
    timeout_s: float,
    seen: tuple[str, ...],
    jump: str | None = None,
) -> Route:
    name = str(address)
    if name in seen or len(seen) >= HOPS_MAX:
        raise HostError(
            f"{seen[0]}: its ProxyJump goes in circles ({' -> '.join((*seen, name))}); "
            "correct it in your SSH configuration"
        )
    options = await _ask(address, config, program, timeout_s)
    route = _route(name, options)
    jumps = options.get("proxyjump", [""])[-1] if jump is None else jump
    if not jumps or jumps.lower() == "none":
        return route
    # As in ssh, each hop is reached through those before it, and the first one's own configuration may add more.
    before, _, last = jumps.rpartition(",")
    try:
        hop = parse_address(last.removeprefix("ssh://"))
    except UsageError as error:
        raise HostError(f"{name}: its ProxyJump is {jumps!r}: {error}") from error
    via = await _resolve(hop, config, program, timeout_s, (*seen, name), before or None)
    return replace(route, via=via, proxy_command=None)


async def _ask(address: Address, config: Path | None, program: str, timeout_s: float) -> dict[str, list[str]]:
    command = [program, "-G"]
    if config is not None:
        command += ["-F", str(config)]
    if address.user:
        command += ["-l", address.user]
    if address.port:
        command += ["-p", str(address.port)]
    command += ["--", address.host]
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except FileNotFoundError:
        raise HostError(
            f"{address}: there is no `{program}` program on this machine, which reads your SSH configuration; "
            "install OpenSSH's client"
        ) from None
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        raise HostError(
            f"{address}: `ssh -G` gave no answer within {timeout_s:.0f} s; "
            "look for `Match exec` lines in your SSH configuration"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        messages = [
            line for line in errors.decode(errors="replace").splitlines() if not line.startswith("Pseudo-terminal")
        ]
        raise HostError(
            f"{address}: `ssh -G` refuses: {messages[0] if messages else f'exit code {process.returncode}'}"
        )
    options: dict[str, list[str]] = {}
    for line in output.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value.strip())
    return options


def _route(name: str, options: dict[str, list[str]]) -> Route:
    def last(key: str, default: str = "") -> str:
        return options.get(key, [default])[-1]

    def expand(path: str) -> str:
        return _expand(fill(path, {"h": host, "r": last("user"), "p": last("port"), "n": name}))

    host = last("hostname")
    if not _SAFE_HOST.fullmatch(host):
        raise HostError(f"{name}: its HostName {host!r} is no host name; correct it in your SSH configuration")
    timeout = last("connecttimeout", "none")
    proxy_command = last("proxycommand", "none")
    return Route(
        name=name,
        host=host,
        port=int(last("port", "22")),
        user=last("user"),
        identity_files=tuple(expand(f) for f in options.get("identityfile", []) if f != "none"),
        certificate_files=tuple(expand(f) for f in options.get("certificatefile", []) if f != "none"),
        identity_agent=_agent(expand(last("identityagent", "SSH_AUTH_SOCK"))),
        identities_only=last("identitiesonly") == "yes",
        proxy_command=None if proxy_command == "none" else proxy_command,
        host_key_alias=last("hostkeyalias") or None,
        user_known_hosts=_files(last("userknownhostsfile")),
        global_known_hosts=_files(last("globalknownhostsfile")),
        connect_timeout_s=float(timeout) if timeout.isdigit() else 15.0,
    )


def _agent(given: str) -> str | None:
    """Path of the SSH agent's socket: given, or in the environment or a variable that the configuration names."""
    if given.lower() == "none":
        return None
    if given == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if given.startswith("$"):
        return os.environ.get(given[1:].strip("{}")) or None
    return _expand(given)


def _files(text: str) -> tuple[str, ...]:
    """Split a list of paths that ssh prints without quotes: one path with a space, or several paths."""
    if " " in text and os.path.exists(_expand(text)):
        return (_expand(text),)
    return tuple(_expand(part) for part in text.split() if part.lower() != "none")


def _expand(path: str) -> str:
    return os.path.expanduser(path.strip('"'))


def fill(text: str, values: dict[str, str]) -> str:
    """Replace ssh's tokens (``%h``) in a text; section TOKENS of its man page names them."""
    known = {"%": "%", "d": os.path.expanduser("~"), "u": getpass.getuser(), "i": str(os.getuid()), **values}
    return re.sub(r"%(.)", lambda token: known.get(token[1], token[0]), text)


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


def parse_address(text: str) -> Address:
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
