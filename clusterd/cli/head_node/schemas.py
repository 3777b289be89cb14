"""JSON Schemas of job files and of the daemon's file, for editors."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from clusterd import config
from clusterd.keys import keys_of
from clusterd.submission.job_keys import JobKeys, inner, table
from clusterd.types import Limits, Tenant

DaemonKeys = table("DaemonKeys", "Settings of the daemon.", keys_of(config.Config))
HostKeys = table("HostKeys", "Options of one host.", keys_of(config.HostOptions))
TenantKeys = table("TenantKeys", "Quota and share of a tenant.", keys_of(Tenant))
LimitKeys = table("LimitKeys", "Limits of each user who is no operator.", keys_of(Limits))
UserKeys = table(
    "UserKeys",
    "Settings of one user: the account, and limits in the place of everybody's.",
    (*keys_of(config.User), *keys_of(Limits)),
)
NotifyKeys = table("NotifyKeys", "Receivers of notifications.", keys_of(config.Notify))
WebKeys = table("WebKeys", "Read-only pages over HTTP on this machine.", keys_of(config.Web))
DaemonFile = table(
    "DaemonFile",
    "Configuration file of `clusterd start`.",
    (),
    inner("daemon", DaemonKeys, "Settings of the daemon."),
    inner("hosts", dict[str, HostKeys], "Options by host, where the defaults do not fit."),  # type: ignore[valid-type]
    inner("tenants", dict[str, TenantKeys], "Quotas and shares by tenant."),  # type: ignore[valid-type]
    inner("limits", LimitKeys, "Limits of each user who is no operator."),
    inner("users", dict[str, UserKeys], "Accounts and limits by user."),  # type: ignore[valid-type]
    inner("datasets", dict[str, str], "Folders for all jobs, as in a job file."),
    inner("notify", NotifyKeys, "Notifications of what happened."),
    inner("web", WebKeys, "Read-only pages for a browser."),
)

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
