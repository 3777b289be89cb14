"""Serve the terminal UI in a browser: one process per page, on this machine only, behind a secret in the address."""

from __future__ import annotations

import hmac
import os
import secrets
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from textual_serve.server import Server

from clusterd.config import python_path

HOST = "127.0.0.1"
"""Loopback only: a visitor acts with the rights of the user who started the server."""

KEY = "key"
"""Query parameter of the secret; other users of this machine, and any page in the browser, can reach the port."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(arguments: Sequence[str], port: int) -> int:
    """Serve until interrupted. `arguments` are the ``clusterd top`` arguments of each page."""
    command = shlex.join([sys.executable, "-m", "clusterd", *arguments])
    os.environ["PYTHONPATH"] = python_path()  # each page's process has the environment of this one
    key = secrets.token_urlsafe(24)
    print(f"clusterd top: http://{HOST}:{port}/?{KEY}={key} until ctrl+c", file=sys.stderr, flush=True)
    _Guarded(command, port, key).serve()
    return 0


class _Guarded(Server):  # type: ignore[misc]  # textual-serve is not typed
    def __init__(self, command: str, port: int, key: str) -> None:
        super().__init__(command, host=HOST, port=port, title="clusterd")
        self._key = key
        self._cookie = f"clusterd-{port}"  # cookies are shared between ports

    async def _make_app(self) -> web.Application:
        app: web.Application = await super()._make_app()
        app.middlewares.append(self._let_in)
        return app

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Accept the secret once, then the cookie that replaces it; refuse requests from other sites' pages."""
        if self._is_key(request.query.get(KEY, "")):
            answer = web.HTTPFound("/")
            answer.set_cookie(self._cookie, self._key, httponly=True, samesite="Strict")
            return answer
        origin = request.headers.get("Origin", self.public_url)
        if not self._is_key(request.cookies.get(self._cookie, "")) or origin != self.public_url:
            raise web.HTTPForbidden(text="clusterd: open the address that `clusterd top --serve` printed\n")
        return await handler(request)

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._key.encode())
