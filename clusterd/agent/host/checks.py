"""Active checks of a host: other hosts in reach, a Python environment, limits, survival of a logout, its GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clusterd.agent import CODE_ROOT
from clusterd.agent.host import cgroups, programs
from clusterd.protocol.launch import Address
from clusterd.protocol.requests import HostCheck

REACH_TIMEOUT_S = 5.0
PYTHON_TIMEOUT_S = 120.0
"""Limit of `import torch`; a network file system that takes longer is too slow to train from."""

LOGIND_TIMEOUT_S = 5.0
AT_ONCE = 32

_TRY_TORCH = """\
import json, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
sys.path.append(sys.argv[1])
try:
    import torch
    found["torch"] = torch.__version__
    found["cuda"], found["gpus"] = torch.version.cuda, torch.cuda.device_count()
    import clusterd.train.process.torch_version
except Exception as error:
    found["error"] = "%s: %s" % (type(error).__name__, error)
print(json.dumps(found))
"""

_LOGIND = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


def check(peers: Mapping[str, Address], python: str | None, gpus: Sequence[str] = ()) -> HostCheck:
    """Run all checks; blocks until they are done.

    Args:
        peers: address and port at which the agents of other hosts serve tensor slices, by host.
        python: an interpreter or a virtual environment, as jobs name it; None: not checked.
        gpus: uuids of GPUs that no job uses, to compute on with this Python's torch.
    """
    environment = None if python is None else _environment(python)
    kernels: dict[str, dict[str, Any]] = {}
    all_reduce = access = None
    if python is not None and environment is not None and "error" not in environment and gpus:
        kernels, all_reduce, access = check_gpus(python, gpus)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reached = pool.map(lambda place: _reach(*place), peers.values())
        return HostCheck(
            access=access,
            ends_at_logout=_ends_at_logout(),
            all_reduce=all_reduce,
            environment=environment,
            enforced=cgroups.enforced(),
            kernels=kernels,
            lingers=cgroups.lingers(),
            peers=dict(zip(peers, reached, strict=True)),
            small_pages=has_small_pages(),
        )


def _reach(address: str, port: int) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        socket.create_connection((address, port), REACH_TIMEOUT_S).close()
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"seconds": time.monotonic() - began_s}


MOUNTS = Path("/proc/mounts")
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def has_small_pages(mounts: Path = MOUNTS, kernel: Path = SHMEM_HUGE) -> bool:
    """True where /dev/shm has pages of the usual size, and the kernel has large ones for it."""
    try:
        options = [line.split()[3] for line in mounts.read_text().splitlines() if line.split()[1:3] == _SHM]
        return kernel.exists() and bool(options) and "huge=" not in options[-1].replace("huge=never", "")
    except (OSError, IndexError):
        return False


_SHM = ["/dev/shm", "tmpfs"]


def _environment(python: str) -> dict[str, Any]:
    """Versions of Python and torch, and the number of GPUs torch sees; `error`: why elastic jobs cannot run there."""
    try:
        interpreter = programs.interpreter(python)
        done = subprocess.run(
            [interpreter, "-c", _TRY_TORCH, str(CODE_ROOT)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=PYTHON_TIMEOUT_S,
            env=programs.own_environment(os.environ),
        )
        lines = done.stdout.splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        if not found:
            errors = done.stderr.decode(errors="replace").strip().splitlines()
            found = {"error": f"{interpreter} exited with {done.returncode}: {errors[-1] if errors else 'no output'}"}
    except subprocess.TimeoutExpired:
        found = {"error": f"importing torch takes more than {PYTHON_TIMEOUT_S:.0f} s"}
    except (OSError, ValueError) as error:
        found = {"error": str(error)}
    return found


def _ends_at_logout() -> bool | None:
    """True if logind kills this user's processes, so agents and ranks, at logout; None if unknown."""
    kills = _logind("KillUserProcesses")
    if kills is None:
        return None
    only, spared = _logind("KillOnlyUsers") or "", _logind("KillExcludeUsers") or ""
    try:
        user = f'"{pwd.getpwuid(os.getuid()).pw_name}"'
    except KeyError:  # a uid without an entry in the user database
        user = f'"{os.getuid()}"'
    return kills.split() == ["b", "true"] and user not in spared and (user in only or '"' not in only)


def _logind(name: str) -> str | None:
    try:
        done = subprocess.run(
            ["busctl", "get-property", *_LOGIND, name],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=LOGIND_TIMEOUT_S,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


GPU_DEADLINE_S = 120.0
"""For a kernel and for an all-reduce; most of it is the import of torch from a slow disk."""

REAPED_S = 5.0
"""Limit of the wait for a killed process: one that a driver holds in the kernel does not end."""

_COMPUTE = """\
import sys
sys.path.append(sys.argv[1])
from clusterd.train import gpu_check
gpu_check.main(sys.argv[2:])
"""

Result = dict[str, Any]


def check_gpus(
    python: str, uuids: Sequence[str], kind: str = "cuda", deadline_s: float = GPU_DEADLINE_S
) -> tuple[dict[str, Result], Result | None, Result | None]:
    """Compute on GPUs: results of a kernel and copies on each, by uuid; of an all-reduce over all; of their access.

    Slices take no part in the latter two, as NCCL does not connect those of one GPU; None: there are not several GPUs.

    Args:
        python: an interpreter or a virtual environment with torch, as jobs name it.
        kind: of device; "cpu" for tests.
    """
    try:
        interpreter = programs.interpreter(python)
    except OSError as error:
        return {uuid: {"error": str(error)} for uuid in uuids}, None, None
    kernels = _run(interpreter, {uuid: [kind] for uuid in uuids}, deadline_s)
    able = [uuid for uuid in uuids if "error" not in kernels[uuid] and not uuid.startswith("MIG-")]
    if len(able) < 2:
        return kernels, None, None
    together = ",".join(able)
    access = _run(interpreter, {together: [kind, str(len(able))]}, deadline_s)[together]
    if "without_access" in access:
        access = {"without_access": [[able[n] for n in pair] for pair in access["without_access"]]}
    with tempfile.TemporaryDirectory(prefix="clusterd-check-") as directory:
        store = str(Path(directory) / "store")
        ranks = {uuid: [kind, str(rank), str(len(able)), store] for rank, uuid in enumerate(able)}
        reduced = _run(interpreter, ranks, deadline_s)
    # The rank that failed first explains the others' errors, and a rank that hangs follows from one that does not.
    errors = [result["error"] for result in reduced.values() if "error" in result]
    errors.sort(key=lambda error: error.startswith("no answer"))
    slowest = {"error": errors[0]} if errors else max(reduced.values(), key=lambda result: result["seconds"])
    return kernels, slowest, access


def _run(interpreter: str, arguments: Mapping[str, Sequence[str]], deadline_s: float) -> dict[str, Result]:
    """Run the program once for each GPU, all at once."""
    environment = programs.own_environment(os.environ)
    started = {
        uuid: subprocess.Popen(
            [interpreter, "-c", _COMPUTE, str(CODE_ROOT), *given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, "CUDA_VISIBLE_DEVICES": uuid},
            start_new_session=True,
        )
        for uuid, given in arguments.items()
    }
    with ThreadPoolExecutor(max(len(started), 1)) as pool:
        return dict(zip(started, pool.map(lambda process: _result(process, deadline_s), started.values()), strict=True))


def _result(process: subprocess.Popen[bytes], deadline_s: float) -> Result:
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=REAPED_S)
        return {"error": f"no answer within {deadline_s:.0f} s"}
    lines = output.splitlines()
    try:
        found = json.loads(lines[-1])
        if isinstance(found, dict) and ("error" in found or process.returncode == 0):
            return found
    except (IndexError, ValueError):
        pass
    last = (errors.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
    return {"error": f"it exited with {process.returncode}: {last}"}
