"""Command lines of clusterd's processes under a given Python, from pushed code or from a source tree."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from clusterd.agent import CODE_ROOT

# What runs when a directory of pushed code is given to Python as its program; `bundle` puts it there. The directory is
# first on the path then, and nothing of it reaches the environment that jobs inherit.
MAIN = """\
import sys

if sys.version_info < (3, 10):
    have = "%s is Python %d.%d" % (sys.executable, sys.version_info[0], sys.version_info[1])
    sys.exit("clusterd: %s; jobs of kind elastic need Python 3.10 or newer" % have)

from clusterd.agent.__main__ import main

sys.exit(main())
"""

# The same for a source tree, which is no program.
_FROM_SOURCE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from clusterd.agent.__main__ import main; sys.exit(main())"
)


def version() -> str:
    """Of the code that runs: the digest it was pushed under, or ``source``."""
    pushed = re.fullmatch(r"agent-([0-9a-f]{16})", CODE_ROOT.name)
    return pushed[1] if pushed else "source"


def command(*arguments: str, python: str | None = None, heeds_environment: bool = True) -> list[str]:
    """The command line of ``clusterd.agent`` with `arguments`, under `python` (default: this one).

    Args:
        heeds_environment: what PYTHONPATH and its like say, as they are meant to for jobs.
    """
    begin = [python or sys.executable, *(() if heeds_environment else ("-E",))]
    if (CODE_ROOT / "__main__.py").exists():
        return [*begin, str(CODE_ROOT), *arguments]
    return [*begin, "-c", _FROM_SOURCE, str(CODE_ROOT), *arguments]


def interpreter(given: str | None) -> str:
    """The interpreter that a job's ``python`` names: a program, or a virtual environment's directory.

    Raises:
        FileNotFoundError: there is none; the message says where it was looked for.
    """
    if not given:
        return sys.executable
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    elif "/" not in given:
        import shutil

        found = shutil.which(given)
        path = Path(found) if found else path
    if not os.access(path, os.X_OK) or path.is_dir():
        raise FileNotFoundError(
            f"no Python at {path}: the job's `python` must name an interpreter or a virtual environment there"
        )
    return str(path.absolute())


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that jobs inherit: without those of the SSH login and of clusterd."""
    return {k: v for k, v in environ.items() if not k.startswith(("SSH_", "CLUSTERD_"))}
