"""Submitted working directories: received in chunks, verified against their digest, unpacked safely."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
import time
from pathlib import Path, PurePosixPath

from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.home import is_disk_full
from clusterd.agent.host.rank_environment import make_writable
from clusterd.durable_files import sync_directory

UNUSED_S = 7 * 86400.0
"""A workdir that no attempt uses is removed this long after it was received."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Workdirs:
    """Workdirs of this host, each a directory named by the sha256 of its tar."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, digest: str) -> Path:
        """Directory of a workdir, present or not.

        Raises:
            Refused: `digest` is not a sha256 in hexadecimal.
        """
        if not _DIGEST.fullmatch(digest):
            raise Refused("snapshot", f"{digest!r} is not a sha256")
        return self._directory / digest

    def has(self, digest: str) -> bool:
        """True if the complete workdir is on this host."""
        return self.path(digest).is_dir()

    def need(self, digest: str) -> Path:
        """Directory of a workdir that must be present.

        Raises:
            Refused: it is not on this host.
        """
        if not self.has(digest):
            raise Refused("snapshot", f"workdir {digest[:12]} is not on this host; send it first")
        return self.path(digest)

    def put(self, digest: str, offset: int, data: bytes, last: bool) -> None:
        """Receive a chunk of a workdir's tar; after the last chunk the tar is verified and unpacked.

        Chunks must arrive in order; a chunk at offset 0 starts over. A failed transfer leaves no files.

        Raises:
            Refused: ``snapshot`` (a gap between chunks, a wrong digest), ``unpack`` (as `unpack`) or ``disk-full``.
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
                    "snapshot", f"workdir {digest[:12]}: received a chunk at byte {offset}, but expected byte {size}"
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
                    "snapshot", f"workdir {digest[:12]} arrived damaged: its sha256 is {found.hexdigest()[:12]}"
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
        if not is_disk_full(error):
            return Refused("host", f"cannot store workdir {digest[:12]}: {error}")
        try:
            free_mb = shutil.disk_usage(self._directory).free / 1e6
            free = f"{free_mb:.0f} MB are free"
        except OSError:
            free = "nothing is free"
        return Refused(
            "disk-full", f"no space for workdir {digest[:12]} in {self._directory}: {free}; the partial copy is removed"
        )

    def clean(self, used: set[str]) -> None:
        """Remove old workdirs that no attempt uses, and old incomplete transfers."""
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
    """Unpack a tar of plain files, directories and symbolic links into an empty `directory`, then make it read-only.

    Links are created last, so that no file can be written through a link to a place outside.

    Raises:
        Refused: the tar has a member with an absolute path or ``..``, a device, a hard link, or a duplicate member.
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
                    if not member.linkname:
                        raise Refused("unpack", f"the workdir has a link {member.name!r} that leads nowhere")
                    links.append((path, member.linkname))
                elif member.isreg():
                    _write(archive, member, path)
                else:
                    raise Refused(
                        "unpack", f"the workdir has {member.name!r}, which is neither a file, a folder nor a link"
                    )
            for path, to in links:
                path.symlink_to(to)
    except (tarfile.TarError, EOFError) as error:
        raise Refused("unpack", f"the workdir is not a tar: {error}") from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise Refused("unpack", f"the workdir has {error.filename!r} twice") from error
    for path, mode in reversed(folders):
        path.chmod(mode)


def _inside(name: str) -> tuple[str, ...]:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise Refused("unpack", f"the workdir has {name!r}, which would be unpacked outside of it")
    return parts


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = archive.extractfile(member)
    assert source is not None
    mode = member.mode & 0o555 | 0o400
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with source, open(os.open(path, flags, mode), "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        os.fchmod(target.fileno(), mode)  # whatever the umask
    os.utime(path, (member.mtime, member.mtime))


def _remove(tree: Path) -> None:
    if tree.is_dir():
        make_writable(tree)
        shutil.rmtree(tree)
