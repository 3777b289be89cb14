"""Submitted working directories: received in chunks, verified, unpacked so that no file lands outside."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tarfile
import time
from pathlib import Path, PurePosixPath

from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.home import sync_directory
from clusterd.agent.host.rank_environment import make_writable

UNUSED_S = 7 * 86400.0
"""A workdir that no attempt uses, and that was not sent for this long, is removed."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Workdirs:
    """Workdirs of this host, each a directory named by the sha256 of its tar."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, digest: str) -> Path:
        """Directory of a workdir, present or not.

        Raises:
            Refused: no sha256 in hexadecimal.
        """
        if not _DIGEST.fullmatch(digest):
            raise Refused("snapshot", f"{digest!r} is no sha256")
        return self._directory / digest

    def has(self, digest: str) -> bool:
        """True if the complete workdir is on this host."""
        return self.path(digest).is_dir()

    def need(self, digest: str) -> Path:
        """Its directory.

        Raises:
            Refused: it is not here.
        """
        if not self.has(digest):
            raise Refused("snapshot", f"snapshot {digest[:12]} is not on this host; send it first")
        return self.path(digest)

    def put(self, digest: str, offset: int, data: bytes, last: bool) -> None:
        """Take a chunk of the tar; after the last one the snapshot is here, or nothing of it is.

        Chunks come in order; one at offset 0 begins anew.

        Raises:
            Refused: ``snapshot`` (chunks with a gap, a wrong digest, a tar that reaches outside) or ``disk-full``.
        """
        target = self.path(digest)
        if target.is_dir():
            return
        part = self._directory / f"{digest}.part"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # the directory may have been removed
            size = part.stat().st_size if part.exists() else 0
            if offset > size:
                raise Refused(
                    "snapshot", f"snapshot {digest[:12]}: a chunk for byte {offset} came when {size} were here"
                )
            with open(part, "r+b" if part.exists() else "wb") as file:
                file.truncate(offset)
                file.seek(offset)
                file.write(data)
            if last:
                self._unpack(part, digest, target)
        except Refused:
            if last:
                part.unlink(missing_ok=True)
            raise
        except OSError as error:
            part.unlink(missing_ok=True)
            raise self._storage_error(error, digest) from error

    def _unpack(self, part: Path, digest: str, target: Path) -> None:
        with open(part, "rb") as file:
            found = hashlib.sha256()
            while chunk := file.read(1 << 20):
                found.update(chunk)
            if found.hexdigest() != digest:
                raise Refused(
                    "snapshot", f"snapshot {digest[:12]} arrived damaged: its sha256 is {found.hexdigest()[:12]}"
                )
            file.seek(0)
            beside = self._directory / f".{digest[:16]}.{os.getpid()}"
            _remove(beside)
            beside.mkdir(mode=0o700)
            try:
                unpack(file, beside)
                beside.rename(target)
            except BaseException:
                _remove(beside)
                raise
        sync_directory(self._directory)
        part.unlink()

    def _storage_error(self, error: OSError, digest: str) -> Refused:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return Refused("host", f"cannot store snapshot {digest[:12]}: {error}")
        try:
            free_mb = shutil.disk_usage(self._directory).free / 1e6
            free = f"{free_mb:.0f} MB are free"
        except OSError:
            free = "nothing is free"
        return Refused(
            "disk-full", f"no space for snapshot {digest[:12]} in {self._directory}: {free}; nothing of it was kept"
        )

    def clean(self, used: set[str]) -> None:
        """Remove what no attempt uses, and chunks whose rest never came."""
        for path in self._directory.iterdir():
            try:
                old = time.time() - path.stat().st_mtime > UNUSED_S
            except FileNotFoundError:
                continue
            if old and path.name not in used:
                if path.is_dir():
                    _remove(path)
                else:
                    path.unlink(missing_ok=True)


def unpack(file: tarfile._Fileobj, directory: Path) -> None:
    """Unpack a tar into an empty `directory`: plain files, directories and symbolic links, nothing else.

    Links are made last, so that no file is written through one, wherever it points to. The tree is left read-only.

    Raises:
        Refused: a member with an absolute path or ``..``, a device, a hard link, or one that comes twice.
    """
    links: list[tuple[Path, str]] = []
    folders: list[tuple[Path, int]] = [(directory, 0o555)]
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                path = directory.joinpath(*_inside(member.name))
                if member.isdir():
                    path.mkdir(mode=0o700, parents=True, exist_ok=True)
                    folders.append((path, 0o555))
                    continue
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if member.issym():
                    links.append((path, member.linkname))
                elif member.isreg():
                    _write(archive, member, path)
                else:
                    raise Refused(
                        "snapshot", f"the snapshot holds {member.name!r}, which is neither file, folder nor link"
                    )
            for path, to in links:
                path.symlink_to(to)
    except (tarfile.TarError, EOFError) as error:
        raise Refused("snapshot", f"the snapshot is no tar: {error}") from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise Refused("snapshot", f"the snapshot holds {error.filename!r} twice") from error
    for path, mode in reversed(folders):
        path.chmod(mode)


def _inside(name: str) -> tuple[str, ...]:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise Refused("snapshot", f"the snapshot holds {name!r}, which would land outside of it")
    return parts


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    mode = 0o555 if member.mode & 0o100 else 0o444
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with source, open(os.open(path, flags, mode), "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    os.utime(path, (member.mtime, member.mtime))


def _remove(tree: Path) -> None:
    if tree.is_dir():
        make_writable(tree)
        shutil.rmtree(tree)
