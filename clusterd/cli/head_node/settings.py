"""``clusterd config``: check and show files, and print their schemas, without a daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click

from clusterd import config as configuration
from clusterd.cli.common.output import note
from clusterd.errors import ConfigError, UsageError
from clusterd.submission.batch_script import is_script, read_job_or_script
from clusterd.submission.job_file import Request, parse_job
from clusterd.toml import read_toml, refuse_mistakes


@click.group()
def config() -> None:
    """Check a configuration or job file, or complete its keys in an editor."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--job", "is_job", is_flag=True, help="FILE is a job file, whatever is in it.")
def check(file: Path, is_job: bool) -> None:
    """Check a job file, a batch script or the daemon's configuration, and report all mistakes with their lines.

    Needs no daemon.
    """
    is_batch = is_script(file)
    values = {} if is_batch else read_toml(file)
    if is_job or _looks_like_a_job(values):
        if not is_batch:
            refuse_mistakes(file, values, lambda some: _refuse_as_submit_does(file, parse_job(some, file, str(file))))
        request = read_job_or_script(file)
        _refuse_as_submit_does(file, request)
        note(f"{file}: job {request.spec.name}, {request.spec.kind.value}: valid")
        return
    from clusterd.daemon.settings import refuse_unknown  # importing the policies takes a second

    refuse_mistakes(file, values, lambda some: refuse_unknown(configuration.of_values(some, file), str(file)))
    note(f"{file}: valid")


def _looks_like_a_job(values: dict[str, Any]) -> bool:
    """True for keys of a job at the top of a file or for its tables; the daemon has others, and two alike."""
    if not values or any(not isinstance(value, dict) for value in values.values()):
        return True
    telling = values.keys() - {"limits", "datasets"}
    return bool(telling) and not telling & {"daemon", *configuration.TABLES}


def _refuse_as_submit_does(file: Path, request: Request) -> None:
    import msgspec

    from clusterd.client import frame
    from clusterd.daemon.api.validation import refuse_malformed
    from clusterd.submission.workdir import refuse_missing

    try:
        if request.spec.workdir is not None:
            refuse_missing(Path(request.spec.workdir))
        refuse_malformed(request.spec)
        frame(1, "submit", {"spec": msgspec.to_builtins(request.spec), "secrets": request.secrets})
    except UsageError as error:
        raise ConfigError(f"{file}: {error}") from None


@config.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="Use this file instead of the usual one.")
def show(file: Path | None) -> None:
    """Print the effective configuration of `clusterd start`, as a complete configuration file."""
    known = configuration.load(file)
    _show_table("daemon", {f.name: getattr(known, f.name) for f in fields(known) if f.name not in configuration.TABLES})
    for host, options in known.hosts.items():
        _show_table(f"hosts.{_key(host)}", asdict(options))
    for name, tenant in known.tenants.items():
        _show_table(f"tenants.{_key(name)}", asdict(tenant))
    _show_table("limits", asdict(known.limits))
    for name, user in known.users.items():
        own = {key: value for key, value in asdict(user.limits).items() if value != getattr(known.limits, key)}
        _show_table(f"users.{_key(name)}", {"account": user.account or None, **own})
    if known.datasets:
        _show_table("datasets", known.datasets)
    if known.notify is not None:
        _show_table("notify", asdict(known.notify))
    if known.web is not None:
        _show_table("web", asdict(known.web))


@config.command("schema")
@click.argument("kind", type=click.Choice(["job", "daemon"]))
def print_schema(kind: str) -> None:
    """Print the JSON Schema of job files or of the daemon's file, with which an editor completes and checks keys.

    \b
    clusterd config schema job > job.schema.json
    #:schema ./job.schema.json    first line of a job file, for Taplo and Even Better TOML
    """
    from clusterd.cli.head_node.schemas import schema

    print(json.dumps(schema(kind), indent=2))


def _show_table(heading: str, values: Mapping[str, Any]) -> None:
    print(f"[{heading}]")
    for field, value in values.items():
        key = configuration.SPELLED.get(field, field)
        print(f"# {key} is not set" if value is None else f"{_key(key)} = {_toml(value)}")
    print()


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A value as JSON, which is also TOML for text, numbers and lists of text."""
    return json.dumps(value, default=str, ensure_ascii=False).replace("\x7f", "\\u007f")
