"""What the outside asks of a rank, and what the rank asks of its agent: a thread on the agent's socket, and SIGTERM.

Nothing here acts on the model. What all ranks must do at the same step becomes a flag; the training loop reads flags
between steps, adds them up over all ranks with the loss, and so all agree. Other events go to whoever registered for
them. A rank may ask its agent for something and wait for the answer; an agent that is gone is waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from clusterd import protocol
from clusterd.train.process.context import Context

SIGNALS = ("stop", "quiesce", "checkpoint", "keep", "done")
"""Requests that ranks agree on, in the order of their places in the step's reduction."""

RECONNECT_S = 1.0
ANSWER_S = 120.0
FAILURE_REPORT_S = 5.0
"""For which a rank that failed waits to be heard, before it ends."""

Message = dict[str, Any]
Handler = Callable[[Message], None]


class AgentRefused(Exception):
    """The agent answered a request with an error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class AgentAbsent(Exception):
    """No agent answered in time."""


class Control:
    """The flags of one rank, and its line to the agent.

    An agent that is gone stops nothing: the rank trains on, and the thread knocks once a second. A new agent is told
    where the rank stands, and tells it what it missed.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._requested: dict[str, str] = {}
        self._status: Message | None = None
        self._last_report: Message | None = None
        self._handlers: dict[str, Handler] = {}
        self._unhandled: list[Message] = []
        self._answers: dict[int, Message | None] = {}
        self._number = 0
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def connected(self) -> bool:
        """Whether an agent is there now."""
        return self._connection is not None

    def start(self) -> None:
        """Begins to listen, if there is an agent; after the fork, as threads do not survive one."""
        if self._context.control_socket:
            self._thread = threading.Thread(target=self._serve, name="clusterd-control", daemon=True)
            self._thread.start()

    def request(self, flag: str, why: str) -> None:
        """Raises a flag; `flag` is one of `SIGNALS`."""
        self._requested.setdefault(flag, why)

    def withdraw(self, flag: str) -> None:
        """Lowers a flag again."""
        self._requested.pop(flag, None)

    def flags(self) -> list[float]:
        """1.0 for each of `SIGNALS` that was asked for here."""
        return [float(name in self._requested) for name in SIGNALS]

    def requested(self, flag: str) -> bool:
        """Whether this flag is up here."""
        return flag in self._requested

    def reason_for(self, flag: str) -> str:
        """Who asked; another rank, if not this one."""
        return self._requested.get(flag, "asked of another rank")

    def on(self, event: str, handler: Handler) -> None:
        """From now on `handler` gets these events, on the control thread, and at once those that came before."""
        with self._lock:
            self._handlers[event] = handler
            earlier = [m for m in self._unhandled if m.get("event") == event]
            self._unhandled = [m for m in self._unhandled if m.get("event") != event]
        for message in earlier:
            handler(message)

    def send_status(self, message: Message) -> None:
        """Sends a status to the agent now, and again to an agent that comes later."""
        self._status = message
        self._send(message)

    def report(self, event: str, **fields: Any) -> None:
        """Tells the daemon, through the agent; the last thing said is said again to an agent that comes later."""
        self._last_report = {"event": "said", "said": {"what": event, **fields}}
        self._send(self._last_report)

    def report_failure(self, reason: str, message: str) -> None:
        """Tells the agent why this rank is about to end, and waits until that is kept: what is on its way is lost."""
        if self._context.control_socket:
            with contextlib.suppress(AgentAbsent, AgentRefused):
                self.ask("failed", FAILURE_REPORT_S, reason=reason, message=message)

    def resend_report(self) -> None:
        """The last thing said, for a daemon that may not have been there to hear it."""
        if self._last_report is not None:
            self._send(self._last_report)

    def ask(self, verb: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Message:
        """A request of the agent, and its answer; asked again of the next agent if this one goes. Any thread may ask.

        Raises:
            AgentRefused: the agent answered with an error.
            AgentAbsent: nobody answered in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if not self._changed.wait_for(
                    lambda: self._connection is not None or self._closed.is_set(), deadline - time.monotonic()
                ):
                    raise AgentAbsent(f"no agent answered {verb!r} within {timeout_s:.0f} s")
                if self._closed.is_set():
                    raise AgentAbsent(f"{verb!r} was asked after the rank's end")
                connection = self._connection
                assert connection is not None
                self._number = number = self._number + 1
                self._answers[number] = None
                with contextlib.suppress(OSError):
                    connection.sendall(protocol.encode({"verb": verb, "id": number, **arguments}))
                answered = self._changed.wait_for(
                    lambda n=number, c=connection: self._answers[n] is not None or self._connection is not c,  # type: ignore[misc]
                    deadline - time.monotonic(),
                )
                answer = self._answers.pop(number)
                if answer is not None:
                    break
                if not answered:
                    raise AgentAbsent(f"no agent answered {verb!r} within {timeout_s:.0f} s")
        if "error" in answer:
            raise AgentRefused(str(answer["error"].get("kind", "")), str(answer["error"].get("message", "")))
        ok: Message = answer["ok"]
        return ok

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        with self._changed:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=2 * RECONNECT_S)

    def _send(self, message: Message) -> None:
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):  # the thread sees the loss too, and reconnects
                    self._connection.sendall(protocol.encode(message))

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
            with self._changed:
                connection.sendall(protocol.encode(hello))
                for message in (self._status, self._last_report):
                    if message is not None:
                        connection.sendall(protocol.encode(message))
                self._connection = connection
                self._changed.notify_all()
            self._dispatch({"event": "connected"})
            decoder = protocol.Decoder()
            try:
                while data := connection.recv(65536):
                    for message in decoder.feed(data):
                        self._dispatch(message)
            finally:
                with self._changed:
                    self._connection = None
                    self._changed.notify_all()

    def _dispatch(self, message: Message) -> None:
        if "event" not in message:
            with self._changed:
                if message.get("id") in self._answers:
                    self._answers[message["id"]] = message
                    self._changed.notify_all()
            return
        event = message["event"]
        if event == "stop":
            for flag in ("keep", "done"):  # before the flag that they go with: no step may see one without the other
                if message.get(flag):
                    self.request(flag, str(message.get("reason", "")))
            self.request("stop", str(message.get("reason", "")))
        with self._lock:
            handler = self._handlers.get(event)
            if handler is None and event not in ("stop", "connected"):
                self._unhandled.append(message)
        if handler is not None:
            handler(message)


@contextlib.contextmanager
def stop_on_sigterm(control: Control) -> Iterator[None]:
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
