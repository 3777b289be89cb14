"""The code that hosts run, as one content-addressed zip, built on the head node from the installed clusterd."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from clusterd.agent.host import programs
from clusterd.trusted_paths import content_digest

_WHOLE = ("clusterd.agent", "clusterd.protocol", "clusterd.train", "clusterd.plans")
_SINGLE = (
    "__init__.py",
    "datasets.py",
    "durable_files.py",
    "errors.py",
    "exit_reasons.py",
    "outside_text.py",
    "page_tables.py",
    "process_attributes.py",
    "socket_files.py",
    "trusted_paths.py",
    "units.py",
)
_MSGPACK = ("__init__.py", "exceptions.py", "ext.py", "fallback.py")
_EPOCH = (1980, 1, 1, 0, 0, 0)


class Bundle(NamedTuple):
    """A zip, and the digest of what is in it, by which each start of an agent checks the unpacked code."""

    sha256: str
    data: bytes

    @property
    def version(self) -> str:
        """Version reported by an agent that runs this code; the name of its directory ends with it."""
        return self.sha256[:16]


@lru_cache(maxsize=1)
def bundle() -> Bundle:
    """Build the bundle of the installed code; the same files give the same bytes on every machine."""
    return pack(sorted(_files()))


def pack(files: Sequence[tuple[str, bytes]]) -> Bundle:
    """Pack files by their names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            # Entries are stored: compressed bytes would depend on the head node's zlib. The bundle is a few hundred KB,
            # sent once per host and version.
            entry.compress_type = zipfile.ZIP_STORED
            archive.writestr(entry, data)
    return Bundle(content_digest(files), buffer.getvalue())


def _files() -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", programs.MAIN.encode()
    root = resources.files("clusterd")
    for name in _SINGLE:
        yield f"clusterd/{name}", root.joinpath(name).read_bytes()
    for package in _WHOLE:
        yield from _tree(package.replace(".", "/"), resources.files(package))
    msgpack = resources.files("msgpack")
    for name in _MSGPACK:
        yield f"vendor/msgpack/{name}", msgpack.joinpath(name).read_bytes()


def _tree(path: str, place: Traversable) -> Iterator[tuple[str, bytes]]:
    for entry in place.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _tree(f"{path}/{entry.name}", entry)
        elif entry.name.endswith(".py"):
            yield f"{path}/{entry.name}", entry.read_bytes()
