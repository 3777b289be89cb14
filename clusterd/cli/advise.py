"""``clusterd advise --stdio``: the policy as a filter, one JSON object a line."""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--stdio", is_flag=True, required=True, help="Read situations from standard input, write answers.")
@click.option("--policy", default="default", show_default=True, help="Who answers.")
def advise(stdio: bool, policy: str) -> None:
    """Answer scheduling situations: who runs where, under which plan, and why (schema: docs/advise.md)."""
    import json

    from clusterd import advice
    from clusterd.core.policies import POLICIES
    from clusterd.errors import UsageError

    if policy not in POLICIES:
        raise UsageError(f"--policy {policy}: there is none of that name; there are {', '.join(POLICIES)}")
    chosen = POLICIES[policy]()
    for number, line in enumerate(sys.stdin, 1):
        if not line.strip():
            continue
        try:
            answer = advice.advise(advice.read(line), chosen)
        except UsageError as error:
            raise UsageError(f"line {number}: {error}") from None
        print(json.dumps(answer), flush=True)
