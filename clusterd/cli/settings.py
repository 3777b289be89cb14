"""``clusterd config``: check files without a daemon."""

from __future__ import annotations

from pathlib import Path

import click

from clusterd import config as configuration
from clusterd.cli.output import note
from clusterd.errors import ConfigError, UsageError
from clusterd.jobfile import Request, read_job_file


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
    from clusterd.daemon.wellformed import refuse_malformed

    try:
        refuse_malformed(request.spec)
        frame(1, "submit", {"spec": msgspec.to_builtins(request.spec), "secrets": request.secrets})
    except UsageError as error:
        raise ConfigError(f"{file}: {error}") from None


@config.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="Instead of the usual file.")
def show(file: Path | None) -> None:
    """Print the settings in force."""
    known = configuration.load(file)
    for name in (
        "state_dir",
        "socket",
        "socket_group",
        "operators",
        "policy",
        "host_lost_after_s",
        "workdir_bytes_max",
        "ssh_config",
        "log_level",
    ):
        print(f"{name} = {getattr(known, name)}")
    for host, options in known.hosts.items():
        print(f"hosts.{host} = {options}")
