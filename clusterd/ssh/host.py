"""Link to one host: it dials, starts the agent, reconnects, sends requests and delivers events."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import anyio
import asyncssh

from clusterd import protocol
from clusterd.agent.host.bundle import Bundle, bundle
from clusterd.errors import AgentLost, ClusterError, HostError
from clusterd.outside_text import one_line
from clusterd.protocol import calls
from clusterd.protocol.agent import SeenByAgent, Superseded, hello_reply
from clusterd.protocol.messages import Request, from_map, to_map
from clusterd.protocol.proof import proof
from clusterd.protocol.requests import Challenge, ChallengeReply, Hello, Shutdown
from clusterd.ssh.bootstrap import TIMEOUT_S, AgentStream, attach
from clusterd.ssh.connection import Dialer
from clusterd.ssh.joined import JoinedConnection, JoinedDialer
from clusterd.ssh.resolve import Route

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 60.0
STEADY_S = 30.0
"""After a link that held this long the next pause is the shortest."""

REQUEST_TIMEOUT_S = 60.0

LOST_AFTER_S = 120.0
HEARTBEATS = 4
"""Number of heartbeats within `lost_after_s`."""

EVENT_BYTES_MAX, EVENT_BYTES_LIMIT = 8 << 20, 64 << 20
"""Bytes of reports not handled yet: above the first limit reading pauses, above the second the link breaks."""

Message = dict[str, Any]
StateName = Literal["idle", "dialing", "bootstrapping", "up", "waiting", "closed"]
RouteSource = Callable[[], Awaitable[Route]]
Callback = Callable[[Message], Awaitable[None] | None]


_PERMANENT = ("environment", "workdir", "launch", "build", "unpack")
"""Kinds of refusals that only a user can resolve."""

_OF_JOB = ("build", "unpack")
"""Kinds of refusals of which the job is the cause, whatever the host."""


class AgentRefused(HostError):
    """The agent refused a request; `kind` is its reason for programs: stale, busy, unknown, disk-full, ..."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.is_permanent = kind in _PERMANENT
        self.is_of_job = kind in _OF_JOB
        self.is_full_disk = kind == "disk-full"


@dataclass(frozen=True, slots=True)
class LinkState:
    """State of a link."""

    name: StateName
    at_s: float  # wall clock
    why: str = ""  # for "waiting": the last failure, in one line
    until_s: float | None = None  # for "waiting": wall clock of the next dial
    failures: int = 0  # in a row
    error: ClusterError | None = None  # behind `why`

    def __str__(self) -> str:
        why = self.why or _WAITS_FOR.get(self.name, "")
        return f"{self.name} ({why})" if why else self.name


_WAITS_FOR: dict[str, str] = {
    "dialing": "waits for its sshd",
    "bootstrapping": f"waits for its login shell to start Python, {TIMEOUT_S:.0f} s at most",
}


class History(Protocol):
    """The daemon's history of events, by which an agent recognises an older copy of it."""

    def newest(self) -> tuple[int, str]:
        """Id and checksum of the newest event that was handled."""

    async def check(self, epoch: int, event: int, checksum: str) -> None:
        """Check what an agent has seen: the epoch of its last daemon, and the newest event that this daemon named.

        Raises:
            ClusterError: the history does not contain that event.
        """


@dataclass(frozen=True, slots=True)
class Leader:
    """The daemon as an agent knows it.

    Attributes:
        daemon_id, epoch: who leads; agents refuse an older epoch of the same daemon.
        key: by which the agent knows its daemons.
        cluster: whose agents are led; "": they were made for all clusters of a user.
        history: agents get its newest event with each request; None: they compare nothing.
    """

    daemon_id: str
    epoch: int
    key: str
    cluster: str = ""
    history: History | None = None

    def newest(self) -> tuple[int, str] | None:
        """Id and checksum of the newest event that was handled, to be compared."""
        return self.history.newest() if self.history is not None else None


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """Callbacks of a link.

    Attributes:
        on_state: at every change; must not block.
        on_up: with the agent's reply to hello, before any event that is newer than the reply. May send requests; a
            ClusterError ends the link, to be tried again.
        on_event: with each unasked frame, one after the other.
        on_identity: with the identity of the agent, before it is led; a ClusterError ends the link, to be tried again.
        home_source: asked before every dial for the directory of agents on the host; "": their default.
    """

    on_state: Callable[[LinkState], None]
    on_up: Callback
    on_event: Callback
    on_identity: Callable[[str], None] | None = None
    home_source: Callable[[], str] = str


class HostLink:
    """One connection to one host, for as long as `run` runs.

    ::

        idle -> dialing -> bootstrapping -> up
                  ^  \\___________|__________|
                  |              v
                  +---------- waiting                  closed: `run` was cancelled

    Args:
        name: of the host, for messages.
        dialer: makes the connections, or waits for those of a host that dials in.
        route_source: asked before every dial, so that an edited SSH configuration counts.
        lost_after_s: an agent that answers no heartbeat for this long has lost its link.
        become: account whose agent it is, reached with sudo; "": that of the login.
    """

    def __init__(
        self,
        name: str,
        route_source: RouteSource,
        dialer: Dialer | JoinedDialer,
        leader: Leader,
        callbacks: LinkCallbacks,
        *,
        lost_after_s: float = LOST_AFTER_S,
        become: str = "",
        code: Bundle | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self.name = name
        self.state = LinkState("idle", time.time())
        self._route_source = route_source
        self._dialer = dialer
        self._leader = leader
        self._callbacks = callbacks
        self._lost_after_s = lost_after_s
        self._become_account = become
        self.agent_home = ""
        """Directory of the agent at the last dial."""
        self.route: Route | None = None
        """Route of the last dial."""
        self._code = code
        self._jitter = jitter or random.Random()
        self._connection: asyncssh.SSHClientConnection | JoinedConnection | None = None
        self._stream: AgentStream | None = None
        self._broken: Callable[[ClusterError], None] = lambda error: None  # ends what `_serve` does
        self._calls = calls.Calls()
        self._read_on = asyncio.Event()  # set when events were handled, or a request waits
        self._wake = anyio.Event()

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        failures = 0
        try:
            while True:
                self._become("dialing", failures=failures)
                up_since = None
                self.agent_home = self._callbacks.home_source()
                place = (self.agent_home or None, self._leader.cluster)
                try:
                    self.route = await self._route_source()
                    async with self._dialer.connect(self.route) as connection:
                        self._connection = connection
                        while True:
                            self._become("bootstrapping", failures=failures)
                            async with attach(
                                connection,
                                self.name,
                                self._bundle(),
                                *place,
                                key=self._leader.key,
                                become=self._become_account,
                            ) as stream:
                                hello = await self._greet(stream)
                                if hello is None:
                                    continue  # an idle agent of another version exited to be replaced
                                up_since = time.monotonic()
                                await self._serve(stream, hello)
                except (ClusterError, OSError, asyncssh.Error, ValueError, protocol.ProtocolError) as error:
                    # Any other error concerns this host alone, and must not end the daemon.
                    failed = error if isinstance(error, ClusterError) else HostError(f"{self.name}: {error}")
                    steady = up_since is not None and time.monotonic() - up_since > STEADY_S
                    failures = 1 if steady else failures + 1
                    await self._wait(failed, failures)
        finally:
            self._become("closed")

    def retry_now(self) -> None:
        """End the current pause: the obstacle may be gone, as after `host trust`."""
        self._wake.set()

    async def end_former(self, home: str) -> None:
        """Shut down the agent in another directory of the host, if one runs there with nothing under it.

        Args:
            home: that directory; "": the default.
        Raises:
            AgentRefused: something runs under it; HostError: none lives there, or it cannot be reached.
        """
        if self._connection is None:
            raise AgentLost(f"{self.name} is not connected: {self.state}")
        place = (self.agent_home or None, self._leader.cluster, home)
        async with attach(
            self._connection, self.name, self._bundle(), *place, key=self._leader.key, become=self._become_account
        ) as stream:
            if await self._greet(stream) is not None:
                await self._exchange(stream, Shutdown())

    async def request(self, verb: str, *, timeout_s: float | None = REQUEST_TIMEOUT_S, **arguments: Any) -> Message:
        """Send a request and return the agent's reply.

        Args:
            timeout_s: None waits for as long as the link holds, as `stop` may need.
        Raises:
            AgentLost: the link is down, or breaks, as it does when no answer came in time. Whether the request was
                carried out is unknown then; all verbs may be repeated.
            AgentRefused: the agent declined.
        """
        if self._stream is None:
            raise AgentLost(f"{self.name} is not connected: {self.state}")
        return await self._ask(self._stream, verb, arguments, timeout_s)

    async def _ask(self, stream: AgentStream, verb: str, arguments: Message, timeout_s: float | None) -> Message:
        replies: asyncio.Queue[calls.Reply] = asyncio.Queue()
        number = self._calls.open(replies.put_nowait)
        self._read_on.set()
        try:
            with anyio.fail_after(timeout_s):
                await stream.send(calls.request(number, verb, {**arguments, **self._newest()}))
                return _result(self.name, await replies.get())
        except TimeoutError:
            lost = AgentLost(f"{self.name} did not answer {verb!r} within {timeout_s:.0f} s")
            # The outcome is unknown: the link must break, so that the next hello compares both sides.
            self._break(stream, lost)
            raise lost from None
        finally:
            self._calls.close(number)

    def _newest(self) -> Message:
        newest = self._leader.newest()
        return {"newest": list(newest)} if newest is not None else {}

    def _bundle(self) -> Bundle:
        return self._code or bundle()

    async def _greet(self, stream: AgentStream) -> Message | None:
        """Return the agent's reply to hello; None if an agent of another version exited to be replaced."""
        nonce = await self._challenge(stream)
        shown = proof(self._leader.key, "hello", nonce, self._leader.daemon_id, self._leader.epoch) if nonce else None
        try:
            request = Hello(protocol.VERSION, self._leader.daemon_id, self._leader.epoch, shown, self._leader.newest())
            hello = await self._exchange(stream, request)
            reply = hello_reply(hello)
            hello["clock_skew_s"] = reply.now_s - time.time()  # before anything that takes time
        except AgentRefused as refused:
            if refused.kind != "protocol":
                raise
            # This is refused while jobs of the other version run, with a message that says so.
            await self._exchange(stream, Shutdown())
            return None
        idle = all(rank.state != "running" for attempt in reply.attempts for rank in attempt.ranks)
        if reply.version != self._bundle().version and idle:
            try:
                await self._exchange(stream, Shutdown())
                return None
            except AgentRefused:
                return hello  # it got work meanwhile: the old agent stays
        return hello

    async def _challenge(self, stream: AgentStream) -> str:
        """Return the agent's nonce; "" from an agent of a version before proofs, which asks for none.

        Raises:
            ClusterError: the agent has seen events that this daemon's journal does not hold.
        """
        try:
            answer = from_map(
                ChallengeReply, await self._exchange(stream, Challenge(self._leader.daemon_id)), "challenge"
            )
        except AgentRefused as refused:
            if refused.kind != "verb":
                raise
            return ""
        if self._callbacks.on_identity is not None and answer.identity:
            self._callbacks.on_identity(answer.identity)
        if self._leader.history is not None and answer.seen:
            seen = from_map(SeenByAgent, answer.seen, "challenge")
            await self._leader.history.check(seen.epoch, seen.event, seen.checksum)
        return answer.nonce

    async def _exchange(self, stream: AgentStream, request: Request[Any]) -> Message:
        """Send a request before the link is up, when nothing else reads from it."""
        replies: list[calls.Reply] = []
        number = self._calls.open(replies.append)
        try:
            with anyio.fail_after(REQUEST_TIMEOUT_S):
                await stream.send(calls.request(number, request.verb, to_map(request)))
                while not replies:
                    self._calls.take(await stream.receive())
        except TimeoutError:
            raise AgentLost(f"{self.name}: its agent did not answer {request.verb!r}") from None
        except protocol.ProtocolError as error:
            raise AgentLost(f"{self.name}: its agent answered {request.verb!r} with {error}") from None
        finally:
            self._calls.close(number)
        return _result(self.name, replies[0])

    async def _serve(self, stream: AgentStream, hello: Message) -> None:
        """Serve the link until it breaks; raises the error that broke it."""
        events: asyncio.Queue[tuple[Message, int]] = asyncio.Queue()
        waiting_bytes = 0
        failure: list[ClusterError] = []
        self._stream = stream
        self._become("up")
        try:
            async with anyio.create_task_group() as tasks:

                def broken(error: ClusterError) -> None:
                    failure.append(error)
                    self._stream = None
                    self._calls.end(AgentLost(str(error)))
                    tasks.cancel_scope.cancel()

                self._broken = broken

                async def deliver() -> None:
                    try:
                        await _call(self._callbacks.on_up, {**hello, "agent_home": stream.agent_home})
                    except ClusterError as error:
                        return self._break(stream, error)
                    nonlocal waiting_bytes
                    while True:
                        event, length = await events.get()
                        await _call(self._callbacks.on_event, event)
                        waiting_bytes -= length
                        self._read_on.set()

                async def heartbeat() -> None:
                    """Break the link to an agent that hangs: sshd keeps its connection alive without it."""
                    pause_s = self._lost_after_s / HEARTBEATS
                    while True:
                        await anyio.sleep(pause_s)
                        if waiting_bytes > EVENT_BYTES_MAX:
                            continue  # its reply would queue behind reports that are not read now
                        try:
                            await self._ask(stream, "heartbeat", {}, self._lost_after_s - pause_s)
                        except AgentRefused:  # an agent of an older version does not know it, and lives
                            continue
                        except AgentLost:
                            return

                tasks.start_soon(deliver)
                tasks.start_soon(heartbeat)
                try:
                    while True:
                        # A handler may wait for an answer, which comes behind the events: only without one is it safe
                        # to stop reading, so that the agent, and in turn its ranks, stop sending.
                        while waiting_bytes > EVENT_BYTES_MAX and not self._calls:
                            self._read_on.clear()
                            await self._read_on.wait()
                        if waiting_bytes > EVENT_BYTES_LIMIT:
                            raise AgentLost(f"{waiting_bytes} bytes of its reports were not handled yet")
                        message, length = await stream.receive_sized()
                        if message.get("event") == "superseded":
                            by = from_map(Superseded, message).by
                            why = f"a newer daemon (epoch {by}) leads this host; epoch {self._leader.epoch} is over"
                            self._break(stream, HostError(f"{self.name}: {why}"))
                        elif "event" in message:
                            waiting_bytes += length
                            events.put_nowait((message, length))
                        else:
                            self._calls.take(message)
                except (AgentLost, protocol.ProtocolError) as lost:
                    self._break(stream, AgentLost(f"{self.name}: {lost}"))
        finally:
            self._stream = None
            self._calls.end(AgentLost(f"{self.name}: the link was closed"))
        raise failure[0]

    def _break(self, stream: AgentStream, error: ClusterError) -> None:
        """End the link over `stream`, unless that is over already."""
        if self._stream is stream:
            self._broken(error)

    async def _wait(self, error: ClusterError, failures: int) -> None:
        longest_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(failures - 1, 16))
        # Between half and all of it, so that hosts that were lost together do not redial together.
        pause_s = longest_s * self._jitter.uniform(0.5, 1.0)
        self._wake = anyio.Event()
        self._become("waiting", why=one_line(str(error)), until_s=time.time() + pause_s, failures=failures, error=error)
        with anyio.move_on_after(pause_s):
            await self._wake.wait()

    def _become(self, name: StateName, **more: Any) -> None:
        self.state = LinkState(name, time.time(), **more)
        self._callbacks.on_state(self.state)


def _result(name: str, reply: calls.Reply) -> Message:
    answer: Message = calls.result(reply, lambda failure: AgentRefused(failure.kind, f"{name}: {failure.message}"))
    return answer


async def _call(callback: Callback, message: Message) -> None:
    result = callback(message)
    if inspect.isawaitable(result):
        await result
