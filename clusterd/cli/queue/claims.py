"""``clusterd claim`` and ``notice``: keep devices from the scheduler for some time, and tell all users."""

from __future__ import annotations

import time
from typing import Any

import click

from clusterd.cli.common.arguments import point_in_time_s, time_s
from clusterd.cli.common.output import note, output_option, print_line, show_json, show_table
from clusterd.client import Client


class _Claims(click.Group):
    """Takes devices in the place of a subcommand: ``clusterd claim gpu01:3`` is ``clusterd claim add gpu01:3``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            args = ["add", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_Claims, subcommand_metavar="HOST:DEVICE[,DEVICE]... | ls | rm ID")
def claim() -> None:
    """Keep devices from the scheduler, for maintenance or work by hand.

    From its start to its end a claim's devices go to no job. A job that would not end before is not put there.
    At the start elastic and checkpointable jobs move elsewhere; commands end first, unless --drain queues them again.

    \b
    clusterd claim gpu01:3 --from 14:00 --for 2h --reason "new fan"
    clusterd claim ls
    clusterd claim rm 1
    """


@claim.command()
@click.argument("devices", nargs=-1, required=True, metavar="HOST[:DEVICE,...]...")
@click.option("--from", "begin", metavar="TIME", help="As in 14:00, '2026-12-24 08:00' or +2h; default: now.")
@click.option("--for", "length", metavar="TIME", help="As in 2h; default: until it is removed.")
@click.option("--reason", required=True, help="Shown to all users.")
@click.option("--drain", is_flag=True, help="Stop jobs that cannot move, and queue them again.")
def add(devices: tuple[str, ...], begin: str | None, length: str | None, reason: str, drain: bool) -> None:
    """Claim DEVICES: gpu01:3,4, or gpu01 for all of its devices."""
    from_s = point_in_time_s("--from", begin) if begin is not None else None
    for_s = time_s("--for", length) if length is not None else None
    with Client() as cluster:
        row = cluster.call("claim_add", devices=list(devices), reason=reason, from_s=from_s, for_s=for_s, drain=drain)
    note(f"claim {row['id']}: {', '.join(row['devices'])} {_when(row)}")
    if row["held_by"]:
        note(f"still there: {', '.join(row['held_by'])}")


@claim.command()
@output_option
def ls(output: str) -> None:
    """List claims that are not over."""
    with Client() as cluster:
        rows = cluster.call("claims")
    if output != "table":
        show_json(rows, output)
        return
    lines = [[row["id"], ", ".join(row["devices"]), _when(row), row["by"], row["reason"]] for row in rows]
    show_table(["id", "devices", "when", "by", "reason"], lines, "no claims")


@claim.command()
@click.argument("claims", nargs=-1, required=True, metavar="ID...")
def rm(claims: tuple[str, ...]) -> None:
    """Remove claims: their devices go to jobs again."""
    with Client() as cluster:
        for one in claims:
            row = cluster.call("claim_remove", claim=one)
            note(f"claim {row['id']} is removed: {', '.join(row['devices'])}")


def _when(row: dict[str, Any]) -> str:
    begin = "since" if row["from_s"] <= time.time() else "from"
    until = f" until {_clock(row['until_s'])}" if row["until_s"] is not None else ""
    return f"{begin} {_clock(row['from_s'])}{until}"


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))


@click.command()
@click.argument("text", required=False)
@click.option("--clear", is_flag=True, help="Take the notice back.")
def notice(text: str | None, clear: bool) -> None:
    """Show TEXT to all users, in clusterd ls and top, until it is taken back or replaced.

    Without TEXT, print the current one. Posting is for operators.
    """
    if clear and text is not None:
        raise click.UsageError("--clear takes the notice back: give it alone, or TEXT to replace it")
    with Client() as cluster:
        if clear or text is not None:
            cluster.call("notice", text=text or "")
        shown = cluster.call("status")["notice"]
    print_line(shown or "there is no notice")
