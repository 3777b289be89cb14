"""Options by which ``clusterd run`` and ``clusterd shell`` request resources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from clusterd.errors import UsageError
from clusterd.submission.job_file import parse_container
from clusterd.types import HostId, JobSpec, Resources
from clusterd.units import parse_capability, parse_gpus, parse_size

_OPTIONS = (
    click.option("--gpus", metavar="[TYPE:]N", help="Number of GPUs, as in 2 or a100:2."),
    click.option("--devices", type=click.IntRange(0), help="Number of devices of any kind."),
    click.option("--gpu-type", metavar="NAME", help="Part of the GPU's name, as in a100 or 4090."),
    click.option("--gpu-memory", metavar="SIZE", help="Least memory of each GPU, as in 40GB."),
    click.option("--compute-capability", metavar="CONDITION", help="Of each GPU, as in '>=8.0' (in quotes)."),
    click.option("--constraint", metavar="LABEL", multiple=True, help="Label of its hosts; may be repeated."),
    click.option("--share", type=click.IntRange(1), default=1, help="Jobs that may be on its device, itself included."),
    click.option("--cpus", type=click.IntRange(0), default=0, help="CPU cores in all; default: one per device."),
    click.option("--memory", metavar="SIZE", help="Host memory in all, as in 64GB."),
    click.option("--host", "hosts", multiple=True, help="Only on this host; may be repeated."),
)


def resource_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command."""
    return _with(_OPTIONS, command)


def _with(options: Sequence[Callable[..., Any]], command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with these options, in their order."""
    for option in reversed(options):
        command = option(command)
    return command


_CONTAINER = (
    click.option("--container", metavar="RUNTIME:IMAGE", help="Run it in docker:, podman: or apptainer:IMAGE."),
    click.option(
        "--mount", "mounts", metavar="PATH[:INSIDE[:ro]]", multiple=True, help="Into the container; may be repeated."
    ),
)


def container_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a container to a command."""
    return _with(_CONTAINER, command)


def with_container(spec: JobSpec, options: Mapping[str, Any]) -> JobSpec:
    """The job in the container that the options of a command name.

    Raises:
        ConfigError: ``--container`` names no runtime.
    """
    if options["container"]:
        spec = replace(spec, container=parse_container(options["container"], "--container"))
    return replace(spec, mounts=(*spec.mounts, *options["mounts"]))


def has_devices(options: Mapping[str, Any]) -> bool:
    """True where the options name a number of devices."""
    return options["gpus"] is not None or options["devices"] is not None


def requested_resources(options: Mapping[str, Any]) -> Resources:
    """Resources that the options of a command request.

    Raises:
        UsageError: names the option.
    """
    nodes = options.get("nodes", 1)
    gpus_each, devices_each = options.get("gpus_per_node"), options.get("devices_per_node")
    given = [
        name
        for name, value in (
            ("--gpus", options["gpus"]),
            ("--devices", options["devices"]),
            ("--gpus-per-node", gpus_each),
            ("--devices-per-node", devices_each),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are both given: give one of them (devices means any kind)")
    named, gpus = "", None
    try:
        if options["gpus"] is not None:
            named, gpus = parse_gpus(options["gpus"])
    except ValueError as error:
        raise UsageError(f"--gpus: {error}") from None
    gpus = gpus_each * nodes if gpus_each is not None else gpus
    devices = devices_each * nodes if devices_each is not None else options["devices"]
    count = gpus if gpus is not None else (devices or 0)
    if nodes > 1 and (count == 0 or count % nodes):
        raise UsageError(f"--nodes {nodes}: give --gpus-per-node N, or a multiple of {nodes} devices in all")
    return Resources(
        devices=count,
        kind="cuda" if gpus is not None else None,
        nodes=nodes,
        device_name=named or options["gpu_type"] or "",
        device_memory_bytes=_size("--gpu-memory", options["gpu_memory"]),
        compute_capability=_capability(options["compute_capability"]),
        constraint=tuple(label for given in options["constraint"] for label in given.split(",")),
        share=options["share"],
        cpus=options["cpus"],
        memory_bytes=_size("--memory", options["memory"]),
        hosts=tuple(HostId(host) for host in options["hosts"]),
    )


def _capability(text: str | None) -> str:
    try:
        parse_capability(text or "")
    except ValueError as error:
        raise UsageError(f"--compute-capability: {error}") from None
    return text or ""


def _size(option: str, text: str | None) -> int:
    try:
        return parse_size(text) if text is not None else 0
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{option}: {error}") from None
