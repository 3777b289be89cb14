"""Submission of a job to the daemon: its specification and its packed working directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterd.client import Client
from clusterd.submission.job_file import Request
from clusterd.submission.workdir import IGNORE_FILE, Snapshot, commit_of, pack
from clusterd.types import JobKind, JobSpec
from clusterd.units import counted, size

CHUNK_BYTES = 1 << 20


def send(
    cluster: Client, request: Request, snapshot: bool = True, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Submit a job; send its working directory first if the daemon lacks it, and report that to `say`.

    Raises:
        ClusterError: the daemon refused the job, or the directory cannot be packed.
    """
    spec = with_workdir(cluster, request.spec, say) if snapshot else request.spec
    return hand_over(cluster, Request(spec, request.secrets))


def hand_over(cluster: Client, request: Request) -> dict[str, Any]:
    """Submit a job whose working directory, if any, the daemon already has.

    Raises:
        ClusterError: the daemon refused it.
    """
    answer: dict[str, Any] = cluster.call("submit", spec=plain(request.spec), secrets=request.secrets)
    return answer


def plain(spec: JobSpec) -> dict[str, Any]:
    """Encode a job for the socket."""
    import msgspec

    described: dict[str, Any] = msgspec.to_builtins(spec)
    return described


def spec_of(row: dict[str, Any]) -> JobSpec:
    """Decode a job's specification, as rows have it."""
    import msgspec

    return msgspec.convert(row, JobSpec)


def with_workdir(
    cluster: Client, spec: JobSpec, say: Callable[[str], None] = lambda _: None, first: JobSpec | None = None
) -> JobSpec:
    """Send the job's working directory to the daemon if needed; returns the job with its digest.

    Args:
        first: of the jobs of an array, a sweep or stages: checked in the place of what they are made from.
    Raises:
        ClusterError: the directory cannot be packed, or is too large, or the daemon refuses the job.
    """
    if spec.workdir is None:
        return spec
    packed = pack_workdir(cluster, spec)
    if packed.secrets:
        named = ", ".join(packed.secrets[:3]) + (f" and {len(packed.secrets) - 3} more" * (len(packed.secrets) > 3))
        say(f"not sent, as they look like secrets: {named} (!NAME in {IGNORE_FILE} sends one)")
    with packed.archive:
        if not cluster.call("snapshot_has", digest=packed.digest)["have"]:
            cluster.call("dry_run", spec=plain(first or spec), only_check=True)  # what is refused needs no files
            say(f"sending {counted(packed.files, 'file')} of {spec.workdir} ({size(packed.size_bytes)})")
            offset = 0
            while True:
                data = packed.archive.read(CHUNK_BYTES)
                last = offset + len(data) >= packed.size_bytes
                cluster.call("snapshot_put", digest=packed.digest, offset=offset, data=data, last=last)
                offset += len(data)
                if last:
                    break
    return replace(spec, snapshot=packed.digest, commit=commit_of(Path(spec.workdir)))


def pack_workdir(cluster: Client, spec: JobSpec) -> Snapshot:
    """Pack the job's working directory within the daemon's limit.

    Raises:
        ClusterError: it cannot be packed, or is too large.
    """
    status = cluster.call("status")
    assert spec.workdir is not None
    imports_ours = spec.kind is not JobKind.COMMAND
    return pack(Path(spec.workdir), status["workdir_bytes_max"], imports_ours=imports_ours)
