"""Control channel of a rank: flags raised by the agent or SIGTERM, and requests to the agent.

Runs on a thread. Nothing here acts on the model. Actions that all ranks must take at the same step become flags; the
training loop all-reduces the flags with the loss of each step, so all ranks agree. Other events go to registered
handlers. A rank may send the agent a request and wait for the answer, also through an agent's restart.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from clusterd import protocol
from clusterd.protocol import calls
from clusterd.protocol.control import TO_RANKS, Connected, Flush, RankHello, Report, ReportFailure, Stop
from clusterd.protocol.messages import Event, Request, from_map, read_event, to_map
from clusterd.protocol.rank import RankMessage
from clusterd.train.process.context import Context

SIGNALS = ("stop", "quiesce", "checkpoint", "keep", "done", "save", "prove", "refuse")
"""Flags that ranks agree on, in the order of their positions in the all-reduce."""

OF_ALL = frozenset({"prove"})
"""Those that count once every rank has raised them; the others do once one has."""

RECONNECT_S = 1.0
ANSWER_S = 120.0
FAILURE_REPORT_S = 5.0
"""Time for which a failed rank waits to deliver its failure report."""

R = TypeVar("R")
E = TypeVar("E", bound=Event)


class AgentRefused(Exception):
    """The agent answered a request with an error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class AgentAbsent(Exception):
    """No agent answered in time."""


class Control:
    """Flags of one rank, and its connection to the agent.

    Training goes on without an agent; the thread tries to reconnect every second. A new agent gets the rank's status
    and last report, and sends what it missed.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._requested: dict[str, str] = {}
        self.save_directory = ""  # of a stop with the flag "save"; empty: this rank was not told, or its own place
        self._status: Event | None = None
        self._last_report: Report | None = None
        self._handlers: dict[type[Event], Callable[[Any], None]] = {}
        self._unhandled: list[Event] = []
        self._calls = calls.Calls()
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def connected(self) -> bool:
        """True if an agent is connected."""
        return self._connection is not None

    def start(self) -> None:
        """Start the thread, if there is an agent; call after a fork, as threads do not survive one."""
        if self._context.control_socket:
            self._thread = threading.Thread(target=self._serve, name="clusterd-control", daemon=True)
            self._thread.start()

    def request(self, flag: str, why: str) -> None:
        """Raise a flag, one of `SIGNALS`."""
        self._requested.setdefault(flag, why)

    def withdraw(self, flag: str) -> None:
        """Lower a flag."""
        self._requested.pop(flag, None)

    def flags(self) -> list[float]:
        """1.0 for each of `SIGNALS` that is raised on this rank."""
        return [float(name in self._requested) for name in SIGNALS]

    def requested(self, flag: str) -> bool:
        """True if this flag is raised on this rank."""
        return flag in self._requested

    def reason_for(self, flag: str) -> str:
        """Reason of a flag, if it was raised on this rank."""
        return self._requested.get(flag, "asked of another rank")

    def on(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Register the handler of an event, called on the control thread, and handle earlier ones now."""
        with self._lock:
            self._handlers[kind] = handler
            earlier = [event for event in self._unhandled if isinstance(event, kind)]
            self._unhandled = [event for event in self._unhandled if not isinstance(event, kind)]
        for event in earlier:
            handler(event)

    def send_status(self, event: Event) -> None:
        """Send the status to the agent, and to any later agent."""
        self._status = event
        self._send(event)

    def report(self, message: RankMessage) -> None:
        """Report to the daemon through the agent; the last report is repeated to a later agent."""
        self._last_report = Report(message.to_message())
        self._send(self._last_report)

    def report_failure(self, reason: str, message: str) -> None:
        """Report why this rank is about to exit, and wait until the agent has recorded it."""
        if self._context.control_socket:
            with contextlib.suppress(AgentAbsent, AgentRefused):
                self.ask(ReportFailure(reason, message), FAILURE_REPORT_S)

    def flush(self) -> None:
        """Wait until earlier reports have left the agent, before this rank exits."""
        if self._context.control_socket:
            with contextlib.suppress(AgentAbsent, AgentRefused):  # an agent of an earlier version refuses, in order too
                self.ask(Flush(), FAILURE_REPORT_S)

    def resend_report(self) -> None:
        """Repeat the last report, for a daemon that may have missed it."""
        if self._last_report is not None:
            self._send(self._last_report)

    def ask(self, request: Request[R], timeout_s: float = ANSWER_S) -> R:
        """Send a request to the agent and return its answer; any thread may call it.

        If the agent is lost, its successor gets the request again.

        Raises:
            AgentRefused: the agent answered with an error.
            AgentAbsent: no agent answered in time, or what answered is none.
        """
        verb = request.verb
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if not self._changed.wait_for(
                    lambda: self._connection is not None or self._closed.is_set(), deadline - time.monotonic()
                ):
                    raise AgentAbsent(f"no agent answered {verb!r} within {timeout_s:.0f} s")
                if self._closed.is_set():
                    raise AgentAbsent(f"{verb!r} was requested after the rank's end")
                connection = self._connection
                assert connection is not None
                replies: list[calls.Reply] = []
                number = self._calls.open(replies.append)
                with contextlib.suppress(OSError):
                    connection.sendall(protocol.encode(calls.request(number, verb, to_map(request))))
                self._changed.wait_for(lambda found=replies: found, deadline - time.monotonic())  # type: ignore[misc]
                self._calls.close(number)
                if not replies:
                    raise AgentAbsent(f"no agent answered {verb!r} within {timeout_s:.0f} s")
                outcome = replies[0]
                if not isinstance(outcome, calls.Ended):
                    break
        if isinstance(outcome, calls.Failure):
            raise AgentRefused(outcome.kind, outcome.message)
        try:
            reply: R = from_map(request.reply, outcome.value, verb)
        except protocol.ProtocolError as error:
            raise AgentAbsent(f"the agent's answer is malformed: {error}") from error
        return reply

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        with self._changed:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=2 * RECONNECT_S)

    def _send(self, event: Event) -> None:
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):  # the thread notices too, and reconnects
                    self._connection.sendall(protocol.encode(event.to_message()))

    def _serve(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError, protocol.ProtocolError):
                self._one_connection()
            self._closed.wait(RECONNECT_S)

    def _one_connection(self) -> None:
        context = self._context
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(context.control_socket)
            named = (context.job, context.attempt, context.generation, context.rank, context.token)
            with self._changed:
                for first in (RankHello(*named, pid=os.getpid()), self._status, self._last_report):
                    if first is not None:
                        connection.sendall(protocol.encode(first.to_message()))
                self._connection = connection
                self._changed.notify_all()
            self._handle(Connected())
            decoder = protocol.Decoder()
            try:
                while data := connection.recv(65536):
                    for message in decoder.feed(data):
                        self._dispatch(message)
            finally:
                with self._changed:
                    self._connection = None
                    self._calls.end(ConnectionResetError("the agent closed the connection"))
                    self._changed.notify_all()

    def _dispatch(self, message: protocol.Message) -> None:
        if "event" not in message:
            with self._changed:
                if self._calls.take(message):
                    self._changed.notify_all()
            return
        try:
            event = read_event(TO_RANKS, message)
        except protocol.ProtocolError as error:
            print(f"clusterd: dropped a message of the agent: {error}", flush=True)
            return
        self._handle(event)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Stop):
            self.save_directory = event.save or ""
            save = event.save is not None
            for flag, raised in (("keep", event.keep), ("done", event.done), ("save", save), ("stop", True)):
                if raised:  # stop comes last: no step may see it without the others
                    self.request(flag, event.reason)
        with self._lock:
            handler = self._handlers.get(type(event))
            if handler is None and not isinstance(event, (Stop, Connected)):
                self._unhandled.append(event)
        if handler is not None:
            handler(event)


@contextlib.contextmanager
def stop_on_sigterm(control: Control) -> Iterator[None]:
    """Turn SIGTERM into a stop request, which lets the step finish; the sender kills ranks that take too long.

    Does nothing outside the main thread, where Python accepts no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: control.request("stop", "SIGTERM"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
