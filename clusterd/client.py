"""Blocking client of the daemon's socket; quick to import.

>>> with Client() as cluster:                                   # doctest: +SKIP
...     job = cluster.call("submit", spec=spec)["id"]
...     for row in cluster.stream("wait", job=job):
...         print(row["state"])
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from clusterd import errors, protocol
from clusterd.config import socket_path

_CODES = {
    kind.exit_code: kind for kind in (errors.ClusterError, errors.UsageError, errors.DaemonAbsent, errors.TryLater)
}


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
        self.path = path or socket_path()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(self.path))
        except PermissionError:
            self._socket.close()
            raise errors.DaemonAbsent(
                f"{self.path} does not let this user in: ask its owner to set socket_group in clusterd.toml"
            ) from None
        except OSError as error:
            self._socket.close()
            raise errors.DaemonAbsent(
                f"no daemon answers at {self.path} ({error.strerror or error}): clusterd start"
            ) from None
        self._decoder = protocol.Decoder()
        self._received: list[dict[str, Any]] = []
        self._ids = itertools.count(1)

    def call(self, verb: str, *, meanwhile: str = "", **args: Any) -> Any:
        """Send a request and wait for its answer.

        Args:
            meanwhile: warning to log when the answer takes longer than `SILENCE_S` and the daemon is alive.

        Raises:
            ClusterError: the daemon refused, with its message.
            DaemonAbsent: the connection ended.
        """
        number = self._send(verb, args)
        if self._socket.gettimeout() is None and not self.ready(SILENCE_S):
            self._warn_of_silence(meanwhile)
        while True:
            message = self._receive()
            if message.get("id") == number:
                return _answer(message)

    def _warn_of_silence(self, meanwhile: str) -> None:
        """Log whether the daemon is still working on a call or does not answer at all."""
        message = meanwhile
        try:
            with Client(self.path, STILL_THERE_S) as another:
                another.call("hello")
        except errors.DaemonAbsent:
            message = f"the daemon at {self.path} has not answered yet; is it stopped, or very busy?"
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
        numbers: list[int] = []
        messages: dict[int, dict[str, Any]] = {}

        def take_answers(most: int) -> None:
            while len(numbers) - len(messages) > most:
                message = self._receive()
                messages[message["id"]] = message

        for args in calls:
            take_answers(IN_FLIGHT_MAX - 1)
            numbers.append(self._send(verb, args))
        take_answers(0)
        return [_answer(messages[number]) for number in numbers]

    def stream(self, verb: str, **args: Any) -> Iterator[Any]:
        """Send a request and yield its items until the stream ends.

        Raises:
            ClusterError: as `call`.
        """
        number = self._send(verb, args)
        while True:
            message = self._receive()
            if message.get("id") != number:
                continue
            if "item" in message:
                yield message["item"]
            else:
                _answer(message)
                return

    def _send(self, verb: str, args: dict[str, Any]) -> int:
        number = next(self._ids)
        sent = frame(number, verb, args)
        try:
            self._socket.sendall(sent)
        except OSError as error:
            raise errors.DaemonAbsent(f"the daemon at {self.path} went away ({error.strerror or error})") from None
        return number

    def _receive(self) -> dict[str, Any]:
        while not self._received:
            try:
                data = self._socket.recv(1 << 18)
            except OSError as error:
                raise errors.DaemonAbsent(f"the daemon at {self.path} does not answer ({error})") from None
            if not data:
                raise errors.DaemonAbsent(f"the daemon at {self.path} went away: clusterd status")
            try:
                self._received = self._decoder.feed(data)
            except protocol.ProtocolError as error:
                raise errors.DaemonAbsent(f"what answers at {self.path} is no clusterd daemon: {error}") from None
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
        encoded = protocol.encode({"id": number, "verb": verb, **args}, strict=True)
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


def _answer(message: dict[str, Any]) -> Any:
    error = message.get("error")
    if error is None:
        return message.get("ok")
    raise refusal(error)


def refusal(error: dict[str, Any]) -> errors.ClusterError:
    """Exception for an error message of the daemon."""
    return _CODES.get(error["exit_code"], errors.ClusterError)(error["message"])
