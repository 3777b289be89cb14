"""Files of jobs on this host: listing, reading and removal; logs and steps by offset, and trimming of old log data."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import filecmp
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from clusterd.agent.host import rank_environment
from clusterd.agent.host.attempt_records import Attempt, Refused
from clusterd.agent.log import log_line
from clusterd.outside_text import escaped
from clusterd.protocol.requests import Chunk, FileChunk, FileRow, Files

FILES_MAX = 10_000
"""Most files in one listing; the listing counts the rest."""

_NOISE = {"__pycache__", ".git"}


def written(generations: list[Attempt], submitted: Path | None, after: str = "") -> Files:
    """List the files that the job wrote, those behind the path `after`.

    Those that differ from the submitted workdir in size or time of change; where the job ran in a directory of the
    user's, those that changed after the launch.

    Args:
        generations: those of one attempt on this host, oldest first.
        submitted: the unpacked workdir of which the job got a copy; None: it submitted none.
    Returns:
        At most `FILES_MAX` files, sorted by path.
    """
    newest: dict[tuple[str, bytes], FileRow] = {}
    for work, since_s in _works(generations).items():
        for file in _written(work, submitted, since_s, _is_copy(work, generations)):
            before = newest.get((file.path, file.name))
            if file.path > after and (before is None or before.at_s <= file.at_s):
                newest[file.path, file.name] = file
    first = tuple(newest[key] for key in sorted(newest)[:FILES_MAX])
    return Files(first, more=len(newest) - len(first))


def _is_copy(work: Path, generations: list[Attempt]) -> bool:
    return work.is_relative_to(generations[0].directory.parent)


def refuse_submitted(generations: list[Attempt], submitted: Path | None, path: str) -> None:
    """Refuse a file that the job did not write.

    Raises:
        Refused: ``path``: it is as it was submitted, or does not exist.
    """
    for work, since_s in _works(generations).items():
        files = _written(work, submitted, since_s, _is_copy(work, generations))
        if any((os.fsdecode(file.name) or file.path) == path for file in files):
            return
    raise Refused("path", f"{generations[-1].name} has written no {path}")


def _works(generations: list[Attempt]) -> dict[Path, float]:
    """Working directories, each with the launch time of its first generation."""
    works: dict[Path, float] = {}
    for attempt in generations:
        try:
            since_s = (attempt.directory / "launch.msgpack").stat().st_mtime
        except FileNotFoundError:  # the directory was deleted by hand
            continue
        works.setdefault(rank_environment.work_of(attempt), since_s)
    return works


def _written(work: Path, submitted: Path | None, since_s: float, is_copy: bool) -> Iterator[FileRow]:
    for folder, folders, names in os.walk(work):
        folders[:] = [name for name in folders if name not in _NOISE]
        for name in names:
            path = Path(folder, name)
            try:
                known = path.lstat()
                at_s = known.st_mtime
                if stat.S_ISLNK(known.st_mode) and _leads_within(path, work):  # such as `last.pt` -> `step-900.pt`
                    known = path.stat()
                    at_s = max(at_s, known.st_mtime)
            except OSError:
                continue  # removed meanwhile, or a dangling link
            if not stat.S_ISREG(known.st_mode) or (at_s < since_s and not is_copy):
                continue
            below = path.relative_to(work)
            if submitted is None or not _is_same(path, submitted / below, since_s):
                shown = escaped(os.fsencode(below).decode(errors="backslashreplace"))
                odd = b"" if shown == str(below) else os.fsencode(below)
                yield FileRow(shown, known.st_size, at_s, bool(known.st_mode & stat.S_IXUSR), known.st_ino, odd)


def _is_same(path: Path, submitted: Path, since_s: float) -> bool:
    """True where a file, or link, is as it was submitted; one that changed since may have kept its size and time."""
    try:
        now, then = path.lstat(), submitted.lstat()
    except OSError:
        return False
    if stat.S_ISLNK(now.st_mode) and stat.S_ISLNK(then.st_mode):
        return os.readlink(path) == os.readlink(submitted) and _is_same(path.resolve(), submitted.resolve(), since_s)
    same_kind = stat.S_IFMT(now.st_mode) == stat.S_IFMT(then.st_mode)
    if not same_kind or (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
        return False
    try:
        return now.st_ctime < since_s or filecmp.cmp(path, submitted, shallow=False)
    except OSError:
        return False


def _leads_within(link: Path, work: Path) -> bool:
    return Path(os.path.realpath(link)).is_relative_to(os.path.realpath(work))


def read(generations: list[Attempt], path: str, offset: int, limit: int) -> FileChunk:
    """Read bytes of a file below the working directory, and its current size.

    If several generations have their own working directory, the file that was written last is read.

    Raises:
        Refused: (``path``) the file does not exist, is not a regular file, or lies outside the working directory.
    """
    works = _works(generations) or [rank_environment.work_of(generations[-1])]
    work = max(works, key=lambda work: _written_s(work / path)).resolve()
    target = (work / path).resolve()
    if not target.is_relative_to(work):
        raise Refused("path", f"{path} is outside the working directory of {generations[-1].name}")
    try:
        with open(target, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Refused("path", f"{path} is not a regular file")
            size = file.seek(0, 2)
            file.seek(min(max(offset, 0), size))
            return FileChunk(file.read(max(0, min(limit, CHUNK_BYTES_MAX))), size)
    except OSError as error:
        raise Refused("path", f"{path}: {error.strerror}") from None


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return 0.0


def _without_waiting(path: str, flags: int) -> int:
    """Opener that does not block: opening a pipe for reading would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def remove_tree(tree: Path) -> int:
    """Remove a directory even if the job made parts of it read-only; log what cannot be removed.

    Returns:
        Bytes freed on disk.
    """
    before = _taken_bytes(tree)

    def retry(function: Callable[[str], object], path: str, _info: object) -> None:
        try:
            Path(path).parent.chmod(0o700)
            function(path)
        except OSError as error:
            log_line(f"agent: cannot remove {path}: {error}")

    shutil.rmtree(tree, onerror=retry)
    return before - _taken_bytes(tree)


def _taken_bytes(tree: Path) -> int:
    taken = 0
    for directory, _names, files in os.walk(tree):
        for name in files:
            with contextlib.suppress(OSError):
                taken += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return taken


CHUNK_BYTES_MAX = 4 << 20

LOG_BYTES_MAX = 1 << 30
"""Largest log of one rank on disk; a larger one is trimmed to its last half of this size."""

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # of fallocate(2)


def pull(path: Path, offset: int, limit: int, ended: bool) -> Chunk:
    """Read at most `limit` bytes of `path` from `offset` on.

    Args:
        ended: the file's writer has ended.
    Returns:
        An offset past the end returns no data, never the start of the file again.
    """
    limit = max(0, min(limit, CHUNK_BYTES_MAX))
    offset = max(0, offset)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            begin = _first_data(file.fileno(), offset) if offset < size else offset
            file.seek(min(begin, size))
            data = file.read(limit) if begin < size else b""
    except FileNotFoundError:
        size, begin, data = 0, offset, b""
    after = begin + len(data)
    if begin > offset and data:
        data = f"\n[clusterd: {begin - offset} bytes of this log were dropped to spare the disk]\n".encode() + data
    return Chunk(data, after, size, done=ended and after >= size)


def trim(path: Path, most: int = LOG_BYTES_MAX) -> int:
    """Free the disk space of the oldest part of a log that occupies more than `most` bytes.

    The old part becomes a hole in the file: offsets do not change, and the writer is not disturbed. A link to
    a file of the job's is left whole.

    Returns:
        Bytes freed; 0 if the log is small enough or the file system does not support holes.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0  # its rank has not started
    except OSError as error:
        if error.errno == errno.ELOOP:
            return 0
        raise
    try:
        known = os.fstat(descriptor)
        if known.st_blocks * 512 <= most:
            return 0
        begin, end = _first_data(descriptor, 0), known.st_size - most // 2
        _punch(descriptor, end)
        return end - begin
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return 0
    finally:
        os.close(descriptor)


def _first_data(descriptor: int, offset: int) -> int:
    """Offset of the first byte from `offset` on that is not in a hole."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:  # the file system does not support SEEK_DATA, so it has no holes either
        return offset


def _punch(descriptor: int, end: int) -> None:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call(descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, end):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
