"""What the shell offers when a job or host is to be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from clusterd.client import Client
from clusterd.errors import ClusterError

COMPLETION_TIMEOUT_S = 0.5
"""A shell that waits for its completion longer than this is worse than one without."""


def _names(verb: str, args: dict[str, Any]) -> list[str]:
    try:
        with Client(timeout_s=COMPLETION_TIMEOUT_S) as cluster:
            return [row["name"] for row in cluster.call(verb, **args)]
    except ClusterError:
        return []  # no daemon, no names: the shell has no place for the message


def _completing(verb: str, **args: Any) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return sorted({name for name in _names(verb, args) if name.startswith(incomplete)})

    return complete


complete_job = _completing("jobs", all=True)
complete_host = _completing("hosts")
