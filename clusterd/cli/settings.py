"""``clusterd config``: check files without a daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click

from clusterd import config as configuration
from clusterd.cli.output import note
from clusterd.errors import ConfigError, UsageError
from clusterd.submission.job_file import Request, read_job_file


@click.group()
def config() -> None:
    """Check a configuration or job file."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--job", "is_job", is_flag=True, help="FILE is a job file.")
def check(file: Path, is_job: bool) -> None:
    """Say what is wrong with FILE, if anything is; needs no daemon."""
    if is_job:
        request = read_job_file(file)
        _refuse_as_submit_does(file, request)
        note(f"{file}: job {request.spec.name}, {request.spec.kind.value}: right")
        return
    from clusterd.daemon.settings import refuse_unknown  # the policies take a second to import

    refuse_unknown(configuration.load(file), str(file))
    note(f"{file}: right")


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
@click.option("--config", "file", type=click.Path(path_type=Path), help="Instead of the usual file.")
def show(file: Path | None) -> None:
    """Print what `clusterd start` would go by, as a file that would say all of it."""
    known = configuration.load(file)
    daemon = {
        configuration.SPELLED.get(f.name, f.name): getattr(known, f.name)
        for f in fields(known)
        if f.name not in configuration.TABLES
    }
    _show_table("daemon", daemon)
    for host, options in known.hosts.items():
        _show_table(f"hosts.{_key(host)}", asdict(options))
    for name, tenant in known.tenants.items():
        _show_table(f"tenants.{_key(name)}", asdict(tenant))
    if known.datasets:
        _show_table("datasets", known.datasets)
    if known.notify is not None:
        _show_table("notify", asdict(known.notify))


def _show_table(heading: str, values: Mapping[str, Any]) -> None:
    print(f"[{heading}]")
    for key, value in values.items():
        print(f"# {key} is not set" if value is None else f"{_key(key)} = {_toml(value)}")
    print()


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """As JSON writes it, which for text, numbers and lists of text is TOML too."""
    return json.dumps(value, default=str, ensure_ascii=False).replace("\x7f", "\\u007f")
