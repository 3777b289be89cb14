"""Frames of the wire: a length of four bytes, then one msgpack map.

The same frames travel between client and daemon (Unix socket), daemon and agent (over SSH), and agent and rank
(Unix socket). Requests carry ``id`` and ``verb``; the reply carries the same ``id`` and either ``ok`` or ``error``.
What is sent unasked carries ``event``. Runs on hosts: standard library and msgpack only, Python 3.10.
"""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any, Protocol

import msgpack

VERSION = 1
"""Of the messages; a peer of another major version is refused with both versions named."""

FRAME_BYTES_MAX = 64 << 20
"""A longer frame is a peer gone wrong, not data: bulk data travels in chunks."""

REQUEST_BYTES_MAX = (1 << 20) + (64 << 10)
"""Of a client to the daemon: a chunk of a megabyte, and the names around it."""

_LENGTH = struct.Struct("!I")

Message = dict[str, Any]


class ProtocolError(Exception):
    """The peer sent something that is no frame of ours."""


class Reader(Protocol):
    """Source of frames; `asyncio.StreamReader` is one."""

    async def readexactly(self, n: int, /) -> bytes:
        """Exactly `n` bytes; `asyncio.IncompleteReadError` at the end."""


def encode(message: Message, strict: bool = False) -> bytes:
    """One frame.

    Args:
        strict: text that is no UTF-8 is refused with a UnicodeEncodeError, as what a person wrote should be.
    """
    return _framed(pack(message, strict))


def encode_around(message: Message, last: str, packed: bytes) -> bytes:
    """Frame of a message with one more field, whose value is packed already: it goes to many."""
    head = msgpack.Packer().pack_map_header(len(message) + 1)
    return _framed(b"".join([head, *map(pack, chain(*message.items(), (last,))), packed]))


def _framed(body: bytes) -> bytes:
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(f"a frame of {len(body)} bytes is longer than {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def pack(message: Any, strict: bool = False) -> bytes:
    """A frame's body. A path that is no UTF-8 travels as the bytes that it is; other text that cannot be, escaped."""
    packed: bytes
    for odd in (None, "surrogateescape"):
        try:
            packed = msgpack.packb(message, use_bin_type=True, unicode_errors=odd)
            return packed
        except UnicodeEncodeError:
            if strict:
                raise
    packed = msgpack.packb(message, use_bin_type=True, unicode_errors="backslashreplace")
    return packed


def decode(body: bytes, odd: str = "surrogateescape") -> Message:
    """The message of a frame's body.

    Args:
        odd: what becomes of bytes that are no UTF-8: paths again for those who use them, or text for those who show it.
    Raises:
        ProtocolError: it is no msgpack map with text keys.
    """
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=False, unicode_errors=odd)
    except Exception as error:  # msgpack raises many kinds, and every one means the same here
        raise ProtocolError(f"a frame that is no msgpack: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame that is no map but {type(message).__name__}")
    return message


async def read(reader: Reader, odd: str = "surrogateescape") -> Message:
    """The next message; `odd` as for `decode`.

    Raises:
        ProtocolError: not one of our frames.
        asyncio.IncompleteReadError: the peer closed; ``partial`` is empty when it did so between frames.
    """
    return decode(await reader.readexactly(await read_length(reader)), odd)


async def read_length(reader: Reader, bytes_max: int = FRAME_BYTES_MAX) -> int:
    """Length of the next frame's body, for readers that limit how much memory they spend; raises as `read`."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > bytes_max:
        raise ProtocolError(f"a frame of {length} bytes was announced; the longest is {bytes_max}")
    return int(length)


class Decoder:
    """Messages out of bytes as they come, for readers that do not await (ranks, fork server)."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes, in order."""
        self._pending += data
        messages: list[Message] = []
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(f"a frame of {length} bytes was announced; the longest is {FRAME_BYTES_MAX}")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                break
            messages.append(decode(bytes(self._pending[_LENGTH.size : end])))
            del self._pending[:end]
        return messages
