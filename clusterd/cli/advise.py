"""``clusterd advise --stdio``: the scheduling policy as a filter, one JSON object per line."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--stdio", is_flag=True, required=True, help="Read situations from stdin, write answers to stdout.")
@click.option("--policy", default="default", show_default=True, help="The scheduling policy.")
def advise(stdio: bool, policy: str) -> None:
    """Answer scheduling situations: allocation and plan of each job, with reasons (schema: docs/advise.md)."""
    import json

    from clusterd import advice
    from clusterd.core.policies import POLICIES
    from clusterd.errors import UsageError

    if policy not in POLICIES:
        raise UsageError(f"--policy {policy}: unknown policy; known ones are {', '.join(POLICIES)}")
    chosen = POLICIES[policy]()
    for number, line in enumerate(sys.stdin, 1):
        if not line.strip():
            continue
        try:
            answer = advice.advise(advice.read(line), chosen)
        except UsageError as error:
            raise UsageError(f"line {number}: {error}") from None
        print(json.dumps(answer), flush=True)
