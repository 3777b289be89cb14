"""Host keys, compared with known_hosts files.

The user's and the system's files are read and never edited; keys that a user accepted after seeing the fingerprint are
in clusterd's own file.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import fnmatch
import hashlib
import hmac
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import asyncssh

from clusterd.durable_files import write_durably
from clusterd.errors import HostKeyChanged, HostKeyUnknown, UsageError
from clusterd.ssh.resolve import Route


@dataclass(frozen=True, slots=True)
class Entry:
    """One known_hosts line that matches the host."""

    key: asyncssh.SSHKey
    marker: str  # "", "cert-authority" or "revoked"
    place: str  # file:line
    ours: bool
    since: str = ""  # date it was accepted, where the line says so

    @property
    def fingerprint(self) -> str:
        """Fingerprint as ``ssh-keygen -lf`` prints it."""
        return str(self.key.get_fingerprint())


@dataclass(frozen=True, slots=True)
class Known:
    """The host shows a key that a known_hosts file holds."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """No known_hosts file holds a key of this host."""

    route: Route
    key: asyncssh.SSHKey

    @property
    def fingerprint(self) -> str:
        """Fingerprint that the user compares."""
        return str(self.key.get_fingerprint())

    def error(self) -> HostKeyUnknown:
        """The error of a connection to this host."""
        return HostKeyUnknown(
            f"{self.route}: its host key is unknown ({self.fingerprint}). "
            f"If that is its fingerprint: clusterd host add {self.route.name}"
        )


@dataclass(frozen=True, slots=True)
class Changed:
    """A known_hosts file holds another key of this host, or has revoked this one."""

    route: Route
    key: asyncssh.SSHKey
    old: Entry

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the key that is shown now."""
        return str(self.key.get_fingerprint())

    def error(self) -> HostKeyChanged:
        """The error of a connection to this host: what changed, and how to undo it."""
        name = self.route.name
        if self.old.marker == "revoked":
            return HostKeyChanged(f"{name} refused: its host key {self.fingerprint} is revoked by {self.old.place}")
        since = f" since {self.old.since}" if self.old.since else ""
        remedy = f"clusterd host trust {name}"
        if not self.old.ours:
            remedy = f"remove {self.old.place}, then {remedy}"
        return HostKeyChanged(
            f"{name} refused: its host key changed{since} (was {self.old.fingerprint}, is {self.fingerprint}). "
            f"If the machine was reinstalled: {remedy}"
        )


class HostKeys:
    """Known host keys. Files are read at every lookup, as another `ssh` may have changed them.

    Args:
        ours: our own known_hosts file; it and its directory are made when the first key is accepted.
    """

    def __init__(self, ours: Path) -> None:
        self._ours = ours

    def entries(self, route: Route) -> list[Entry]:
        """All lines that match this host, those of the user's files first."""
        found = [Entry(asyncssh.import_public_key(key), "", "clusterd", True) for key in route.trusted_keys]
        return found + self._lookup(route, route.lookup_name)

    def _lookup(self, route: Route, name: str) -> list[Entry]:
        found = []
        for path in dict.fromkeys((*route.user_known_hosts, *route.global_known_hosts, str(self._ours))):
            found += _read(Path(path), name, ours=path == str(self._ours))
        return found

    def _without_port(self, route: Route) -> list[Entry]:
        """Lines for the host at the default port. As in ssh, they can vouch for another port but not contradict it."""
        if route.host_key_alias or route.port == 22:
            return []
        return [entry for entry in self._lookup(route, route.host) if entry.marker == ""]

    def judge(self, route: Route, key: asyncssh.SSHKey) -> Known | Unknown | Changed:
        """Compare the key that a host presents with the known ones."""
        entries = self.entries(route)
        for entry in entries:
            if entry.marker == "revoked" and entry.key == key:
                return Changed(route, key, entry)
        plain = [entry for entry in entries if entry.marker == ""]
        if any(entry.key == key for entry in plain):
            return Known()
        if plain:
            # A key of the same type was replaced; a key of a new type is as suspicious.
            same = [entry for entry in plain if entry.key.algorithm == key.algorithm]
            return Changed(route, key, (same or plain)[0])
        if any(entry.key == key for entry in self._without_port(route)):
            return Known()
        return Unknown(route, key)

    def for_asyncssh(self, route: Route) -> tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey], list[asyncssh.SSHKey]]:
        """Trusted keys, trusted authorities and revoked keys of this host."""
        entries = self.entries(route)
        by_marker = {m: [e.key for e in entries if e.marker == m] for m in ("", "cert-authority", "revoked")}
        trusted = by_marker[""] or [entry.key for entry in self._without_port(route)]
        return trusted, by_marker["cert-authority"], by_marker["revoked"]

    def accept(self, route: Route, key: asyncssh.SSHKey) -> None:
        """Store `key` as this host's, in our own file, after the user accepted it.

        Raises:
            HostKeyChanged: another key became known meanwhile.
        """
        with self._locked():
            verdict = self.judge(route, key)
            if isinstance(verdict, Changed):
                raise verdict.error()
            if isinstance(verdict, Unknown):
                self._write([*self._lines(), _line(route, key)])

    def trust(self, route: Route, key: asyncssh.SSHKey) -> None:
        """Replace the keys that our own file holds for this host by `key`.

        Raises:
            UsageError: a file of the user or the system holds the old key; names the lines to remove.
        """
        foreign = [
            entry for entry in self.entries(route) if not entry.ours and (entry.key != key or entry.marker == "revoked")
        ]
        contradicting = [entry for entry in foreign if entry.marker in ("", "revoked")]
        if contradicting and not any(not e.ours and e.key == key and e.marker == "" for e in self.entries(route)):
            places = ", ".join(dict.fromkeys(entry.place for entry in contradicting))
            raise UsageError(
                f"{route.name}: {places} holds its old key, and files of yours are never edited here. "
                f"Remove it there (ssh-keygen -R '{route.lookup_name}'), then: clusterd host trust {route.name}"
            )
        with self._locked():
            others = [line for line in self._lines() if not _is_for_host(line, route.lookup_name)]
            self._write([*others, _line(route, key)])

    def forget(self, route: Route) -> None:
        """Remove this host's keys from our own file."""
        with self._locked():
            lines = self._lines()
            others = [line for line in lines if not _is_for_host(line, route.lookup_name)]
            if others != lines:
                self._write(others)

    def _lines(self) -> list[str]:
        try:
            return self._ours.read_text().splitlines()
        except FileNotFoundError:
            return []

    def _write(self, lines: list[str]) -> None:
        write_durably(self._ours, "".join(f"{line}\n" for line in lines).encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._ours.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(self._ours.with_name(f".{self._ours.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _line(route: Route, key: asyncssh.SSHKey) -> str:
    public = key.export_public_key().decode().split()
    return f"{route.lookup_name} {public[0]} {public[1]} clusterd {time.strftime('%Y-%m-%d', time.gmtime())}"


def _read(path: Path, name: str, ours: bool) -> list[Entry]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []  # as ssh does: a missing or unreadable file holds no keys
    found = []
    for number, line in enumerate(lines, 1):
        if not _is_for_host(line, name):
            continue
        marker, _, rest = _fields(line)
        try:
            key = asyncssh.import_public_key(" ".join(rest.split()[:2]))
        except asyncssh.KeyImportError:
            continue  # a type of key that cannot be checked here
        found.append(Entry(key, marker, f"{path}:{number}", ours, _since(rest)))
    return found


def _since(rest: str) -> str:
    """Date at which a key was accepted, if the line is one of our own."""
    fields = rest.split()
    return fields[3] if len(fields) >= 4 and fields[2] == "clusterd" else ""


def _fields(line: str) -> tuple[str, str, str]:
    """Marker, patterns and the rest of a line; patterns are empty where the line is no entry."""
    line = line.strip()
    if not line or line.startswith("#"):
        return "", "", ""
    marker = ""
    if line.startswith("@"):
        marker, _, line = line[1:].partition(" ")
    patterns, _, rest = line.strip().partition(" ")
    return marker, patterns, rest


def _is_for_host(line: str, name: str) -> bool:
    _, patterns, _ = _fields(line.replace("\t", " "))
    if not patterns:
        return False
    if patterns.startswith("|1|"):
        return _hash_matches(patterns, name)
    matched = False
    for pattern in patterns.split(","):
        negated = pattern.startswith("!")
        if _matches(name, pattern.lstrip("!")):
            if negated:
                return False
            matched = True
    return matched


def _matches(name: str, pattern: str) -> bool:
    # Only * and ? are wildcards in known_hosts; brackets enclose names with ports.
    return fnmatch.fnmatchcase(name.lower(), pattern.lower().replace("[", "[[]"))


def _hash_matches(hashed: str, name: str) -> bool:
    try:
        _, _, salt, digest = hashed.split("|")
        expected = hmac.new(base64.b64decode(salt), name.lower().encode(), hashlib.sha1).digest()
        return hmac.compare_digest(expected, base64.b64decode(digest))
    except ValueError:
        return False


class LoginKey:
    """The cluster's key pair, made when it is first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def authorized_line(self) -> str:
        """Line for a person's authorized keys; with it the key starts programs, but no terminal and no forwarding."""
        public = made_key(self._path).export_public_key().decode().strip()
        return f"restrict {public}"

    def route(self, route: Route, account: str) -> Route:
        """The same route, with this key and as another account at its end."""
        made_key(self._path)
        return replace(
            route,
            user=account,
            identity_files=(str(self._path),),
            certificate_files=(),
            identity_agent=None,
            identities_only=True,
            remedy="`clusterd login` shows that user the key to authorize",
        )


def made_key(path: Path) -> asyncssh.SSHKey:
    """The key in `path`, generated at the first call."""
    if not path.exists():
        write_durably(path, asyncssh.generate_private_key("ssh-ed25519", comment="clusterd").export_private_key())
    return asyncssh.read_private_key(str(path))
