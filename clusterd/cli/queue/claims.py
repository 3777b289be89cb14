"""``clusterd claim``, ``book`` and ``notice``: keep devices for some time, and tell all users."""

from __future__ import annotations

import time
from typing import Any

import click

from clusterd.cli.common.arguments import point_in_time_s, time_s
from clusterd.cli.common.output import PLAYING, note, output_option, print_effect, print_line, show_table, shown_as
from clusterd.client import Client
from clusterd.errors import UsageError
from clusterd.units import compact_devices, parse_gpus

_REMOVALS = ("rm", "cancel", "remove", "delete")
"""Words of which one is a subcommand of each group, and stands for all of them."""


class _Claims(click.Group):
    """Takes arguments in the place of a subcommand: ``clusterd claim gpu01:3`` is ``clusterd claim add gpu01:3``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in _REMOVALS:
            args = [next(name for name in _REMOVALS if name in self.commands), *args[1:]]
        elif args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["add", *args]
        return super().parse_args(ctx, args)


_FROM = click.option("--from", "begin", metavar="TIME", help="As in 14:00, 'mon 9:00' or +2h; default: now.")


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
@_FROM
@click.option("--for", "length", metavar="TIME", help="As in 2h; default: until it is removed.")
@click.option("--reason", "--why", "reason", required=True, help="Shown to all users.")
@click.option("--drain", is_flag=True, help="Stop jobs that cannot move, and queue them again.")
@click.option("--dry-run", is_flag=True, help="Print when the devices would be free, and whom that would delay.")
def add(
    devices: tuple[str, ...], begin: str | None, length: str | None, reason: str, drain: bool, dry_run: bool
) -> None:
    """Claim DEVICES: gpu01:3,4, or gpu01 for all of its devices."""
    from_s = point_in_time_s("--from", begin) if begin is not None else None
    for_s = time_s("--for", length) if length is not None else None
    with Client() as cluster:
        wanted: dict[str, Any] = {"devices": list(devices), "reason": reason, "from_s": from_s, "for_s": for_s}
        if dry_run:
            print_effect(cluster.call("claim_add", **wanted, drain=drain, dry_run=True, meanwhile=PLAYING))
            return
        row = cluster.call("claim_add", **wanted, drain=drain)
    _note_made(row)


@claim.command()
@output_option
def ls(output: str) -> None:
    """List claims of operators that are not over."""
    _show(output, "no claims", bookings=False)


@claim.command()
@click.argument("claims", nargs=-1, required=True, metavar="ID...")
def rm(claims: tuple[str, ...]) -> None:
    """Remove claims: their devices go to jobs again."""
    with Client() as cluster:
        for one in claims:
            row = cluster.call("claim_remove", claim=one)
            note(f"claim {row['id']} is removed: {compact_devices(row['devices'])}")


@click.group(cls=_Claims, subcommand_metavar="--gpus N --for TIME | ls | cancel ID")
def book() -> None:
    """Book devices ahead for your jobs, within your quota.

    While a booking lasts, its devices, and with each its part of the cores and memory of its host, go to your jobs
    with --booking ID alone, which end with it. Devices that none of them uses for 15 minutes go to others.

    \b
    clusterd book --gpus a100:4 --from "mon 9:00" --for 4h
    clusterd run --booking 3 --gpus 4 python train.py
    clusterd book ls
    clusterd book cancel 3
    """


@book.command("add")
@click.option("--gpus", metavar="[TYPE:]N", help="GPUs, as in 4 or a100:4.")
@click.option("--devices", type=click.IntRange(min=1), metavar="N", help="Devices of any kind, in the place of --gpus.")
@click.option("--type", "--gpu-type", "kind", metavar="TEXT", default="", help="Part of the GPU's name, as in a100.")
@_FROM
@click.option("--for", "length", metavar="TIME", required=True, help="As in 4h.")
@click.option("--on", multiple=True, metavar="HOST[:DEVICE,...]", help="Only these; may be repeated.")
@click.option("--name", default="", help="Shown to all users.")
@click.option("--user", default="", metavar="NAME", help="For whom an operator books, beyond that user's quota.")
def book_add(
    gpus: str | None, devices: int | None, kind: str, begin: str | None, length: str, on: tuple[str, ...], name: str,
    user: str,
) -> None:  # fmt: skip
    """Book devices: unclaimed ones, on the fewest hosts, whose jobs are expected to end first."""
    if (gpus is None) == (devices is None):
        raise click.UsageError("give --gpus or --devices, one of them")
    wanted: dict[str, Any] = {"devices": devices, "device_name": kind}
    if gpus is not None:
        try:
            named, count = parse_gpus(gpus)
        except ValueError as error:
            raise UsageError(f"--gpus: {error}") from None
        wanted = {"devices": count, "device_name": kind or named, "kind": "cuda"}
    from_s = point_in_time_s("--from", begin) if begin is not None else None
    with Client() as cluster:
        wanted |= {"for_s": time_s("--for", length), "from_s": from_s, "on": list(on), "name": name, "user": user}
        row = cluster.call(
            "booking_add", **{key: value for key, value in wanted.items() if value not in (None, "", [])}
        )
    _note_made(row)
    note(f"jobs of {row['owner']} go there by: clusterd run --booking {row['id']} ...")


@book.command("ls")
@output_option
def book_ls(output: str) -> None:
    """List bookings that are not over."""
    _show(output, "no bookings", bookings=True)


@book.command()
@click.argument("bookings", nargs=-1, required=True, metavar="ID...")
def cancel(bookings: tuple[str, ...]) -> None:
    """Cancel bookings: their jobs end, and their devices go to others."""
    with Client() as cluster:
        for one in bookings:
            row = cluster.call("booking_cancel", booking=one)
            note(f"booking {row['id']} is cancelled: {compact_devices(row['devices'])}")


def _note_made(row: dict[str, Any]) -> None:
    noun = "booking" if row.get("owner") else "claim"
    note(f"{noun} {row['id']}: {compact_devices(row['devices'])} {_when(row)}")
    if row["held_by"]:
        note(f"still there: {', '.join(row['held_by'])}")


def _show(output: str, nothing: str, bookings: bool) -> None:
    """Print the claims of operators, or the bookings."""
    with Client() as cluster:
        rows = [row for row in cluster.call("claims") if bool(row.get("owner")) == bookings]
    if shown_as(output, rows, "Claim"):
        return
    whose, what = ("owner", "name") if bookings else ("by", "reason")
    lines = [[row["id"], compact_devices(row["devices"]), _when(row), row[whose], row["reason"]] for row in rows]
    show_table(["id", "devices", "when", whose, what], lines, nothing)


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
