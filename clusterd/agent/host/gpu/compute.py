"""Computation on GPUs before a job: a kernel on each, and an all-reduce over all, in processes with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clusterd.agent import CODE_ROOT
from clusterd.agent.host import programs

DEADLINE_S = 120.0
"""For each of the two; most of it is the import of torch from a slow disk."""

REAPED_S = 5.0
"""Limit of the wait for a killed process: one that a driver holds in the kernel does not end."""

_PROGRAM = """\
import sys
sys.path.append(sys.argv[1])
from clusterd.train import gpu_check
gpu_check.main(sys.argv[2:])
"""

Result = dict[str, Any]


def check(
    python: str, uuids: Sequence[str], kind: str = "cuda", deadline_s: float = DEADLINE_S
) -> tuple[dict[str, Result], Result | None]:
    """Seconds or error of a kernel on each GPU, by uuid, and of an all-reduce over those that computed.

    Slices take no part in the all-reduce, as NCCL does not connect those of one GPU; None: there are not several GPUs.

    Args:
        python: an interpreter or a virtual environment with torch, as jobs name it.
        kind: of device; "cpu" for tests.
    """
    try:
        interpreter = programs.interpreter(python)
    except OSError as error:
        return {uuid: {"error": str(error)} for uuid in uuids}, None
    kernels = _run(interpreter, {uuid: [kind] for uuid in uuids}, deadline_s)
    able = [uuid for uuid in uuids if "error" not in kernels[uuid] and not uuid.startswith("MIG-")]
    if len(able) < 2:
        return kernels, None
    with tempfile.TemporaryDirectory(prefix="clusterd-check-") as directory:
        store = str(Path(directory) / "store")
        ranks = {uuid: [kind, str(rank), str(len(able)), store] for rank, uuid in enumerate(able)}
        reduced = _run(interpreter, ranks, deadline_s)
    # The rank that failed first explains the others' errors, and a rank that hangs follows from one that does not.
    errors = [result["error"] for result in reduced.values() if "error" in result]
    errors.sort(key=lambda error: error.startswith("no answer"))
    return kernels, {"error": errors[0]} if errors else max(reduced.values(), key=lambda result: result["seconds"])


def _run(interpreter: str, arguments: Mapping[str, Sequence[str]], deadline_s: float) -> dict[str, Result]:
    """Run the program once for each GPU, all at once."""
    environment = programs.own_environment(os.environ)
    started = {
        uuid: subprocess.Popen(
            [interpreter, "-c", _PROGRAM, str(CODE_ROOT), *given],
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
