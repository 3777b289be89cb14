"""JSON Schemas of job files and of the daemon's file, for editors, made from the declarations of their keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from functools import reduce
from operator import getitem, or_
from typing import Annotated, Any, Literal

import msgspec
from msgspec import NODEFAULT, UNSET, Meta, Struct, UnsetType, defstruct

from clusterd import config
from clusterd.config import URLS_BY_USER
from clusterd.keys import PLAN, PLANS, Key, Value, keys_of
from clusterd.submission.job_file import job_keys
from clusterd.types import Limits, Tenant


class PlanTable(Struct, forbid_unknown_fields=True):
    """Plan of an elastic job as a table."""

    dp: Annotated[int, Meta(ge=1, description="Data-parallel replicas.")] = 1
    tp: Annotated[int, Meta(ge=1, description="Tensor-parallel shards of each layer.")] = 1
    pp: Annotated[int, Meta(ge=1, description="Pipeline stages.")] = 1
    zero: Annotated[int, Meta(ge=0, le=3, description="ZeRO stage.")] = 0
    offload: Annotated[
        Literal["none", "optimizer", "parameters"], Meta(description="State that is held in host memory.")
    ] = "none"
    accumulation: Annotated[int, Meta(ge=1, description="Micro-batches per step and replica.")] = 1
    checkpointing: Annotated[bool, Meta(description="Recompute activations in the backward pass.")] = False
    schedule: Annotated[Literal["1f1b", "gpipe"], Meta(description="Schedule of the pipeline.")] = "1f1b"
    shares: Annotated[
        list[Annotated[int, Meta(ge=1)]] | UnsetType,
        Meta(description="Samples of the global batch per replica; default: equal shares."),
    ] = UNSET


_SHAPES = (
    (PLAN, str | PlanTable),
    (PLANS, list[str | PlanTable]),
    (URLS_BY_USER, dict[str, list[Annotated[str, Meta(pattern="://")]]]),
)
"""Types of values with an inner structure."""


def _limited(accepted: Any, schema: Mapping[str, Any]) -> Any:
    return getitem(Annotated, (accepted, Meta(**schema)))


def _type(value: Value) -> Any:
    """Type of the values that a file may have."""
    for known, shape in _SHAPES:
        if value is known:
            return shape
    if value.choices:
        return Literal[value.choices]
    accepted = value.shape or value.accepts
    if isinstance(accepted, tuple):
        accepted = float if accepted == (int, float) else reduce(or_, accepted)
    if accepted in (list, dict):
        item = (_limited(Literal[value.item] if isinstance(value.item, tuple) else value.item, value.schema),)
        return accepted.__class_getitem__((str, *item) if accepted is dict else item)
    return _limited(accepted, value.schema)


def _field(key: Key) -> tuple[str, Any, Any]:
    """Name, type and default of a key; one whose default is in words has none."""
    described = f"{key.doc} Default: {key.default}." if key.default else key.doc
    if key.initial is MISSING and not key.default:
        least = {"min_length": 1} if key.value.accepts is list else {}
        return key.short, _limited(_type(key.value), {"description": described, **least}), NODEFAULT
    if key.default:
        return key.short, _limited(_type(key.value) | UnsetType, {"description": described}), UNSET
    default = key.value.words(key.initial) if key.value.choices else key.initial
    return key.short, _limited(_type(key.value), {"description": described}), default


def table(name: str, meaning: str, keys: Iterable[Key], *tables: tuple[str, Any, Any]) -> type[Struct]:
    """Structure of a table of a file; what is required comes first."""
    found = sorted(map(_field, keys), key=lambda field: field[2] is not NODEFAULT)
    return defstruct(
        name, [*found, *tables], namespace={"__doc__": meaning}, module=__name__, forbid_unknown_fields=True
    )


def inner(name: str, kind: Any, meaning: str) -> tuple[str, Any, Any]:
    """Table within another."""
    return name, Annotated[kind | UnsetType, Meta(description=meaning)], UNSET


def _keys(section: str) -> list[Key]:
    return [key for key in job_keys().values() if key.section == section]


ResourceKeys = table("ResourceKeys", "Devices, cores and memory that the job requests.", _keys("resources"))
LimitKeys = table("LimitKeys", "Times and counts after which the job ends or is started again.", _keys("limits"))
CheckpointKeys = table("CheckpointKeys", "Checkpoints that clusterd writes for an elastic job.", _keys("checkpoints"))
JobKeys = table(
    "JobKeys",
    "A job file of `clusterd submit`.",
    _keys(""),
    inner("resources", ResourceKeys, "What the job requests."),
    inner("limits", LimitKeys, "When the job ends or is started again."),
    inner("checkpoints", CheckpointKeys, "Checkpoints of an elastic job."),
)


DaemonKeys = table("DaemonKeys", "Settings of the daemon.", keys_of(config.Config))
HostKeys = table("HostKeys", "Options of one host.", keys_of(config.HostOptions))
TenantKeys = table("TenantKeys", "Quota and share of a tenant.", keys_of(Tenant))
UserLimitKeys = table("LimitKeys", "Limits of each user who is no operator.", keys_of(Limits))
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
    inner("limits", UserLimitKeys, "Limits of each user who is no operator."),
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
