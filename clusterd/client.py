"""Blocking client of the daemon's socket; quick to import.

>>> with Client() as cluster:                                   # doctest: +SKIP
...     job = cluster.call("submit", spec=spec)["id"]
...     for row in cluster.stream("wait", job=job):
...         print(row["state"])
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from clusterd import errors, protocol
from clusterd.config import client_socket
from clusterd.protocol.calls import Calls, Deliver, Failure, Item, Reply, request, result
from clusterd.socket_files import refuse_impostor

SELECT_MAX_S = 1e6
"""Upper limit of a `select` timeout; far above it the system's time structures overflow."""


SILENCE_S = 10.0
"""Wait for an answer before the client checks on a second connection that the daemon is alive."""

STILL_THERE_S = 2.0
"""Timeout of that check; a daemon that is neither stopped nor very busy answers within it."""


IN_FLIGHT_MAX = 256
"""Pipelined calls without an answer; beyond twice as many the daemon stops reading until answers are taken."""


class Client:
    """One connection to the daemon: requests one after another, or pipelined with `call_many`."""

    def __init__(self, path: Path | None = None, timeout_s: float | None = None) -> None:
        """Connect.

        Raises:
            DaemonAbsent: no daemon listens there, or its socket refuses this user.
        """
        self.path = path or client_socket()
        self._place = os.environ.get("CLUSTERD_HOST", self.path) if path is None else self.path  # for messages
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(self.path))
            refuse_impostor(self._socket, self.path)
        except errors.DaemonAbsent:
            self._socket.close()
            raise
        except PermissionError:
            self._socket.close()
            raise errors.DaemonAbsent(
                f"{self._place} does not let this user in: ask its owner to set socket_group in clusterd.toml"
            ) from None
        except OSError as error:
            self._socket.close()
            raise errors.DaemonAbsent(
                f"no daemon answers at {self._place} ({error.strerror or error}): clusterd start"
            ) from None
        self._decoder = protocol.Decoder()
        self._received: list[protocol.Message] = []
        self._calls = Calls()

    def call(self, verb: str, *, meanwhile: str = "", **args: Any) -> Any:
        """Send a request and wait for its answer.

        Args:
            meanwhile: warning to log when the answer takes longer than `SILENCE_S` and the daemon is alive.

        Raises:
            ClusterError: the daemon refused, with its message.
            DaemonAbsent: the connection ended.
        """
        replies: deque[Reply] = deque()
        self._send(verb, args, replies.append)
        if self._socket.gettimeout() is None and not self.ready(SILENCE_S):
            self._warn_of_silence(meanwhile)
        return result(self._next(replies), refusal)

    def _warn_of_silence(self, meanwhile: str) -> None:
        """Log whether the daemon is still working on a call or does not answer at all."""
        message = meanwhile
        try:
            with Client(self.path, STILL_THERE_S) as another:
                another.call("hello")
        except errors.DaemonAbsent:
            message = f"the daemon at {self._place} has not answered yet; is it stopped, or very busy?"
        if message:
            import logging

            logging.getLogger(__name__).warning("clusterd: %s", message)

    def all_jobs(self) -> list[dict[str, Any]]:
        """Rows of all jobs, oldest first, page by page."""
        rows: list[dict[str, Any]] = self.call("jobs", all=True)
        over = next((row["id"] for row in rows if row["ended_s"] is not None), None)
        while over is not None:
            page = self.call("jobs", all=True, before=over)
            over = page[0]["id"] if page else None
            rows = page + rows
        return rows

    def call_many(self, verb: str, calls: Iterable[dict[str, Any]]) -> list[Any]:
        """Pipeline the requests and return their answers in the order of the calls.

        Raises:
            ClusterError: the first refusal, raised after all answers arrived.
        """
        others = len(self._calls)  # streams that are read beside
        waiting: list[deque[Reply]] = []
        for args in calls:
            while len(self._calls) - others >= IN_FLIGHT_MAX:
                self._take()
            waiting.append(deque())
            self._send(verb, args, waiting[-1].append)
        return [result(reply, refusal) for reply in [self._next(replies) for replies in waiting]]

    def stream(self, verb: str, **args: Any) -> Iterator[Any]:
        """Send a request and yield its items until the stream ends.

        Raises:
            ClusterError: as `call`.
        """
        replies: deque[Reply] = deque()
        number = self._send(verb, args, replies.append)
        try:
            while isinstance(reply := self._next(replies), Item):
                yield reply.value
            result(reply, refusal)
        finally:
            self._calls.close(number)

    def _next(self, replies: deque[Reply]) -> Reply:
        while not replies:
            self._take()
        return replies.popleft()

    def _take(self) -> None:
        message = self._receive()
        try:
            self._calls.take(message)
        except protocol.ProtocolError as error:
            raise errors.DaemonAbsent(f"what answers at {self._place} is no clusterd daemon: {error}") from None

    def _send(self, verb: str, args: dict[str, Any], deliver: Deliver) -> int:
        number = self._calls.open(deliver)
        try:
            self._socket.sendall(frame(number, verb, args))
        except errors.UsageError:
            self._calls.close(number)
            raise
        except OSError as error:
            raise errors.DaemonAbsent(f"the daemon at {self._place} went away ({error.strerror or error})") from None
        return number

    def _receive(self) -> dict[str, Any]:
        while not self._received:
            try:
                data = self._socket.recv(1 << 18)
            except OSError as error:
                raise errors.DaemonAbsent(f"the daemon at {self._place} does not answer ({error})") from None
            if not data:
                raise errors.DaemonAbsent(f"the daemon at {self._place} went away: clusterd status")
            try:
                self._received = self._decoder.feed(data)
            except protocol.ProtocolError as error:
                raise errors.DaemonAbsent(f"what answers at {self._place} is no clusterd daemon: {error}") from None
        return self._received.pop(0)

    def ready(self, timeout_s: float) -> bool:
        """True if an answer or an item of a stream is available within `timeout_s`."""
        if self._received:
            return True
        import select

        return bool(select.select([self._socket], [], [], min(timeout_s, SELECT_MAX_S))[0])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def frame(number: int, verb: str, args: dict[str, Any]) -> bytes:
    """Encode a request for the socket.

    Raises:
        UsageError: a value cannot be encoded.
    """
    try:
        encoded = protocol.encode(request(number, verb, args), strict=True)
    except UnicodeEncodeError as error:
        text = error.object.encode(errors="backslashreplace").decode()
        raise errors.UsageError(f"{text[:80]!r} is no UTF-8: write it as UTF-8 text") from None
    except OverflowError:
        raise errors.UsageError(f"{verb}: a number is beyond what fits 64 bits: write a smaller one") from None
    except protocol.ProtocolError as error:
        raise errors.UsageError(f"{verb}: {error}: ask for less at a time") from None
    if (length := len(encoded)) > protocol.REQUEST_BYTES_MAX:
        limit = f"is longer than {protocol.REQUEST_BYTES_MAX}: ask for less at a time"
        raise errors.UsageError(f"{verb}: a request of {length} bytes {limit}")
    return encoded


def refusal(failure: Failure) -> errors.ClusterError:
    """Exception for an error of the daemon."""
    return errors.of_exit_code(failure.exit_code, failure.message)
