"""Versions of what an attempt runs with: Python, torch, CUDA and the GPU driver, without importing torch."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterd.agent.host import programs
from clusterd.protocol.launch import LaunchRequest

PROBE_TIMEOUT_S = 10.0
INTERPRETERS_MAX = 256

DRIVER = Path("/sys/module/nvidia/version")

_PYTHON = re.compile(r"python[0-9.]*")

_PROBE = """\
import importlib.util, json, os, sys, sysconfig
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
torch = importlib.util.find_spec("torch")
if torch is not None and torch.origin:
    about = {}
    with open(os.path.join(os.path.dirname(torch.origin), "version.py")) as file:
        exec(file.read(), about)
    found.update(torch=str(about["__version__"]), cuda=str(about.get("cuda") or ""))
print(json.dumps([found, sysconfig.get_path("purelib")]))
"""


class Versions:
    """Versions by interpreter; one whose packages have not changed since is not asked again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[dict[str, str], str, float]] = {}

    async def of(self, launch: LaunchRequest, env: Mapping[str, str]) -> dict[str, str]:
        """Versions for the ranks of a launch, by name; empty ones are left out.

        Args:
            env: environment of one rank.
        """
        python = _python(launch, env)
        found = await asyncio.get_running_loop().run_in_executor(None, self._asked, python, env) if python else {}
        return {name: value for name, value in {**found, "driver": _driver()}.items() if value}

    def _asked(self, python: str, env: Mapping[str, str]) -> dict[str, str]:
        key = (python, env.get("PYTHONPATH", ""))
        if (known := self._known.get(key)) is not None and _changed_s(python, known[1]) == known[2]:
            return known[0]
        try:
            done = subprocess.run(
                [python, "-c", _PROBE],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=PROBE_TIMEOUT_S,
                env=env,
                cwd="/",
            )
            found, packages = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return {}  # no Python that runs: the command may not need any
        found["interpreter"] = python
        while len(self._known) >= INTERPRETERS_MAX:
            del self._known[next(iter(self._known))]
        self._known[key] = (found, packages, _changed_s(python, packages))
        return dict(found)


def _python(launch: LaunchRequest, env: Mapping[str, str]) -> str | None:
    """Interpreter of the job: that which it names, or its command does, else the first on its PATH."""
    if launch.python or launch.kind == "elastic":
        try:
            return programs.interpreter(launch.python)
        except FileNotFoundError:  # removed since the ranks started
            return None
    path = env.get("PATH", os.defpath)
    program = launch.argv[0]
    names: Sequence[str] = [program] if _PYTHON.fullmatch(Path(program).name) else ["python", "python3"]
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def _changed_s(*paths: str) -> float:
    """Newest change of these files and directories; 0: one is gone."""
    try:
        return max(os.stat(path).st_mtime for path in paths)
    except OSError:
        return 0.0


def _driver() -> str:
    """Version of the loaded NVIDIA driver; empty: none."""
    try:
        return DRIVER.read_text().strip()
    except OSError:
        return ""
