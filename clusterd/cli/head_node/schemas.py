"""JSON Schemas of job files and of the daemon's file, for editors; keys and types of the daemon's file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from clusterd.config import CORES_MAX, DEVICES_MAX
from clusterd.submission.job_keys import Count, Duration, JobKeys, Size

Visibility = Literal["own", "names", "all"]
Notification = Literal[
    "job finished", "job failed", "job cancelled", "job queued again", "job idle", "host lost", "host back"
]
Url = Annotated[str, Meta(pattern="://")]


class DaemonKeys(Struct, forbid_unknown_fields=True):
    """Settings of the daemon."""

    state_dir: Annotated[
        str | UnsetType, Meta(description="Directory of the journal, logs and measurements, on a local disk.")
    ] = UNSET
    socket: Annotated[
        str | UnsetType, Meta(description="Path of the socket; clients need CLUSTERD_SOCKET set to it.")
    ] = UNSET
    socket_group: Annotated[str | UnsetType, Meta(description="Group that may connect too.")] = UNSET
    operators: Annotated[
        list[str] | UnsetType, Meta(description='Users and "@groups" that may act on everybody\'s jobs.')
    ] = UNSET
    readers: Annotated[
        list[str] | UnsetType, Meta(description='Users and "@groups" that may look, and change and submit nothing.')
    ] = UNSET
    visibility: Annotated[Visibility, Meta(description="What users see of other users' jobs.")] = "all"
    accounts: Annotated[
        Literal["own", "shared"] | UnsetType,
        Meta(description="Account of jobs; without it only the daemon's own user may submit."),
    ] = UNSET
    become: Annotated[
        Literal["ssh", "sudo"],
        Meta(description="Way to people's own accounts: with the cluster's key, or by sudo."),
    ] = "ssh"
    policy: Annotated[str, Meta(description="Policy of the scheduler.")] = "default"
    host_lost_after: Annotated[
        Duration, Meta(description="A host without contact for this long is lost; its jobs are requeued.")
    ] = "2m"
    idle_after: Annotated[
        Duration, Meta(description="Warn of jobs whose devices do nothing for this long; 0: never.")
    ] = "1h"
    reclaim_idle: Annotated[
        Duration | UnsetType,
        Meta(description="End shells whose devices do nothing for this long; default: never."),
    ] = UNSET
    archive_jobs_after: Annotated[
        Duration, Meta(description="Jobs that are over for this long leave the daemon's memory; commands find them.")
    ] = "30d"
    workdir_max: Annotated[Size, Meta(description="Largest working directory of a job.")] = "256MiB"
    ssh_config: Annotated[str | UnsetType, Meta(description="OpenSSH configuration in the place of ~/.ssh/config.")] = (
        UNSET
    )
    trials: Annotated[bool, Meta(description="Jobs may run a few steps under other plans, to measure their speed.")] = (
        True
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Level of the log.")] = "info"


class HostKeys(Struct, forbid_unknown_fields=True):
    """Options of one host."""

    cpu_devices: Annotated[
        Annotated[int, Meta(ge=0, le=DEVICES_MAX)] | UnsetType,
        Meta(description="CPU devices to offer; default: 0 on a host with GPUs, else by cores."),
    ] = UNSET
    cores_per_device: Annotated[
        int, Meta(ge=1, le=CORES_MAX, description="Cores of a CPU device, if cpu_devices is not given.")
    ] = 4
    labels: Annotated[
        list[Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._=/:-]*$")]] | UnsetType,
        Meta(description='For constraints of jobs, as in ["nvlink", "rack=a"].'),
    ] = UNSET
    exclude_devices: Annotated[
        list[Count] | UnsetType, Meta(description="Numbers of devices that are never offered.")
    ] = UNSET
    agent_home: Annotated[
        str | UnsetType, Meta(description="Directory of agents' state; default: below the home directory.")
    ] = UNSET


class TenantKeys(Struct, forbid_unknown_fields=True):
    """Quota and share of a tenant."""

    quota: Annotated[
        Count | UnsetType, Meta(description="Most devices that its jobs hold at a time; default: no limit.")
    ] = UNSET
    share: Annotated[float, Meta(gt=0, description="Weight among the tenants that compete for devices.")] = 1.0
    members: Annotated[
        list[str] | UnsetType,
        Meta(description='Users and "@groups" that may submit for it; default: operators, of "default" everybody.'),
    ] = UNSET


class LimitKeys(Struct, forbid_unknown_fields=True):
    """Limits of each user who is no operator."""

    priority: Annotated[int, Meta(description="Highest priority that may be given to a job.")] = 0
    guaranteed_devices: Annotated[
        Count, Meta(description="Devices that the guaranteed jobs that are not over may ask for, together.")
    ] = 0
    devices: Annotated[
        Count | UnsetType, Meta(description="Devices that the jobs may hold at a time; default: no limit.")
    ] = UNSET
    queued_jobs: Annotated[Count, Meta(description="Jobs that may be queued.")] = 10_000


class UserKeys(Struct, forbid_unknown_fields=True):
    """Settings of one user: the account, and limits in the place of everybody's."""

    account: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z_][a-z0-9_.-]{0,31}\$?$")] | UnsetType,
        Meta(description="Name of the account on the hosts, where it is another one."),
    ] = UNSET
    priority: int | UnsetType = UNSET
    guaranteed_devices: Count | UnsetType = UNSET
    devices: Count | UnsetType = UNSET
    queued_jobs: Count | UnsetType = UNSET


class NotifyKeys(Struct, forbid_unknown_fields=True):
    """Receivers of notifications."""

    command: Annotated[
        Annotated[list[str], Meta(min_length=1)] | UnsetType,
        Meta(description="Program that reads each notification as a JSON object from standard input."),
    ] = UNSET
    urls: Annotated[list[Url] | UnsetType, Meta(description="Services as apprise spells them.")] = UNSET
    users: Annotated[dict[str, list[Url]] | UnsetType, Meta(description="Further services, for this user's jobs.")] = (
        UNSET
    )
    on: Annotated[
        list[Notification] | UnsetType, Meta(description='Events to report; default: all but "job cancelled".')
    ] = UNSET


class WebKeys(Struct, forbid_unknown_fields=True):
    """Read-only pages over HTTP on this machine."""

    port: Annotated[int, Meta(ge=1, le=65535, description="Port of 127.0.0.1.")]
    visibility: Annotated[Visibility, Meta(description="What visitors, who are anonymous, see of jobs.")] = "own"


class DaemonFile(Struct, forbid_unknown_fields=True):
    """Configuration file of `clusterd start`."""

    daemon: Annotated[DaemonKeys | UnsetType, Meta(description="Settings of the daemon.")] = UNSET
    hosts: Annotated[
        dict[str, HostKeys] | UnsetType, Meta(description="Options by host, where the defaults do not fit.")
    ] = UNSET
    tenants: Annotated[dict[str, TenantKeys] | UnsetType, Meta(description="Quotas and shares by tenant.")] = UNSET
    limits: Annotated[LimitKeys | UnsetType, Meta(description="Limits of each user who is no operator.")] = UNSET
    users: Annotated[dict[str, UserKeys] | UnsetType, Meta(description="Accounts and limits by user.")] = UNSET
    datasets: Annotated[dict[str, str] | UnsetType, Meta(description="Folders for all jobs, as in a job file.")] = UNSET
    notify: Annotated[NotifyKeys | UnsetType, Meta(description="Notifications of what happened.")] = UNSET
    web: Annotated[WebKeys | UnsetType, Meta(description="Read-only pages for a browser.")] = UNSET


FILES: dict[str, type[Struct]] = {"job": JobKeys, "daemon": DaemonFile}


def schema(kind: str) -> dict[str, Any]:
    """JSON Schema of a kind of file.

    In the form of draft 7: Taplo follows references below ``#/definitions`` only.
    """
    root = FILES[kind]
    _, definitions = msgspec.json.schema_components([root], ref_template="#/definitions/{name}")
    if root is DaemonFile:
        from clusterd.core.policies import POLICIES  # importing the policies takes a second

        definitions["DaemonKeys"]["properties"]["policy"]["enum"] = sorted(POLICIES)
    top = definitions.pop(root.__name__)
    return {"$schema": "http://json-schema.org/draft-07/schema#", **top, "definitions": definitions}
