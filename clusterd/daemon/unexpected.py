"""Unexpected errors: unwrapped from exception groups, logged, and described in a line."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from clusterd.errors import first_of

log = logging.getLogger(__name__)


async def guarded(work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """Run background work; a bug there is logged and does not end the daemon."""
    try:
        await work(*arguments)
    except Exception:
        log.exception("%s failed", work.__qualname__)


def in_a_line(error: BaseException) -> str:
    """Error for a caller whose request ran into a bug."""
    cause = first_of(error)
    return f"a bug of clusterd's own, which daemon.log tells of: {type(cause).__name__}: {cause}"
