"""Directories and files that no other account can change or replace, and digests of what lies in them.

A path is trusted where each directory on the way belongs to root or to this account, and nobody else may write there;
shared directories with the sticky bit, such as /tmp, may be on the way. Every step is checked by its descriptor, so
that nothing can be exchanged between check and use. Python 3.6 parses this: `clusterd.ssh.stage1` runs it on hosts.
"""

import errno
import grp
import hashlib
import os
import pwd
import stat
from typing import Iterable, Optional, Set, Tuple  # Python 3.6

LINKS_MAX = 40
_PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)  # directories above may be closed to readers; macOS has no O_PATH
_REPLACE = "who could replace what is in it"


class UnsafePath(Exception):
    """Another account could change or replace what is at a path; the message says how to mend it."""


def private_directory(path: str, make: bool = True) -> None:
    """Make a directory that this account alone can enter, with those above it; check it where it is there.

    Args:
        make: false: it must be there.
    Raises:
        UnsafePath: another account could change it; OSError: it cannot be made, or is not there.
    """
    descriptor = _own(path, make)
    try:
        if os.fstat(descriptor).st_mode & 0o077:
            os.chmod(f"/proc/self/fd/{descriptor}" if _PATH_ONLY != os.O_RDONLY else path, 0o700)
    finally:
        os.close(descriptor)


def own_directory(path: str) -> None:
    """Make a directory in which this account alone can write, with those above it; others may enter it.

    Raises:
        As `private_directory`.
    """
    os.close(_own(path, True))


def check_parents(path: str) -> None:
    """Check that no other account can replace the entry at `path`; shared directories with the sticky bit may hold it.

    Raises:
        UnsafePath: another account could; OSError: its directory is not there.
    """
    descriptor, place = _open(os.path.dirname(os.path.abspath(path)), False)
    try:
        _check(descriptor, place)
    finally:
        os.close(descriptor)


def check_file(path: str) -> None:
    """Check that a file is root's or this account's, and that no other account can change or replace it.

    Raises:
        UnsafePath: another account can; OSError: it is not there.
    """
    descriptor, place = _open(path, False)
    try:
        _check(descriptor, place)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and _is_writable_by_others(descriptor, status):
            raise UnsafePath(f"{place} can be changed by others: chmod go-w {place}")
    finally:
        os.close(descriptor)


def content_digest(files: Iterable[Tuple[str, bytes]]) -> str:
    """SHA-256 of the names and contents of files, in any order."""
    rows = sorted(f"{hashlib.sha256(data).hexdigest()} {name}\n" for name, data in files)
    return hashlib.sha256("".join(rows).encode()).hexdigest()


def _own(path: str, make: bool) -> int:
    descriptor, place = _open(path, make)
    status = os.fstat(descriptor)
    try:
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
        if status.st_uid != os.getuid():
            raise UnsafePath(f"{place} belongs to {account_name(status.st_uid)}, not to {account_name(os.getuid())}")
        if _is_writable_by_others(descriptor, status):
            raise UnsafePath(f"{place} can be written by others: see what is in it, then chmod go-w {place}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open(path: str, make: bool) -> Tuple[int, str]:
    """Open a path step by step, links included, and check all but its end.

    Returns its descriptor, and the path without links.
    """
    descriptor, place = os.open("/", _PATH_ONLY | os.O_CLOEXEC), "/"
    steps = os.path.join(os.getcwd(), path).split("/")[::-1] if path[:1] != "/" else path.split("/")[::-1]
    links = 0
    try:
        while steps:
            name = steps.pop()
            if name in ("", "."):
                continue
            inside = os.path.normpath(os.path.join(place, name))
            target = _entry(descriptor, name, inside, make)
            if target is not None:
                links += 1
                if links > LINKS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                steps += target.split("/")[::-1]
                if target[:1] != "/":
                    continue
                following, inside = os.open("/", _PATH_ONLY | os.O_CLOEXEC), "/"
            else:
                following = os.open(name, _PATH_ONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
            os.close(descriptor)
            descriptor, place = following, inside
            if any(step not in ("", ".") for step in steps):
                _check(descriptor, place)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, place


def _entry(directory: int, name: str, place: str, make: bool) -> Optional[str]:
    """Target of a link in a directory; None where the entry is no link. A missing one is made as a directory."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError as error:
        if not make:
            raise FileNotFoundError(errno.ENOENT, error.strerror, place) from None
        try:
            os.mkdir(name, 0o700, dir_fd=directory)
        except FileExistsError:  # another process of ours was faster, or somebody else, which is found out next
            pass
        except OSError as failed:
            raise OSError(failed.errno, failed.strerror, place) from None
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        return None
    if status.st_uid not in _trusted_owners():
        raise UnsafePath(f"{place} is a link made by {account_name(status.st_uid)}, {_REPLACE}: remove it")
    return os.readlink(name, dir_fd=directory)


def _check(descriptor: int, place: str) -> None:
    """Check that the entry is root's or ours and, of a directory, that others cannot replace what is in it."""
    status = os.fstat(descriptor)
    if status.st_uid not in _trusted_owners():
        raise UnsafePath(
            f"{place} belongs to {account_name(status.st_uid)}, {_REPLACE}: "
            f"it must be {account_name(os.getuid())}'s or root's"
        )
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    if stat.S_ISDIR(status.st_mode) and not is_sticky and _is_writable_by_others(descriptor, status):
        raise UnsafePath(f"{place} can be written by others, {_REPLACE}: chmod +t {place}, or chmod go-w {place}")


def _trusted_owners() -> Set[int]:
    """Root and this account; in a user namespace, as of a rootless container, also the id of root outside of it."""
    owners = {0, os.getuid()}
    try:
        with open("/proc/self/uid_map") as file:
            maps_everybody = file.read().split() == ["0", "0", str((1 << 32) - 1)]
        if not maps_everybody:
            with open("/proc/sys/kernel/overflowuid") as file:
                owners.add(int(file.read()))
    except OSError:  # no Linux
        pass
    return owners


def _is_writable_by_others(descriptor: int, status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not (
        _is_own_group(status.st_gid) and not _has_access_list(descriptor)  # whose rights show as the group's
    )


def _is_own_group(number: int) -> bool:
    """True for the group of one account that many distributions make, with their mask of 002."""
    try:
        group, name = grp.getgrgid(number), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _has_access_list(descriptor: int) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(f"/proc/self/fd/{descriptor}")
    except (OSError, AttributeError):  # a file system, or macOS, without them
        return False


def account_name(uid: int) -> str:
    """Name of an account; its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
