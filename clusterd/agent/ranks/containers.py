"""Container runtimes of this host, and the containers of attempts: listed and removed by their label.

A container of Docker is no child of the process that started it: neither a signal to that process nor a control group
ends it for certain. Each has the tag of its attempt as its label, by which an agent finds it, also after a restart.
Those of Apptainer are ordinary children, and found as such.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Sequence

from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.log import log_line

LABEL = "clusterd.tag"

PROGRAMS = {"docker": ("docker",), "podman": ("podman",), "apptainer": ("apptainer", "singularity")}
"""Programs of each runtime, the first that is there is used."""

OUTLIVE_CLIENTS = ("docker", "podman")
"""Runtimes whose containers are no children of the program that started them."""

_VERSION = {
    "docker": ("version", "--format", "{{.Server.Version}}"),
    "podman": ("--version",),
    "apptainer": ("--version",),
}
VERSION_TIMEOUT_S = 10.0

COMMAND_TIMEOUT_S = 60.0
TRIES = 10
RETRY_S = 0.2


def program(runtime: str) -> str | None:
    """Path of a runtime's program; None: it is not on this host."""
    return next((found for name in PROGRAMS.get(runtime, ()) if (found := shutil.which(name))), None)


def runtimes() -> dict[str, str]:
    """Container runtimes of this host, each with why this account cannot use it; empty: it can.

    Blocks until each has answered.
    """
    found: dict[str, str] = {}
    for runtime, arguments in _VERSION.items():
        if (path := program(runtime)) is None:
            continue
        try:
            done = subprocess.run(
                [path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_TIMEOUT_S, text=True
            )
            lines = (done.stderr or done.stdout).strip().splitlines()
            found[runtime] = "" if done.returncode == 0 else lines[-1] if lines else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            found[runtime] = f"{path} has not answered for {VERSION_TIMEOUT_S:.0f} s"
        except OSError as error:
            found[runtime] = f"{path}: {error.strerror}"
    return found


def runtime_of(container: str) -> str:
    """Runtime of a job's ``container``: ``docker`` of ``docker:IMAGE``; empty: it has none."""
    return container.partition(":")[0]


async def tags(prefix: str, runtime: str) -> set[str]:
    """Tags of the containers of a runtime that begin with `prefix`, whether they run or have exited."""
    listed = await _call(runtime, "ps", "--all", "--format", f'{{{{.Label "{LABEL}"}}}}', "--filter", f"label={LABEL}")
    return {line for line in (listed or "").splitlines() if line.startswith(prefix)}


async def remove(tag: str, runtime: str) -> None:
    """Kill and remove the containers of an attempt; returns once none is left, or the runtime fails for long.

    A container that is being created while its client is killed appears late, so that two looks must find nothing.
    """
    if runtime not in OUTLIVE_CLIENTS:
        return
    empty, failed = 0, 0
    while empty < 2 and failed < TRIES:
        listed = await _call(runtime, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={tag}")
        names = listed.split() if listed is not None else []
        if listed is None or (names and await _call(runtime, "rm", "--force", "--volumes", *names) is None):
            failed += 1
        empty = 0 if names or listed is None else empty + 1
        await asyncio.sleep(RETRY_S * (1 + failed) if failed or names else 0.0)
    if failed >= TRIES:
        log_line(f"agent: {runtime} does not answer: a container of {tag} may still run")


async def set_paused(tag: str, runtime: str, paused: bool) -> None:
    """Freeze the containers of an attempt, or let them go on; those of Apptainer get signals like any process.

    Returns once none is left that is not so: one that is being created appears late.

    Raises:
        Refused: ``container``: the runtime cannot do it, with its message.
    """
    verb, status = ("pause", "running") if paused else ("unpause", "paused")
    empty = 0 if runtime in OUTLIVE_CLIENTS else 2
    while empty < 2:
        found = await _output(
            runtime, "ps", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={tag}", "--filter", f"status={status}"
        )
        if names := found.split():
            await _output(runtime, verb, *names)
        empty = 0 if names else empty + 1


async def _call(runtime: str, *arguments: str) -> str | None:
    """Output of a command of the runtime; None: it failed, which is logged."""
    try:
        return await _output(runtime, *arguments)
    except Refused as refused:
        log_line(f"agent: {refused}")
        return None


async def _output(runtime: str, *arguments: str) -> str:
    """Output of a command of the runtime.

    Raises:
        Refused: ``container``: it failed.
    """
    path = program(runtime)
    if path is None:
        raise Refused("container", f"{runtime} is not on this host")
    process = await asyncio.create_subprocess_exec(
        path, *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
    except (asyncio.TimeoutError, TimeoutError):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise Refused("container", f"{runtime} {arguments[0]} has not answered for {COMMAND_TIMEOUT_S:.0f} s") from None
    if process.returncode:
        raise Refused("container", f"{runtime} {arguments[0]}: {errors.decode(errors='replace').strip()}")
    return out.decode(errors="replace")


def start_failure(container: str, exit_code: int | None, log_lines: Sequence[str]) -> str:
    """Message of a runtime that could not start the container, by its own exit code; empty: the command ran."""
    if runtime_of(container) not in OUTLIVE_CLIENTS or exit_code != 125:
        return ""
    said = next((line for line in reversed(log_lines) if line.strip() and not line.startswith("See '")), "no output")
    return f"{runtime_of(container)} could not start {container.partition(':')[2]}: {said.strip()}"
