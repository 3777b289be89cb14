"""Pages for a browser: each address is a file, a verb that only reads, or the metrics; and their server on loopback.

The answers are those of the verbs, as clients of the socket get them, filtered for a reader without a name. The server
is for GET alone, one request per connection, bounded in size, time and number. Whoever is on this machine can reach it,
and so can a page in a browser here; the headers of each answer and the check of the name that was asked for keep pages
of other sites from reading it.
"""

from __future__ import annotations

import importlib.resources
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import anyio
import anyio.abc
import msgspec

from clusterd.config import Web
from clusterd.core.state import State
from clusterd.daemon.access import RULES, Access, Callers, Others, Peer
from clusterd.daemon.api.server import Verb, checked_arguments
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.daemon.web.metrics import CONTENT_TYPE, USAGE_MINUTES, prometheus_text
from clusterd.errors import ClusterError, UsageError
from clusterd.rows import plain
from clusterd.units import with_iso_times

VISITOR = Peer(user="", uid=-1, is_operator=False, is_reader=True)
"""Everybody who can reach the port; no job is theirs."""

ROUTES: dict[tuple[str, ...], str] = {
    ("status",): "status",
    ("jobs",): "jobs",
    ("jobs", "{job}"): "job",
    ("jobs", "{job}", "why"): "why",
    ("jobs", "{job}", "steps"): "steps",
    ("jobs", "{job}", "plans"): "plans",
    ("jobs", "{job}", "profile"): "profile",
    ("arrays",): "arrays",
    ("arrays", "{array}"): "tasks",
    ("hosts",): "hosts",
    ("hosts", "{host}"): "host",
    ("claims",): "claims",
    ("calendar",): "calendar",
    ("history",): "history",
    ("usage",): "usage",
    ("report",): "report",
    ("forecasts",): "forecasts",
}
"""Verbs by their addresses below ``/api``; other arguments are in the query."""

PAGES = {(), ("fleet",), ("calendar",), ("history",)}
"""Addresses of the page, beside ``/jobs/JOB``: its script reads which it is."""

TYPES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}


class Pages:
    """Answers requests from files and verbs, as `settings` of the daemon say."""

    def __init__(self, settings: Web, state: Callable[[], State], archived: ArchivedJobs) -> None:
        self._server = HttpServer(settings.port)
        self._access = Access(state, settings.visibility, archived=lambda: archived.names)
        self._before = archived.recall_named
        self._verbs: dict[str, Verb] = {}
        folder = importlib.resources.files(__package__) / "static"
        self._files = {name: Answer(HTTPStatus.OK, (folder / name).read_bytes(), kind) for name, kind in TYPES.items()}

    def row(self) -> dict[str, str]:
        """Row of the pages in `status`."""
        return {"url": self._server.url, "visibility": self._access.visibility, "trouble": self._server.trouble}

    async def serve(self, verbs: Mapping[str, Verb]) -> None:
        """Serve until cancelled, with the methods of those of these verbs that the pages need."""
        self._verbs = {verb: verbs[verb] for verb in ROUTES.values()}
        await self._server.serve(self.answer)

    async def answer(self, request: Request) -> Answer:
        """Answer to a request."""
        path = request.path
        if path in PAGES or (len(path) == 2 and path[0] == "jobs"):
            return self._files["page.html"]
        if len(path) == 2 and path[0] == "static" and path[1] in self._files:
            return self._files[path[1]]
        try:
            if path == ("metrics",):
                return Answer(HTTPStatus.OK, (await self._metrics()).encode(), CONTENT_TYPE)
            if path[0] == "api":
                for route, verb in ROUTES.items():
                    if (named := _named(route, path[1:])) is not None:
                        return await self._of_verb(verb, named, request.query)
        except ClusterError as error:
            return _failure(HTTPStatus.FORBIDDEN, self._access.text(VISITOR, str(error)))
        return _failure(
            HTTPStatus.NOT_FOUND,
            "no such page: there are /, /fleet, /calendar, /history, /jobs/JOB, /metrics, and below /api: "
            + ", ".join(map("/".join, ROUTES)),
        )

    async def _of_verb(self, verb: str, named: dict[str, Any], query: dict[str, str]) -> Answer:
        try:
            answer = await self._call(verb, named | query)
        except UsageError as error:
            status = HTTPStatus.NOT_FOUND if named else HTTPStatus.BAD_REQUEST
            return _failure(status, self._access.text(VISITOR, str(error)))
        return Answer(HTTPStatus.OK, msgspec.json.encode(with_iso_times(answer)), "application/json")

    async def _call(self, verb: str, given: dict[str, Any]) -> Any:
        """Answer of a verb to a visitor, checked and filtered as for a client of the socket."""
        rule, method = RULES[verb], self._verbs[verb]
        if rule.callers is not Callers.EVERYBODY:
            raise ClusterError(f"{verb} changes something: use the clusterd command")
        if rule.others is not Others.NONE and self._access.visibility == "own":  # found or not: no name can be guessed
            raise ClusterError('jobs have no pages of their own here: [web] visibility is "own" in clusterd.toml')
        arguments = checked_arguments(method, VISITOR, given, verb, strict=False)
        await self._before(VISITOR.user, arguments)
        self._access.admit(VISITOR, verb, arguments)
        answer = plain(await method(VISITOR, **arguments))
        if verb == "steps":
            answer = {**answer, "data": answer["data"].decode(errors="replace")}
        return self._access.shown(VISITOR, answer)

    async def _metrics(self) -> str:
        status, hosts = await self._call("status", {}), await self._call("hosts", {})
        jobs, usage = await self._call("jobs", {"all": True}), await self._call("usage", {"minutes": USAGE_MINUTES})
        return prometheus_text(status, hosts, jobs, usage, await self._call("forecasts", {}))


def _named(route: tuple[str, ...], path: tuple[str, ...]) -> dict[str, Any] | None:
    """Arguments that an address names; None if it is not of this route."""
    if len(route) != len(path):
        return None
    named: dict[str, Any] = {}
    for expected, part in zip(route, path, strict=True):
        if expected.startswith("{"):
            named[expected.strip("{}")] = part
        elif expected != part:
            return None
    return named


def _failure(status: HTTPStatus, message: str) -> Answer:
    return Answer(status, msgspec.json.encode({"error": message}), "application/json")


log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Hosts that a request may name, with any port, as that of a forwarding is another one.

A browser that was sent here by a name of another site (DNS rebinding) names that site.
"""

HEAD_BYTES_MAX = 16 << 10
CONNECTIONS_MAX = 64
"""Beyond it a new connection takes the place of the one that has waited longest for its peer."""
ANSWERS_AT_ONCE = 2
"""Answers that are made at a time; other requests wait, so that visitors cannot keep the daemon from its work."""

REQUEST_S = 10.0
"""For the head of a request, and again for taking its answer."""

RETRY_S = 5.0
"""Between attempts to listen on a port that another program has."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Connection": "close",
}
"""Of every answer: nothing from elsewhere is loaded or run, and no other site reads or frames it."""


@dataclass(frozen=True, slots=True)
class Request:
    """A GET."""

    path: tuple[str, ...]  # decoded segments
    query: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a request."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self, with_body: bool = True) -> bytes:
        """The answer as it is sent."""
        headers = {"Content-Type": self.content_type, "Content-Length": str(len(self.body)), **HEADERS, **self.headers}
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + (self.body if with_body else b"")


Handler = Callable[[Request], Awaitable[Answer]]


class HttpServer:
    """Serves the answers of a handler on a port of loopback."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.trouble = "not started"
        """Reason why it does not listen; empty: it does."""
        self._open = 0
        self._waiting: dict[anyio.CancelScope, None] = {}  # of connections that wait for their peers, oldest first
        self._slots = anyio.Semaphore(ANSWERS_AT_ONCE)

    @property
    def url(self) -> str:
        """Address of its first page."""
        return f"http://{ADDRESS}:{self.port}/"

    async def serve(self, handler: Handler) -> None:
        """Serve until cancelled; a port that is taken is tried again, as jobs matter more than pages."""

        async def connection(stream: anyio.abc.SocketStream) -> None:
            await self._connection(stream, handler)

        while True:
            try:
                async with await anyio.create_tcp_listener(local_host=ADDRESS, local_port=self.port) as listener:
                    self.trouble = ""
                    log.info("pages are served at %s", self.url)
                    await listener.serve(connection)
            except (OSError, anyio.BrokenResourceError) as error:  # the port is taken; too many open files
                cause = error.__cause__ or error
                trouble = f"port {self.port} of {ADDRESS}: {getattr(cause, 'strerror', None) or cause}"
                if trouble != self.trouble:
                    log.error("no pages can be served: %s", trouble)
                self.trouble = trouble
            await anyio.sleep(RETRY_S)

    async def _connection(self, stream: anyio.abc.SocketStream, handler: Handler) -> None:
        self._open += 1
        try:
            async with stream:
                with anyio.move_on_after(REQUEST_S):
                    if self._open > CONNECTIONS_MAX and not self._end_one_that_waits():
                        await stream.send(_refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections").encoded())
                        return
                    head = None
                    with self._waits_for_peer():
                        head = await _head(stream)
                    if head is None:
                        return
                    answer, with_body = await self._answer(head, handler)
                    with anyio.move_on_after(REQUEST_S, shield=True), self._waits_for_peer():
                        await stream.send(answer.encoded(with_body))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the visitor went away
        finally:
            self._open -= 1

    @contextmanager
    def _waits_for_peer(self) -> Iterator[None]:
        """Scope in which the connection may be ended: its peer has not sent its request, or not taken its answer."""
        with anyio.CancelScope() as scope:
            self._waiting[scope] = None
            try:
                yield
            finally:
                self._waiting.pop(scope, None)

    def _end_one_that_waits(self) -> bool:
        """End the connection that has waited longest for its peer; false if all have requests under way."""
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            del self._waiting[oldest]
            oldest.cancel()
        return oldest is not None

    async def _answer(self, head: bytes, handler: Handler) -> tuple[Answer, bool]:
        """Answer, and whether its body is to be sent."""
        request = parsed(head)
        if isinstance(request, Answer):
            return request, True
        async with self._slots:
            try:
                return await handler(request), not head.startswith(b"HEAD ")
            except Exception:
                # One bad request must not end the daemon, nor may it pass in silence.
                log.exception("the page /%s failed", "/".join(request.path))
                return _refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the daemon failed: its log says more"), True


async def _head(stream: anyio.abc.SocketStream) -> bytes | None:
    """Head of a request, with the empty line after it; a longer one without; None if the peer went away before."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) <= HEAD_BYTES_MAX:
        try:
            head += await stream.receive(HEAD_BYTES_MAX)
        except anyio.EndOfStream:
            return None
    return head


def parsed(head: bytes) -> Request | Answer:
    """Request of a head; the refusal where it is none for this server."""
    text, end, _ = head.partition(b"\r\n\r\n")
    if not end or len(text) > HEAD_BYTES_MAX:
        return _refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long")
    first, *lines = text.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    target, _, version = rest.partition(" ")
    if not version.startswith("HTTP/1.") or not target.startswith("/"):
        return _refused(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")
    if method not in ("GET", "HEAD"):
        refused = _refused(HTTPStatus.METHOD_NOT_ALLOWED, "these pages only show: use the clusterd command")
        return Answer(refused.status, refused.body, headers={"Allow": "GET, HEAD"})
    named = [value.strip() for name, colon, value in (line.partition(":") for line in lines) if name.lower() == "host"]
    if len(named) != 1 or not _is_here(named[0]):
        return _refused(HTTPStatus.MISDIRECTED_REQUEST, f"ask for one of {', '.join(NAMES)}")
    try:
        split = urlsplit(target)
        path = tuple(unquote(part, errors="strict") for part in split.path.split("/") if part)
        return Request(path, dict(parse_qsl(split.query, keep_blank_values=True, errors="strict", max_num_fields=16)))
    except ValueError:
        return _refused(HTTPStatus.BAD_REQUEST, "the address is not well-formed")


def _is_here(host: str) -> bool:
    name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not colon:
        name = host
    return name.lower() in NAMES and (not colon or (port.isascii() and port.isdecimal()))


def _refused(status: HTTPStatus, text: str) -> Answer:
    return Answer(status, f"clusterd: {text}\n".encode())
