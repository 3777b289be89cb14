"""Validation of submitted jobs from any client, before a value gets into the journal."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from clusterd.core.allocation.requirements import unsatisfiable
from clusterd.core.host import Host
from clusterd.core.queueing import admission, bookings
from clusterd.core.state import Job, State
from clusterd.core.view import View
from clusterd.errors import UsageError
from clusterd.keys import CONTAINER_RUNTIMES, checked_name, keys_of
from clusterd.outside_text import TEXT_LETTERS_MAX
from clusterd.types import HostId, JobId, JobKind, JobSpec
from clusterd.units import counted

_MOUNT = re.compile(r"[/~][^:]*(:/[^:]*(:ro)?)?")


def refuse_booking(spec: JobSpec, state: State) -> None:
    """Refuse a job of a booking that is not its user's, or too small for it.

    Raises:
        UsageError: it is.
    """
    if why := bookings.misfit(spec, state.device_claims):
        raise UsageError(why)


def refuse_malformed(spec: JobSpec) -> None:
    """Refuse values that no clock or process can take, and contradictions.

    Raises:
        UsageError: naming the field and what would be right.
    """
    try:
        checked_name(spec.name)
    except ValueError as error:
        raise UsageError(f"the job: {error}") from None
    for key in keys_of(JobSpec):
        value = key.of(spec)
        if value is not None and not isinstance(value, bool) and (problem := key.value.problem(value)):
            raise UsageError(f"{key.name}{problem if problem.startswith(':') else f' {problem}'}")
    wanted = spec.resources
    if wanted.kind not in (None, "cuda", "cpu"):
        raise UsageError(f"resources.kind is {wanted.kind!r}; it must be cuda or cpu, or left out for any")
    if wanted.devices % wanted.nodes:
        raise UsageError(f"{wanted.devices} devices cannot be spread evenly over {wanted.nodes} nodes: give a multiple")
    if wanted.nodes > 1 and spec.kind is not JobKind.COMMAND:
        raise UsageError(f"nodes applies to commands: where {spec.kind.value} jobs run is chosen for them")
    if wanted.tasks > 1 and (spec.kind is not JobKind.COMMAND or spec.container):
        raise UsageError("tasks applies to commands outside of containers; elastic jobs have a rank on each device")
    if wanted.tasks > 1 and wanted.tasks % wanted.nodes:
        raise UsageError(f"{wanted.tasks} tasks cannot be spread evenly over {wanted.nodes} nodes: give a multiple")
    if spec.preemptible and spec.kind is not JobKind.COMMAND:
        raise UsageError(f"preemptible applies to commands: {spec.kind.value} jobs can be suspended anyway")
    if wanted.share > 1 and (spec.kind is not JobKind.COMMAND or wanted.devices != 1 or spec.preemptible):
        raise UsageError("share applies to commands and shells with one device, and not to preemptible ones")
    if wanted.max_devices and max(wanted.devices, wanted.min_devices) > wanted.max_devices:
        asked = max(wanted.devices, wanted.min_devices)
        raise UsageError(f"at most {counted(wanted.max_devices, 'device')} may be used, but {asked} are asked for")
    if spec.limit_signal and spec.time_limit_s is None and not spec.booking:
        raise UsageError("limits.signal is sent before the time limit, and the job has none: give limits.time")
    if spec.uv and spec.requirements:
        raise UsageError("uv and requirements are both given: give one of them")
    if spec.is_built and not (spec.snapshot or spec.workdir):
        raise UsageError("uv and requirements name files of the workdir, but the job has none")
    _refuse_container(spec)
    if spec.command and not spec.command[0]:
        raise UsageError("command begins with an empty word: give the program to run")
    for name in (*spec.env, *spec.secrets):
        if not name or "=" in name:
            raise UsageError(f"env: {name!r} is no name of a variable: it must not be empty, nor hold '='")
    for field, names in (("after", spec.after), ("resources.hosts", wanted.hosts)):
        if "" in names:
            raise UsageError(f"{field} has an empty name: take it out")
    for field, text, is_shown in _texts(spec):
        _refuse_null(field, text)
        if is_shown and not text.isprintable():
            raise UsageError(f"{field} is {text!r}, which others could not be shown: take out what does not print")
        if is_shown and len(text) > TEXT_LETTERS_MAX:
            raise UsageError(f"{field} has {len(text)} letters; it may have {TEXT_LETTERS_MAX}")
    admission.may_submit(spec)


def _refuse_container(spec: JobSpec) -> None:
    """Refuse a container that cannot be started as it is described.

    Raises:
        UsageError: naming the field.
    """
    if not spec.container:
        if spec.mounts:
            raise UsageError("mounts is for a job in a container: give container, or leave it out")
        return
    _, _, image = spec.container.partition(":")
    if spec.runtime not in CONTAINER_RUNTIMES or not image or image.startswith("-"):
        raise UsageError(
            f"container is {spec.container!r}; it must be {' or '.join(CONTAINER_RUNTIMES)}, as in docker:IMAGE"
        )
    if spec.kind is JobKind.ELASTIC:
        raise UsageError(
            "container is for commands and checkpointable jobs: ranks of an elastic job are forks of a process of the "
            "host that has torch loaded; give it python, uv or requirements"
        )
    if spec.python or spec.is_built:
        raise UsageError("container and python, uv or requirements are both given: Python is that of the image")
    for mount in spec.mounts:
        if not _MOUNT.fullmatch(mount):
            raise UsageError(f"mounts: {mount!r}: write /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro")


def refuse_unsatisfiable(spec: JobSpec, state: State, otherwise: str) -> None:
    """Refuse a job that no host of the cluster could ever serve, unless it is to wait for hosts.

    Args:
        otherwise: advice that ends the message.
    Raises:
        UsageError: says what the cluster has.
    """
    if spec.waits_for_hosts:
        return
    job = Job(JobId("new"), spec, priority=spec.priority, submitted_s=0.0, queued_s=0.0)
    # What some of the hosts can serve, all can: few jobs need a look at more than a few of a thousand hosts.
    names = [name for name in spec.resources.hosts if name in state.hosts] or list(state.hosts)
    count = 1
    while count < len(names):
        if unsatisfiable(job, _view_of({name: state.hosts[name] for name in names[:count]})) is None:
            return
        count *= 2
    reason = unsatisfiable(job, _view_of(state.hosts))
    if reason is not None:
        raise UsageError(f"{spec.name} can never start: it {reason}; {otherwise}")


def _view_of(hosts: dict[HostId, Host]) -> View:
    return View(State(hosts=hosts), time.time())


def refuse_secrets(secrets: Mapping[str, str]) -> None:
    """Refuse values that no process can take.

    Raises:
        UsageError: naming the secret, never its value.
    """
    for name, value in secrets.items():
        if not name or "=" in name or not name.isprintable():
            raise UsageError(f"secrets: {name!r} is no name of a variable")
        if not isinstance(value, str):
            raise UsageError(f"the secret {name} is no text")
        _refuse_null(f"the secret {name}", value)


def _refuse_null(what: str, text: str) -> None:
    if "\0" in text:
        raise UsageError(f"{what} holds a null byte, which no process can be given: take it out")


def _texts(spec: JobSpec) -> Iterator[tuple[str, str, bool]]:
    """Texts by the name of their key; true for those that are shown in one line beside other jobs.

    Values of variables and a command may have several lines; these are shown escaped.
    """
    yield "commit", spec.commit, True
    for key in keys_of(JobSpec):
        value = key.of(spec)
        if isinstance(value, dict):
            yield from ((key.name, name, True) for name in value)
            yield from ((key.name, text, False) for text in value.values())
        for text in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
            if isinstance(text, str):
                yield key.name, text, key.name != "command"
