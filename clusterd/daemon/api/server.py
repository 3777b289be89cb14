"""Server of the local socket: reads frames, calls verbs, writes frames.

Requests of one connection are served side by side, so that a client may send a thousand submits without waiting. What a
client does not read holds up nobody else, and no more is made for that client meanwhile (`memory`).
"""

from __future__ import annotations

import functools
import grp
import inspect
import itertools
import logging
import os
import socket
import stat
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from clusterd import __version__, protocol
from clusterd.daemon.access import Access, Peer
from clusterd.daemon.api.memory import CONNECTIONS_PER_USER, ClientMemory, SharedMemory
from clusterd.daemon.api.watch import SharedRow
from clusterd.errors import ClusterError, UsageError
from clusterd.outside_text import TEXT_LETTERS_MAX
from clusterd.protocol.calls import Failure, Ok, reply
from clusterd.rows import pack
from clusterd.socket_files import inode, is_still, peer_uid
from clusterd.trusted_paths import UnsafePath, check_parents, own_directory

log = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 512
"""Concurrent requests of one connection; further ones wait in its socket."""

LOOK_EVERY_S = 1.0
"""Interval of checks that the socket file still exists."""

RECEIVE_S = 60.0
"""For all of a request, from its length on."""

ANSWERS_WITHIN_S = 1.0
"""A listening peer accepts at once, as the kernel does it; a longer silence means that nobody listens."""


NUMBER_MAX = 1 << 53
"""Of a number in an argument, beyond which neither JSON nor a clock is exact."""

SECONDS_MAX = 1e11
"""Of a number of seconds, as of a date: the year 5138."""

ARGUMENT_LETTERS_MAX = 128 << 10
"""Of a text inside an argument: Linux hands no longer word or variable to a process."""

FileText = typing.NewType("FileText", str)
"""Content of a file, bounded by the size of a request alone."""

Verb = Callable[..., Awaitable[Any]]
Streaming = Callable[..., AsyncIterator[Any]]
Before = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Called with the user and the arguments of a request before it is served."""


def verbs_of(group: type) -> list[str]:
    """Names of the methods of a class that serve verbs: public coroutines and generators that take a peer first."""
    return [
        name
        for name, method in inspect.getmembers(group, inspect.isfunction)
        if (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method))
        and not name.startswith("_")
        and list(inspect.signature(method).parameters)[1:2] == ["peer"]
    ]


class Server:
    """Listens on the socket and serves `verbs` and `streams` (by name)."""

    def __init__(
        self,
        path: Path,
        group: str | None,
        access: Access,
        verbs: dict[str, Verb],
        streams: dict[str, Streaming],
        on_gone: Callable[[Peer], None] = lambda peer: None,
        before: Before | None = None,
    ) -> None:
        """`on_gone`: called after each connection ended; `before`: with the arguments of each request."""
        self._path, self._group, self._access, self._verbs = path, group, access, verbs
        self._streams, self._on_gone, self._before = streams, on_gone, before
        self._connections = itertools.count(1)
        self._memory = SharedMemory()
        self._made: int | None = None  # inode of the socket that is ours

    async def listen(self) -> anyio.abc.SocketListener:
        """Open the listener, for the owner and the configured group alone.

        Raises:
            ClusterError: the socket cannot be made there, or is somebody else's.
            UsageError: the group could not get there.
        """
        group = grp.getgrnam(self._group).gr_gid if self._group else None
        try:
            self._make_directory(group)
            _remove_dead(self._path)
            listener = await anyio.create_unix_listener(self._path, mode=0o660 if group is not None else 0o600)
            self._made = inode(self._path)
            if group is not None:
                os.chown(self._path, -1, group)
        except OSError as error:
            raise ClusterError(
                f"{self._path}: {error.strerror}: set CLUSTERD_SOCKET to a path that can be written"
            ) from None
        except UnsafePath as error:
            raise ClusterError(f"{error}; or set CLUSTERD_SOCKET to another path") from None
        return listener

    def _make_directory(self, group: int | None) -> None:
        """Make the socket's directory, passable for the group if this daemon makes it."""
        directory = self._path.parent
        is_new = not directory.exists()
        if is_new:
            own_directory(str(directory))
            if group is not None:
                os.chown(directory, -1, group)
                directory.chmod(0o750)
        check_parents(str(self._path))
        if group is None:
            return
        for place in (directory.resolve(), *directory.resolve().parents):
            if not _may_pass(place, group):
                raise UsageError(
                    f"socket_group: {place} does not let group {self._group} pass to {self._path}: "
                    f"chgrp {self._group} {place} && chmod g+x {place}, or set socket to another place"
                )

    async def serve(self, listener: anyio.abc.SocketListener) -> None:
        """Serve until cancelled; make the socket again where it was removed, as at a logout."""
        async with anyio.create_task_group() as connections:
            while True:
                async with anyio.create_task_group() as accepting:
                    accepting.start_soon(self._accept, listener, connections)
                    while is_still(self._path, self._made):  # noqa: ASYNC110 - the file system rings no bell
                        await anyio.sleep(LOOK_EVERY_S)
                    accepting.cancel_scope.cancel()
                log.warning("the socket %s was removed: listening there again", self._path)
                await listener.aclose()
                listener = await self._listen_again()

    async def _accept(self, listener: anyio.abc.SocketListener, connections: anyio.abc.TaskGroup) -> None:
        while True:
            try:
                await listener.serve(self._connection, connections)
            except anyio.BrokenResourceError as error:  # too many open files: who waits is let in when others are gone
                log.error("no client can be let in now: %s", error.__cause__ or error)
                await anyio.sleep(LOOK_EVERY_S)

    async def _listen_again(self) -> anyio.abc.SocketListener:
        logged = ""
        while True:
            try:
                return await self.listen()
            except ClusterError as error:  # its directory is gone too, and may not be made by us
                if str(error) != logged:
                    log.error("%s", error)
                    logged = str(error)
                await anyio.sleep(LOOK_EVERY_S)

    def withdraw(self) -> None:
        """Remove the socket, if it is still this server's."""
        if is_still(self._path, self._made):
            self._path.unlink(missing_ok=True)

    async def _connection(self, stream: anyio.abc.SocketStream) -> None:
        peer = self._peer(stream)
        reader = _Reader(stream)
        slots = anyio.Semaphore(REQUESTS_AT_ONCE)
        client: _Client | None = None
        try:
            async with stream, anyio.create_task_group() as group:

                def cut() -> None:
                    log.warning("a client of user %s was cut off: it does not read its answers", peer.user)
                    group.cancel_scope.cancel()

                memory = self._memory.open(peer.user, cut)
                if memory is None:
                    raise protocol.ProtocolError(f"{CONNECTIONS_PER_USER} others of the same user are connected")
                client = _Client(stream, peer, memory)
                received, waiting = anyio.create_memory_object_stream[bytes](REQUESTS_AT_ONCE)
                group.start_soon(self._begin_requests, waiting, client, slots, group)
                try:
                    with received, waiting:
                        while True:
                            await slots.acquire()
                            length = await protocol.read_length(reader, protocol.REQUEST_BYTES_MAX)
                            await memory.receive(length)
                            received.send_nowait(await _receive(reader, length))
                except (anyio.EndOfStream, anyio.IncompleteRead):
                    group.cancel_scope.cancel()
        except* (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the client went away in the middle of an answer: its right
        except* protocol.ProtocolError as errors:
            log.warning("a client of user %s was cut off: %s", peer.user, errors.exceptions[0])
        finally:
            if client is not None:
                self._memory.close(client.memory)
            self._on_gone(peer)

    async def _begin_requests(
        self,
        waiting: anyio.abc.ObjectReceiveStream[bytes],
        client: _Client,
        slots: anyio.Semaphore,
        group: anyio.abc.TaskGroup,
    ) -> None:
        """Begin the requests of a connection in order, each once the client has read most of the answers before.

        They wait as bytes: a task takes a hundred times as much, and its cancellation leaves cycles for the collector.
        """
        async for body in waiting:
            request = protocol.decode(body, "backslashreplace")
            expected = await client.memory.begin_answer(str(request.get("verb")))
            group.start_soon(self._serve, request, len(body), expected, client, slots)

    async def _serve(
        self, request: dict[str, Any], length: int, expected: int, client: _Client, slots: anyio.Semaphore
    ) -> None:
        peer, send = client.peer, client.send
        number = request.pop("id", None)
        verb = request.pop("verb", None)
        try:
            if not isinstance(verb, str):
                raise UsageError(f"a request names its verb as text, not as {verb!r}")
            if verb in self._streams or verb in self._verbs:
                if self._before is not None:
                    await self._before(peer.user, request)
                self._access.admit(peer, verb, request)
            if streaming := self._streams.get(verb):
                async for item in streaming(peer, **checked_arguments(streaming, peer, request, verb)):
                    row = item.row if isinstance(item, SharedRow) else item
                    shown = self._access.shown(peer, row)
                    packed = item.packed if row is not item and shown is row else pack(shown)
                    await client.send_frame(protocol.encode_around({"id": number}, "item", packed))
                await send(reply(number, Ok(None)))
            elif answering := self._verbs.get(verb):
                try:
                    # Only the frame stays while the client reads: an answer of a megabyte is ten of Python's objects.
                    answer = await answering(peer, **checked_arguments(answering, peer, request, verb))
                    packed = pack(self._access.shown(peer, answer))
                    frame = protocol.encode_around({"id": number}, "ok", packed)
                    del answer, packed
                    self._memory.answer_bytes[verb] = len(frame)
                    client.memory.add_unread(len(frame))
                finally:
                    client.memory.end_answer(expected)
                    expected = 0
                await client.send_counted(frame)
            else:
                raise UsageError(
                    f"this daemon ({__version__}) does not know {verb!r}: is the client of another version?"
                )
        except ClusterError as error:
            await send(reply(number, Failure(self._access.text(peer, str(error)), exit_code=error.exit_code)))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise
        except Exception:
            # One bad request must not end the daemon, nor may it pass in silence.
            log.exception("serving %r failed", verb)
            message = f"the daemon failed while serving {verb!r}: its log says more"
            await send(reply(number, Failure(message, exit_code=1)))
        finally:
            client.memory.end_answer(expected)
            client.memory.finish(length)
            slots.release()

    def _peer(self, stream: anyio.abc.SocketStream) -> Peer:
        raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
        return self._access.peer(peer_uid(raw), next(self._connections))


def _remove_dead(path: Path) -> None:
    """Remove a socket that nobody serves.

    Raises:
        ClusterError: somebody does, or it is something else.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ClusterError(f"{path} is there, and no socket: set CLUSTERD_SOCKET to another path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWERS_WITHIN_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass  # its queue is full
    raise ClusterError(
        f"another daemon serves {path}: CLUSTERD_SOCKET={path} clusterd status shows which; give this one another "
        "socket, by CLUSTERD_SOCKET or its settings"
    )


def _may_pass(directory: Path, group: int) -> bool:
    """True where members of a group may pass a directory; one with an access control list is trusted."""
    known = directory.stat()
    bit = stat.S_IXGRP if known.st_gid == group else stat.S_IXOTH
    return bool(known.st_mode & bit) or "system.posix_acl_access" in os.listxattr(directory)


def checked_arguments(
    verb: Verb | Streaming, peer: Peer, given: dict[str, Any], name: str, *, strict: bool = True
) -> dict[str, Any]:
    """Check arguments against the verb's annotations: a wrong type must not reach the journal, nor a value beyond use.

    Args:
        strict: numbers and truth values do not come as text.
    Raises:
        UsageError: an argument is missing, unknown, of another type, not finite, too large, too long or too deep.
    """
    try:
        inspect.signature(verb).bind(peer, **given)
    except TypeError as error:
        raise UsageError(f"{name}: {error}") from None
    wanted = _types(getattr(verb, "__func__", verb))
    converted: dict[str, Any] = {}
    for key, value in given.items():
        try:
            converted[key] = msgspec.convert(value, wanted[key], strict=strict)
            if wanted[key] is not FileText:
                if isinstance(converted[key], float):
                    _refuse_unusable_number(f"{name}: {key}", converted[key])
                letters = TEXT_LETTERS_MAX if isinstance(value, str) else ARGUMENT_LETTERS_MAX
                _refuse_beyond(f"{name}: {key}", value if isinstance(value, dict | list) else converted[key], letters)
        except msgspec.ValidationError as error:
            raise UsageError(f"{name}: {key}: {error}") from None
        except RecursionError:
            raise UsageError(f"{name}: {key} has too many maps or lists inside each other") from None
    return converted


def _refuse_beyond(where: str, value: Any, letters: int) -> None:
    """Refuse integers and texts that are too large; what other numbers inside a map mean is known where it is read."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_beyond(f"{where}: a name", key, TEXT_LETTERS_MAX)
            _refuse_beyond(f"{where}.{key}", item, letters)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_beyond(where, item, letters)
    elif isinstance(value, str):
        if len(value) > letters:
            raise UsageError(f"{where} has {len(value)} letters; it may have {letters}")
    elif isinstance(value, int):
        _refuse_unusable_number(where, value)


def _refuse_unusable_number(where: str, value: float) -> None:
    most = SECONDS_MAX if where.endswith("_s") else NUMBER_MAX
    if not -most <= value <= most:
        raise UsageError(f"{where} is {value:g}: give a number from {-most:g} to {most:g}")


@functools.cache
def _types(verb: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(verb)


class _Client:
    """One connection: frames go out one after the other, and count until they are taken."""

    def __init__(self, stream: anyio.abc.SocketStream, peer: Peer, memory: ClientMemory) -> None:
        self.peer, self.memory = peer, memory
        self._stream = stream
        self._lock = anyio.Lock()

    async def send(self, message: dict[str, Any]) -> None:
        await self.send_frame(protocol.encode(message))

    async def send_frame(self, frame: bytes) -> None:
        self.memory.add_unread(len(frame))
        await self.send_counted(frame)

    async def send_counted(self, frame: bytes) -> None:
        try:
            async with self._lock:
                await self._stream.send(frame)
        except BaseException:
            self.memory.lose(len(frame))
            raise
        self.memory.read(len(frame))


async def _receive(reader: protocol.Reader, length: int) -> bytes:
    """Body of a frame; it must come in a while, as it takes from what all requests may take."""
    try:
        with anyio.fail_after(RECEIVE_S):
            return await reader.readexactly(length)
    except TimeoutError:
        raise protocol.ProtocolError(f"{length} bytes did not come within {RECEIVE_S:.0f} s") from None


class _Reader:
    """Adapter of an anyio stream for `protocol.read`."""

    def __init__(self, stream: anyio.abc.ByteReceiveStream) -> None:
        self._buffered = BufferedByteReceiveStream(stream)

    async def readexactly(self, n: int) -> bytes:
        return await self._buffered.receive_exactly(n)
