"""Errors that nobody foresaw: found in what task groups wrap them in, and said in a line."""

from __future__ import annotations


def first_of(error: BaseException) -> BaseException:
    """What is inside the groups that task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def in_a_line(error: BaseException) -> str:
    """A bug of ours, for whoever waits for what it hit."""
    cause = first_of(error)
    return f"a bug of clusterd's own, which daemon.log tells of: {type(cause).__name__}: {cause}"
