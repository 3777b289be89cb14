"""What the outside asks of a rank: a thread on the agent's socket, and SIGTERM.

Nothing here acts. Requests become flags; the training loop reads them between steps, adds them up over all ranks
with the loss, and so all ranks agree on the step at which something happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from clusterd import protocol
from clusterd.train.context import Context

SIGNALS = ("stop",)
"""Requests that ranks agree on, in the order of their places in the step's reduction."""

RECONNECT_S = 1.0


class Control:
    """The flags of one rank, and its line to the agent.

    An agent that is gone stops nothing: the rank trains on, and the thread knocks once a second.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._requested: dict[str, str] = {}
        self._status: dict[str, Any] | None = None
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to listen, if there is an agent; after the fork, as threads do not survive one."""
        if self._context.control_socket:
            self._thread = threading.Thread(target=self._serve, name="clusterd-control", daemon=True)
            self._thread.start()

    def request(self, what: str, why: str) -> None:
        """Raises a flag; `what` is one of `SIGNALS`."""
        self._requested.setdefault(what, why)

    def flags(self) -> list[float]:
        """1.0 for each of `SIGNALS` that was asked for here."""
        return [float(name in self._requested) for name in SIGNALS]

    def why(self, what: str) -> str:
        """Who asked; another rank, if not this one."""
        return self._requested.get(what, "asked of another rank")

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a status to the agent now, and again to an agent that comes later."""
        self._status = message
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):  # the thread sees the loss too, and reconnects
                    self._connection.sendall(protocol.encode(message))

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(timeout=2 * RECONNECT_S)

    def _serve(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError, protocol.ProtocolError):
                self._one_connection()
            self._closed.wait(RECONNECT_S)

    def _one_connection(self) -> None:
        context = self._context
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(context.control_socket)
            hello = {
                "verb": "rank_hello",
                "job": context.job,
                "attempt": context.attempt,
                "generation": context.generation,
                "rank": context.rank,
                "token": context.token,
                "pid": os.getpid(),
            }
            with self._lock:
                connection.sendall(protocol.encode(hello))
                if self._status is not None:
                    connection.sendall(protocol.encode(self._status))
                self._connection = connection
            decoder = protocol.Decoder()
            try:
                while data := connection.recv(65536):
                    for message in decoder.feed(data):
                        if message.get("event") in SIGNALS:
                            self.request(message["event"], str(message.get("reason", "")))
            finally:
                with self._lock:
                    self._connection = None


@contextlib.contextmanager
def sigterm_asks_to_stop(control: Control) -> Iterator[None]:
    """SIGTERM finishes the step instead of tearing it; what takes too long is killed by who sent it.

    Does nothing outside the main thread, where Python takes no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: control.request("stop", "SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
