"""Errors that nobody foresaw: found in what task groups wrap them in, and said in a line."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)


def first_of(error: BaseException) -> BaseException:
    """What is inside the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def guarded(work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    """A bug in what is done beside the jobs must not take the daemon, and them, with it."""
    try:
        await work(*arguments)
    except Exception:
        log.exception("%s failed", work.__qualname__)


def in_a_line(error: BaseException) -> str:
    """A bug of ours, for whoever waits for what it hit."""
    cause = first_of(error)
    return f"a bug of clusterd's own, which daemon.log tells of: {type(cause).__name__}: {cause}"
