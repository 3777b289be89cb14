"""Shell completion of job and host names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from clusterd.client import Client
from clusterd.errors import ClusterError

COMPLETION_TIMEOUT_S = 0.5
"""A slower completion is worse than none."""


def _names(verb: str, args: dict[str, Any]) -> list[str]:
    try:
        with Client(timeout_s=COMPLETION_TIMEOUT_S) as cluster:
            return [row["name"] for row in cluster.call(verb, **args)]
    except ClusterError:
        return []  # the shell cannot show a message


def _completer(verb: str, **args: Any) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return sorted({name for name in _names(verb, args) if name.startswith(incomplete)})

    return complete


complete_job = _completer("jobs", all=True)
complete_host = _completer("hosts")
