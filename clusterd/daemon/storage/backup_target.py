"""Directories that backups are written to: on this machine, or on another one over SFTP.

Each file is written under another name, flushed to the disk, and renamed: under its own name it is always whole.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio
import asyncssh

from clusterd.daemon.storage.archive import make_durable
from clusterd.errors import ClusterError
from clusterd.trusted_paths import UnsafePath, own_directory

CHUNK_BYTES = 1 << 20

PARTIAL = ".partial"
"""Suffix of a file that is being written."""


class Target(Protocol):
    """A directory of one backup."""

    async def sizes(self, below: str = "") -> dict[str, int]:
        """Bytes of each file, by name, of the directory or of one in it; it is made if it is not there."""

    async def put(self, source: Path, name: str) -> None:
        """Copy a file there, in the place of the one of that name."""

    async def remove(self, name: str) -> None:
        """Remove a file."""


class LocalTarget:
    """A directory of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def sizes(self, below: str = "") -> dict[str, int]:
        """See `Target`."""
        return await anyio.to_thread.run_sync(self._sizes, self._directory / below)

    def _sizes(self, directory: Path) -> dict[str, int]:
        try:
            own_directory(str(directory))
        except UnsafePath as error:
            raise ClusterError(f"{error}: a backup has the keys of the cluster") from None
        return {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}

    async def put(self, source: Path, name: str) -> None:
        """See `Target`."""
        await anyio.to_thread.run_sync(self._put, source, self._directory / name)

    def _put(self, source: Path, target: Path) -> None:
        partial = target.with_name(target.name + PARTIAL)
        partial.unlink(missing_ok=True)
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with source.open("rb") as data, open(file, "wb") as copy:
            while chunk := data.read(CHUNK_BYTES):
                copy.write(chunk)
        make_durable(partial, target)

    async def remove(self, name: str) -> None:
        """See `Target`."""
        await anyio.to_thread.run_sync((self._directory / name).unlink)


class SftpTarget:
    """A directory of another machine."""

    def __init__(self, sftp: asyncssh.SFTPClient, directory: str) -> None:
        self._sftp = sftp
        self._directory = directory

    async def sizes(self, below: str = "") -> dict[str, int]:
        """See `Target`."""
        directory = posixpath.join(self._directory, below)
        if not await self._sftp.isdir(directory):
            await self._sftp.makedirs(directory, asyncssh.SFTPAttrs(permissions=0o700), exist_ok=True)
        found = await self._sftp.readdir(directory)
        files = [entry for entry in found if entry.attrs.type == asyncssh.FILEXFER_TYPE_REGULAR]
        return {str(entry.filename): entry.attrs.size or 0 for entry in files}

    async def put(self, source: Path, name: str) -> None:
        """See `Target`."""
        target = posixpath.join(self._directory, name)
        partial = target + PARTIAL
        if await self._sftp.exists(partial):
            await self._sftp.remove(partial)
        written = 0
        # Private from its first byte on: it may be a key.
        async with self._sftp.open(partial, "xb", asyncssh.SFTPAttrs(permissions=0o600)) as copy:
            async with await anyio.open_file(source, "rb") as data:
                while chunk := await data.read(CHUNK_BYTES):
                    await copy.write(chunk)
                    written += len(chunk)
            try:
                await copy.fsync()
            except asyncssh.SFTPOpUnsupported:
                pass  # then the other machine's file system decides when it reaches the disk
        if (found := await self._sftp.getsize(partial)) != written:
            raise ClusterError(f"{partial} has {found} bytes of {written}")
        await self._sftp.posix_rename(partial, target)

    async def remove(self, name: str) -> None:
        """See `Target`."""
        await self._sftp.remove(posixpath.join(self._directory, name))


@asynccontextmanager
async def sftp_target(connection: asyncssh.SSHClientConnection, directory: str) -> AsyncIterator[SftpTarget]:
    """Open a directory behind an SSH connection; a relative one is below the login's home."""
    async with connection.start_sftp_client() as sftp:
        if directory.startswith("~/"):
            directory = directory.removeprefix("~/")
        yield SftpTarget(sftp, directory)
