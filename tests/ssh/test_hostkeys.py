"""Known host keys: files of the user and the system are read, only ours is written."""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from clusterd.errors import HostKeyChanged, UsageError
from clusterd.ssh.hostkeys import Changed, HostKeys, Known, Unknown
from clusterd.ssh.resolve import Route

NEW, OLD = (asyncssh.generate_private_key("ssh-ed25519").convert_to_public() for _ in range(2))


def text(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The user's own known_hosts file."""
    path = tmp_path / "theirs"
    path.write_text("# nobody\n")
    return path


@pytest.fixture
def route(theirs: Path) -> Route:
    return Route("gpu01", "10.1.0.1", 22, "me", user_known_hosts=(str(theirs), "/no/such/file"))


def hashed(name: str) -> str:
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    "patterns", ["10.1.0.1", "gpu09,10.1.0.1", "10.1.0.*", "10.1.?.1", hashed("10.1.0.1"), "!10.1.0.2,10.1.0.*"]
)
def test_a_line_of_the_users_makes_a_host_known(keys: HostKeys, route: Route, theirs: Path, patterns: str) -> None:
    theirs.write_text(f"{patterns} {text(NEW)} comment here\n")
    assert isinstance(keys.judge(route, NEW), Known)
    assert isinstance(keys.judge(route, OLD), Changed)


@pytest.mark.parametrize(
    "patterns", ["10.1.0.2", "!10.1.0.1,10.1.0.*", hashed("10.1.0.2"), "[10.1.0.1]:2222", "|1|x|y"]
)
def test_a_line_about_another_host_does_not(keys: HostKeys, route: Route, theirs: Path, patterns: str) -> None:
    theirs.write_text(f"{patterns} {text(NEW)}\n")
    assert isinstance(keys.judge(route, NEW), Unknown)


def test_two_hosts_behind_one_address_are_told_apart_by_port(keys: HostKeys, route: Route, theirs: Path) -> None:
    other = replace(route, port=2222)
    theirs.write_text(f"10.1.0.1 {text(OLD)}\n[10.1.0.1]:2222 {text(NEW)}\n")
    assert isinstance(keys.judge(other, NEW), Known)
    assert isinstance(keys.judge(other, OLD), Changed)
    theirs.write_text(f"10.1.0.1 {text(OLD)}\n")
    assert isinstance(keys.judge(other, NEW), Unknown)  # not changed: it is another server
    assert isinstance(keys.judge(other, OLD), Known)  # as ssh finds it


def test_an_unknown_host_is_accepted_once_for_all(keys: HostKeys, route: Route, theirs: Path, tmp_path: Path) -> None:
    before = theirs.read_bytes()
    verdict = keys.judge(route, NEW)
    assert isinstance(verdict, Unknown)
    assert NEW.get_fingerprint() in str(verdict.error())
    assert "clusterd host add gpu01" in str(verdict.error())
    keys.accept(route, NEW)
    keys.accept(route, NEW)
    ours = tmp_path / "config" / "known_hosts"
    assert ours.read_text().count("\n") == 1
    assert ours.stat().st_mode & 0o777 == 0o600
    assert isinstance(HostKeys(ours).judge(route, NEW), Known)
    assert theirs.read_bytes() == before


def test_a_changed_key_is_refused_and_can_be_trusted(keys: HostKeys, route: Route) -> None:
    keys.accept(route, OLD)
    keys.accept(replace(route, host="10.1.0.2"), OLD)
    verdict = keys.judge(route, NEW)
    assert isinstance(verdict, Changed)
    message = str(verdict.error())
    assert message.startswith("gpu01 refused: its host key changed since 20")
    assert f"(was {OLD.get_fingerprint()}, is {NEW.get_fingerprint()})" in message
    assert message.endswith("If the machine was reinstalled: clusterd host trust gpu01")
    with pytest.raises(HostKeyChanged):
        keys.accept(route, NEW)
    keys.trust(route, NEW)
    assert isinstance(keys.judge(route, NEW), Known)
    assert isinstance(keys.judge(route, OLD), Changed)
    assert isinstance(keys.judge(replace(route, host="10.1.0.2"), OLD), Known)


def test_a_key_that_changed_against_the_users_file_names_its_line(keys: HostKeys, route: Route, theirs: Path) -> None:
    theirs.write_text(f"# one\n10.1.0.1 {text(OLD)}\n")
    verdict = keys.judge(route, NEW)
    assert isinstance(verdict, Changed)
    assert f"remove {theirs}:2, then clusterd host trust gpu01" in str(verdict.error())
    with pytest.raises(UsageError, match=f"{theirs}:2 holds its old key.*ssh-keygen -R '10.1.0.1'"):
        keys.trust(route, NEW)
    assert theirs.read_text() == f"# one\n10.1.0.1 {text(OLD)}\n"


def test_a_revoked_key_is_refused_whoever_vouches_for_it(keys: HostKeys, route: Route, theirs: Path) -> None:
    theirs.write_text(f"10.1.0.1 {text(OLD)}\n@revoked * {text(OLD)}\n")
    verdict = keys.judge(route, OLD)
    assert isinstance(verdict, Changed)
    assert f"is revoked by {theirs}:2" in str(verdict.error())


def test_a_host_that_was_removed_is_unknown_again(keys: HostKeys, route: Route) -> None:
    keys.accept(route, NEW)
    keys.forget(route)
    assert isinstance(keys.judge(route, NEW), Unknown)


def test_a_host_made_by_us_is_known(keys: HostKeys, route: Route) -> None:
    ours = replace(route, trusted_keys=(text(NEW),))
    assert isinstance(keys.judge(ours, NEW), Known)
    assert isinstance(keys.judge(ours, OLD), Changed)
