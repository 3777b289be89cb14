"""Active checks of a host: reachability of other hosts, a Python environment, limits, survival of a logout."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from clusterd.agent import CODE_ROOT
from clusterd.agent.host import cgroups, programs
from clusterd.agent.host.gpu import compute
from clusterd.protocol.migration import Address
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
    all_reduce = None
    if python is not None and environment is not None and "error" not in environment and gpus:
        kernels, all_reduce = compute.check(python, gpus)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reached = pool.map(lambda place: _reach(*place), peers.values())
        return HostCheck(
            ends_at_logout=_ends_at_logout(),
            all_reduce=all_reduce,
            environment=environment,
            enforced=cgroups.enforced(),
            kernels=kernels,
            lingers=cgroups.lingers(),
            peers=dict(zip(peers, reached, strict=True)),
        )


def _reach(address: str, port: int) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        socket.create_connection((address, port), REACH_TIMEOUT_S).close()
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {"seconds": time.monotonic() - began_s}


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
