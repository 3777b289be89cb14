"""Files that grow, pulled by offset: the daemon asks for what it does not have yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHUNK_BYTES_MAX = 4 << 20


def pull(path: Path, offset: int, limit: int, ended: bool) -> dict[str, Any]:
    """Bytes of `path` from `offset` on.

    Returns:
        data, the offset to ask for next, the file's size, and whether nothing will follow: its writer ended, and
        this is the last of it. An offset past the end gives nothing, never the file's start again.
    """
    limit = max(0, min(limit, CHUNK_BYTES_MAX))
    offset = max(0, offset)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(min(offset, size))
            data = file.read(limit) if offset < size else b""
    except FileNotFoundError:
        size, data = 0, b""
    after = offset + len(data)
    return {"data": data, "offset": after, "size": size, "done": ended and after >= size}
