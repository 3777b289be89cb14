"""Pages and their data: each address is a file, a verb that only reads, or the metrics.

The answers are those of the verbs, as clients of the socket get them, filtered for a reader without a name.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from clusterd.config import Web
from clusterd.core.state import State
from clusterd.daemon.access import RULES, Access, Callers, Others, Peer
from clusterd.daemon.api.server import Verb, checked_arguments
from clusterd.daemon.storage.archived_jobs import ArchivedJobs
from clusterd.daemon.web.metrics import CONTENT_TYPE, USAGE_MINUTES, prometheus_text
from clusterd.daemon.web.server import Answer, HttpServer, Request
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
            "no such page: there are /, /fleet, /calendar, /history, /jobs/JOB, /metrics, /api",
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
