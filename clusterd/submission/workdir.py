"""Packing of a job's working directory into one immutable archive, so that the job runs the submitted code."""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from clusterd.errors import UsageError
from clusterd.units import size

IGNORE_FILE = ".clusterdignore"
_ALWAYS_IGNORED = (
    ".git",
    "__pycache__",
    "*.pyc",
    ".venv",
    "venv",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "*.egg-info",
)

GIT_TIMEOUT_S = 60.0

OUR_PACKAGES = ("clusterd", "plans")
"""Packages that ranks import; a module of the same name in the workdir would hide them."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Packed workdir."""

    digest: str  # sha256 of the archive; depends on the content only
    size_bytes: int
    files: int
    archive: IO[bytes]


def pack(directory: Path, bytes_max: int, leave_out: Iterable[Path] = (), *, imports_ours: bool = True) -> Snapshot:
    """Pack the files that git lists, or all files, except those that `.clusterdignore` or `leave_out` excludes.

    Args:
        imports_ours: the job imports clusterd, which a module of the same name would hide.
    Raises:
        UsageError: not a directory, too large (names the largest files), or it would hide clusterd's modules.
    """
    refuse_missing(directory)
    for name in OUR_PACKAGES if imports_ours else ():
        for found in (directory / name / "__init__.py", directory / f"{name}.py"):
            if os.path.exists(found):
                raise UsageError(
                    f"workdir {directory} has a module {name!r} ({found.name}), which would hide clusterd's own on the "
                    "ranks: rename it, or set workdir to a directory below"
                )
    left_out = _patterns_of(directory, leave_out)
    files = sorted(_from_git(directory, left_out) or _walk(directory, left_out))
    sizes = {file: _size(directory / file) for file in files}
    total = sum(sizes.values())
    if total > bytes_max:
        largest = ", ".join(f"{f} ({size(sizes[f])})" for f in sorted(files, key=lambda f: -sizes[f])[:3])
        raise UsageError(
            f"workdir {directory} has {size(total)} in {len(files)} files, the limit is {size(bytes_max)}; "
            f"largest: {largest}: exclude them in {IGNORE_FILE}"
        )
    spool = tempfile.SpooledTemporaryFile(max_size=32 << 20)  # noqa: SIM115 - handed to the caller
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
        count = sum(_add(archive, directory, file) for file in files)
    size_bytes = spool.tell()
    spool.seek(0)
    digest = hashlib.sha256()
    for chunk in iter(lambda: spool.read(1 << 20), b""):
        digest.update(chunk)
    spool.seek(0)
    return Snapshot(digest.hexdigest(), size_bytes, count, spool)


def refuse_missing(directory: Path) -> None:
    """Refuse a path that is not an existing directory.

    Raises:
        UsageError: no such directory.
    """
    if not os.path.isdir(directory):  # Path.is_dir raises if the name is too long
        raise UsageError(f"workdir {directory} is no directory: set workdir to where the job's code is")


def _add(archive: tarfile.TarFile, directory: Path, file: str) -> bool:
    """Add a file without times and owners in its header: they would change the digest.

    Returns: False if the file is gone.
    """
    path = directory / file
    info = tarfile.TarInfo(file)
    try:
        if path.is_symlink():
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            archive.addfile(info)
            return True
        data = path.read_bytes()
    except OSError as error:
        _refuse_unreadable(error)
        return False
    info.size = len(data)
    info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
    archive.addfile(info, io.BytesIO(data))
    return True


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _from_git(directory: Path, left_out: tuple[str, ...] = ()) -> list[str] | None:
    """Files that git does not ignore; None if the directory is not in a git tree or git is not installed.

    Raises:
        UsageError: git fails: without its .gitignore, data and secrets would go to the hosts.
    """
    command = [
        "git",
        "-C",
        str(directory),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--deduplicate",
    ]
    try:
        done = subprocess.run(
            command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, check=False, timeout=GIT_TIMEOUT_S
        )
    except (FileNotFoundError, PermissionError):  # no git; the latter if a folder of PATH is not readable
        return None
    except subprocess.TimeoutExpired:
        raise UsageError(f"workdir {directory}: git has not listed it after {GIT_TIMEOUT_S:.0f} s: try again") from None
    if done.returncode:
        message = " ".join(os.fsdecode(done.stderr).split())
        if "not a git repository (or any" in message:  # with a path instead, .git exists and is broken
            return None
        raise UsageError(f"workdir {directory}: git does not list its files: {message.removeprefix('fatal: ')}")
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    ignored = (*_patterns(directory), *left_out)
    found: list[str] = []
    for name in (n.rstrip("/") for n in names):
        path = directory / name
        if name == "." or _is_ignored(name, ignored):  # git lists only "./" within a submodule without .git
            continue
        # git lists deleted files until the deletion is committed.
        if _is_packed(path):
            found.append(name)
        elif os.path.isdir(path):
            found += (n for n in _from_repository_within(directory, name) if not _is_ignored(n, ignored))
    return found


def _from_repository_within(directory: Path, name: str) -> list[str]:
    """Files of a submodule or nested clone; git lists either only as a directory."""
    path = directory / name
    if os.path.lexists(path / ".git"):
        files = _from_git(path) or []
    elif not (files := list(_walk(path))):
        raise UsageError(
            f"workdir: the submodule {path} is empty: git submodule update --init, or exclude it in {IGNORE_FILE}"
        )
    return [f"{name}/{file}" for file in files]


def _walk(directory: Path, left_out: tuple[str, ...] = ()) -> Iterator[str]:
    ignored = (*_ALWAYS_IGNORED, *_patterns(directory), *left_out)
    for parent, directories, files in os.walk(directory, onerror=_refuse_unreadable):
        relative = Path(parent).relative_to(directory)
        directories[:] = [d for d in directories if not _is_ignored((relative / d).as_posix(), ignored)]
        # os.walk lists a link to a directory but does not follow it: packed as a link, as under git.
        linked = [d for d in directories if os.path.islink(os.path.join(parent, d))]
        for file in (*linked, *files):
            name = (relative / file).as_posix()
            if not _is_ignored(name, ignored) and _is_packed(directory / name):
                yield name


def _is_packed(path: Path) -> bool:
    """True for a regular file or a link; the target of a link is not read."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        _refuse_unreadable(error)
        return False
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _refuse_unreadable(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):
        return  # removed since its parent was listed
    # Left out silently, it would be missing only on the host.
    raise UsageError(
        f"workdir: {error.filename} cannot be read: {error.strerror}: make it readable, or exclude it in {IGNORE_FILE}"
    )


def _patterns(directory: Path) -> tuple[str, ...]:
    file = directory / IGNORE_FILE
    if not os.path.lexists(file):
        return ()
    try:
        if not file.is_file():  # reading a FIFO would block forever
            raise OSError(0, "it is no file")
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(f"{file} cannot be read: {why}: make it a text file of patterns, or remove it") from None
    return tuple(line.rstrip("/") for line in lines if line and not line.startswith("#"))


def _patterns_of(directory: Path, paths: Iterable[Path]) -> tuple[str, ...]:
    """Patterns that exclude the given paths below the directory; the directory itself and its parents are ignored."""
    here = directory.resolve()
    below = [path.relative_to(here).as_posix() for path in (p.resolve() for p in paths) if here in path.parents]
    # The slash in front keeps a pattern of one word from matching folders of that name further down.
    return tuple(f"/{glob.escape(name)}{end}" for name in below for end in ("", "/*"))


def _is_ignored(name: str, patterns: tuple[str, ...]) -> bool:
    parts = name.split("/")
    return any(
        fnmatch.fnmatch(name, pattern.lstrip("/")) or any(fnmatch.fnmatch(part, pattern) for part in parts)
        for pattern in patterns
    )
