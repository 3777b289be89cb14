"""``clusterd get``: what a job wrote, wherever it lies."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from pathlib import Path
from typing import Any

import click

from clusterd.cli.completing import complete_job
from clusterd.cli.output import ago, note, output_option, show_json, show_table
from clusterd.client import Client
from clusterd.errors import ClusterError, TryLater, UsageError
from clusterd.units import size


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.argument("files", nargs=-1)
@click.option("--to", "folder", type=click.Path(path_type=Path), default=Path(), help="Where to; default: here.")
@click.option("--force", is_flag=True, help="Also over files that are there already.")
@output_option
def get(job: str, files: tuple[str, ...], folder: Path, force: bool, output: str) -> None:
    """Copy FILES that a job wrote into its working directory; without FILES, list them.

    A FILE is a path below the working directory, a folder, or a pattern in quotes, as in '*.pt'. While the job runs a
    file is copied as far as it is written.
    """
    with Client() as cluster:
        told = cluster.call("files", job=job)
        for host, why in told["left"].items():
            note(f"{host} cannot say what it has: {why}")
        if not files:
            _list(told, output)
            return
        chosen = [_matching(told, wanted) for wanted in files]
        unique = {file["path"]: file for some in chosen for file in some}
        away = [path for path in unique if not (folder / path).resolve().is_relative_to(folder.resolve())]
        if away:
            raise ClusterError(
                f"{unique[away[0]]['host']} names {away[0]}, which leads out of {folder}: nothing is copied"
            )
        taken = [path for path in unique if not force and os.path.exists(folder / path)]
        if taken:
            raise ClusterError(f"{folder / taken[0]} is there already: --force writes over it")
        for file in unique.values():
            _copy(cluster, told["job"], file, folder / file["path"])
            note(f"{folder / file['path']} ({size(file['bytes'])}) from {file['host']}")


def _list(told: dict[str, Any], output: str) -> None:
    if told["left"] and not told["files"]:
        raise TryLater(f"whether {told['name']} has written files is not known before {_others(told)} can be asked")
    if output != "table":
        show_json(told["files"], output)
        return
    rows = [[f["path"], size(f["bytes"]), f"{ago(f['at_s'])} ago", f["host"]] for f in told["files"]]
    show_table(
        ["file", "size", "written", "host"], rows, f"{told['name']} has written no files, or they were forgotten"
    )
    if told["more"]:
        note(f"and {told['more']} more, which are not named")


def _others(told: dict[str, Any]) -> str:
    return " and ".join(told["left"])


def _matching(told: dict[str, Any], wanted: str) -> list[dict[str, Any]]:
    if not wanted:  # what a script's unset variable gives
        raise UsageError(f"no file is named: clusterd get {told['job']} lists them")
    plain = os.path.normpath(wanted)
    if plain == "." and (told["files"] or not told["left"]):
        return list(told["files"])
    found = [
        file
        for file in told["files"]
        if file["path"] == plain or file["path"].startswith(f"{plain}/") or fnmatch.fnmatch(file["path"], wanted)
    ]
    if not found and told["left"]:
        raise TryLater(f"whether {told['name']} has written {wanted} is not known before {_others(told)} can be asked")
    if not found:
        raise ClusterError(f"{told['name']} has written no {wanted}: clusterd get {told['job']} lists its files")
    return found


def _copy(cluster: Client, job: str, file: dict[str, Any], target: Path) -> None:
    """Whole or not at all."""
    part = target.with_name(f".clusterd-{os.getpid()}.part")  # a name of its own may be too long with more to it
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as out:
            arguments = {key: file[key] for key in ("path", "host", "attempt")}
            for piece in cluster.stream("file", job=job, **arguments):
                out.write(piece["data"])
        part.replace(target)
    except OSError as error:
        raise ClusterError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):  # its directory could not be made
            part.unlink(missing_ok=True)
