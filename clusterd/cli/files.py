"""``clusterd get`` and ``clusterd forget``: copy or delete the files of jobs, wherever they are."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from clusterd.cli.common.arguments import complete_job, job_or_tasks, own_jobs, time_s
from clusterd.cli.common.output import ago, for_each, note, output_option, print_line, raise_all, show_table, shown_as
from clusterd.client import Client
from clusterd.errors import ClusterError, TryLater, UsageError
from clusterd.units import counted, size


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.argument("files", nargs=-1)
@click.option("--to", "folder", type=click.Path(path_type=Path), help="Target folder; default: here.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@output_option
def get(job: str, files: tuple[str, ...], folder: Path | None, force: bool, output: str) -> None:
    """Copy FILES that a job wrote into its working directory; without FILES, list them, or with --to copy all.

    A FILE is a path below the working directory, a folder, or a pattern in quotes, as in '*.pt'. While the job runs, a
    file is copied up to its current end. A path that several hosts of a job wrote is copied below a folder for each,
    and files of an array below one for each task.
    """
    if folder == Path("-"):
        raise UsageError("--to - is no folder: --to DIRECTORY, then cat the file")
    with Client() as cluster:
        listings = {one: cluster.call("files", job=one) for one in job_or_tasks(cluster, job)}
        left = {host: why for listing in listings.values() for host, why in listing["left"].items()}
        for host, why in left.items():
            note(f"{host} cannot list its files: {why}")
        of_array = len(listings) > 1
        if not files and folder is None:
            (listing,) = [_together(job, left, listings.values())] if of_array else listings.values()
            _list(listing, output)
            return

        def fetch(one: str) -> None:
            into = (folder or Path()) / (listings[one]["name"] if of_array else "")
            _fetch(cluster, listings[one], files or (".",), into, force)

        for_each(listings, fetch)


def _together(array: str, left: dict[str, str], listings: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Listing of all tasks of an array, each below a folder of its name."""
    files = [{**file, "path": f"{each['name']}/{file['path']}"} for each in listings for file in each["files"]]
    return {"name": array, "files": files, "left": left, "more": sum(each["more"] for each in listings)}


def _fetch(cluster: Client, listing: dict[str, Any], files: tuple[str, ...], folder: Path, force: bool) -> None:
    _complete(cluster, listing)
    chosen = [_matching(listing, wanted) for wanted in files]
    files_of = Counter(_path(file) for file in listing["files"])
    unique = {
        _path(file) if files_of[_path(file)] == 1 else os.path.join(file["host"], _path(file)): file
        for some in chosen
        for file in some
    }
    away = [path for path in unique if not (folder / path).resolve().is_relative_to(folder.resolve())]
    if away:
        file = unique[away[0]]
        raise ClusterError(f"{file['host']} names {file['path']}, which is outside {folder}: nothing was copied")
    taken = [path for path in unique if not force and os.path.exists(folder / path)]
    if taken:
        raise ClusterError(f"{folder / taken[0]} already exists: --force overwrites it")
    for path, file in unique.items():
        _copy(cluster, listing["job"], file, folder / path)
        note(f"{folder / path} ({size(file['bytes'])}) from {file['host']}")


def _path(file: dict[str, Any]) -> str:
    return os.fsdecode(file.get("name", b"")) or str(file["path"])  # absent from the reply of an older daemon


def _complete(cluster: Client, listing: dict[str, Any]) -> None:
    """Add the files that were too many for one answer."""
    page = listing
    while page["more"] and page["files"]:
        page = cluster.call("files", job=listing["job"], after=page["files"][-1]["path"])
        listing["files"] += page["files"]
    listing["more"] = page["more"]


def _list(listing: dict[str, Any], output: str) -> None:
    if listing["left"] and not listing["files"]:
        raise TryLater(
            f"whether {listing['name']} has written files is unknown until {_unreachable(listing)} can be reached"
        )
    if shown_as(output, listing["files"]):
        return
    rows = [[f["path"], size(f["bytes"]), f"{ago(f['at_s'])} ago", f["host"]] for f in listing["files"]]
    empty = f"{listing['name']} has written no files, or clusterd forget deleted them"
    show_table(["file", "size", "written", "host"], rows, empty)
    if listing["more"]:
        note(f"and {listing['more']} more, not listed")
    if before := listing.get("continues"):  # absent from the reply of an older daemon
        note(f"what job {before} wrote, with whose training it goes on, stays there: clusterd get {before}")


def _unreachable(listing: dict[str, Any]) -> str:
    return " and ".join(listing["left"])


def _matching(listing: dict[str, Any], wanted: str) -> list[dict[str, Any]]:
    if not wanted:  # an unset variable in a script
        raise UsageError(f"the file name is empty: clusterd get {listing['job']} lists them")
    plain = os.path.normpath(wanted)
    if plain == "." and (listing["files"] or not listing["left"]):
        return list(listing["files"])
    found = [
        file
        for file in listing["files"]
        if file["path"] == plain or file["path"].startswith(f"{plain}/") or fnmatch.fnmatch(file["path"], wanted)
    ]
    if not found and listing["left"]:
        unknown = f"whether {listing['name']} has written {wanted} is unknown"
        raise TryLater(f"{unknown} until {_unreachable(listing)} can be reached")
    if not found:
        before = listing.get("continues")
        elsewhere = f"clusterd get {before} {wanted} looks in job {before}, with whose training it goes on"
        hint = elsewhere if before else f"clusterd get {listing['job']} lists its files"
        raise ClusterError(f"{listing['name']} has written no {wanted}: {hint}")
    return found


def _copy(cluster: Client, job: str, file: dict[str, Any], target: Path) -> None:
    """Copy a file completely, or leave no part of it."""
    part = target.with_name(f".clusterd-{os.getpid()}.part")  # the file's own name plus a suffix may be too long
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as out:
            name = {"name": file["name"]} if file.get("name") else {}  # which an older daemon does not know
            arguments = {key: file[key] for key in ("path", "host", "attempt")} | name
            for chunk in cluster.stream("file", job=job, **arguments):
                out.write(chunk["data"])
            if file.get("is_program"):
                known = os.fstat(out.fileno())
                os.fchmod(out.fileno(), known.st_mode | (known.st_mode & 0o444) >> 2)  # for those who may read it
        part.replace(target)
    except OSError as error:
        raise ClusterError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):  # its directory may not exist
            part.unlink(missing_ok=True)


@click.command()
@click.argument("jobs", nargs=-1, shell_complete=complete_job)
@click.option("--older", metavar="TIME", help="All jobs of yours that ended longer ago than this, as in 30d.")
@click.option("--dry-run", is_flag=True, help="List them, and delete nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, as without a terminal.")
def forget(jobs: tuple[str, ...], older: str | None, dry_run: bool, yes: bool) -> None:
    """Delete logs, step logs and working directories of finished jobs, here and on their hosts.

    Files that a job wrote into its working directory are deleted too; checkpoints elsewhere and the job's line in
    `clusterd ls --all` stay. A pattern such as 'net_*' selects your own finished jobs by name.
    """
    if bool(jobs) == (older is not None):
        raise UsageError("give job names, or --older TIME")
    limit_s = time.time() - time_s("--older", older) if older is not None else None
    failures: list[ClusterError] = []
    freed, left = 0, set()
    with Client() as cluster:
        chosen = own_jobs(cluster, jobs, over=True) if limit_s is None else _ended_before(cluster, limit_s)
        if chosen and not dry_run and not yes and sys.stdin.isatty():
            some = f"job {chosen[0]}" if len(chosen) == 1 else f"{len(chosen)} jobs"
            click.confirm(f"Delete logs and files of {some}?", abort=True, err=True)
        for job in chosen:
            try:
                if dry_run:
                    row = cluster.call("job", job=job)
                    print_line(f"{row['id']} ({row['name']}), {row['state']}")
                    continue
                answer = cluster.call("forget", job=job)
            except ClusterError as error:
                failures.append(error)
                continue
            freed += answer["bytes"]
            for host, why in answer["left"].items():
                left.add(host)
                note(f"{answer['job']} ({answer['name']}): {host} could not delete its part: {why}")
    count = len(chosen) - len(failures)
    if not dry_run and (count or not failures):
        again = f"; run it again when {', '.join(sorted(left))} can be reached" if left else ""
        note(f"{counted(count, 'job')} forgotten, {size(freed)} freed{again}")
    raise_all(failures)


def _ended_before(cluster: Client, limit_s: float) -> list[str]:
    me = cluster.call("hello")["user"]
    mine = (row for row in cluster.all_jobs() if row["user"] == me)
    return [row["id"] for row in mine if row["ended_s"] is not None and row["ended_s"] < limit_s]
