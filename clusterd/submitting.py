"""Handing a job over: its description, and the content of its working directory as it is now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterd.client import Client
from clusterd.jobfile import Request
from clusterd.units import size
from clusterd.workdir import Snapshot, pack

CHUNK_BYTES = 1 << 20


def send(
    cluster: Client, request: Request, snapshot: bool = True, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Submit; a working directory that the daemon does not have yet is sent first, and `say` told of it.

    Raises:
        ClusterError: the daemon refused the job, or the directory cannot be packed.
    """
    spec = prepare(cluster, request, snapshot, say)
    answer: dict[str, Any] = cluster.call("submit", spec=spec, secrets=request.secrets)
    return answer


def prepare(
    cluster: Client, request: Request, snapshot: bool = True, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The job as it goes over the socket, its working directory sent ahead of it.

    Raises:
        ClusterError: the directory cannot be packed, or is too large.
    """
    import msgspec

    spec = request.spec
    if snapshot and spec.workdir is not None:
        packed = pack_workdir(cluster, spec.workdir)
        with packed.archive:
            if not cluster.call("snapshot_has", digest=packed.digest)["have"]:
                say(f"sending {packed.files} files of {spec.workdir} ({size(packed.size_bytes)})")
                offset = 0
                while True:
                    data = packed.archive.read(CHUNK_BYTES)
                    last = offset + len(data) >= packed.size_bytes
                    cluster.call("snapshot_put", digest=packed.digest, offset=offset, data=data, last=last)
                    offset += len(data)
                    if last:
                        break
        spec = replace(spec, snapshot=packed.digest)
    plain: dict[str, Any] = msgspec.to_builtins(spec)
    return plain


def pack_workdir(cluster: Client, workdir: str) -> Snapshot:
    """The working directory as it would be sent to this daemon.

    Raises:
        ClusterError: it cannot be packed, or is too large.
    """
    limit = cluster.call("snapshot_has", digest="0" * 64)["bytes_max"]
    # In a home directory it is below: each workdir sent would hold those before it.
    state = Path(cluster.call("status")["state_dir"])
    return pack(Path(workdir), limit, leave_out=(state,))
