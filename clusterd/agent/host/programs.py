"""Command lines of clusterd's processes under a given Python, from pushed code or from a source tree."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from clusterd.agent import CODE_ROOT
from clusterd.trusted_paths import account_name

# `bundle` adds this as `__main__.py`, so that Python can run the directory of pushed code as a program. Python puts the
# directory first on sys.path, and no variable of the environment that jobs inherit has to name it.
MAIN = """\
import sys

if sys.version_info < (3, 10):
    have = "%s is Python %d.%d" % (sys.executable, sys.version_info[0], sys.version_info[1])
    sys.exit("clusterd: %s; this needs Python 3.10 or newer" % have)

from clusterd.agent.__main__ import main

sys.exit(main())
"""

# The same for a source tree, which has no `__main__.py`.
_FROM_SOURCE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from clusterd.agent.__main__ import main; sys.exit(main())"
)


def version() -> str:
    """Version of the running code: the digest under which it was pushed, or ``source``."""
    pushed = re.fullmatch(r"agent-([0-9a-f]{16})", CODE_ROOT.name)
    return pushed[1] if pushed else "source"


def command(*arguments: str, python: str | None = None, heeds_environment: bool = True) -> list[str]:
    """Command line of ``clusterd.agent`` with `arguments`, under `python` (default: this interpreter).

    Args:
        heeds_environment: PYTHONPATH and similar variables apply, as jobs expect; false: they are ignored (-E).
    """
    begin = [python or sys.executable, *(() if heeds_environment else ("-E",))]
    if (CODE_ROOT / "__main__.py").exists():
        return [*begin, str(CODE_ROOT), *arguments]
    return [*begin, "-c", _FROM_SOURCE, str(CODE_ROOT), *arguments]


def interpreter(given: str | None) -> str:
    """Path of the interpreter that a job's ``python`` names: a program, or the directory of a virtual environment.

    Raises:
        FileNotFoundError: there is no such interpreter; the message names the path.
    """
    if not given:
        return sys.executable
    path = Path(given).expanduser()
    if os.path.isdir(path):  # Path.is_dir raises where a directory above is closed
        path = path / "bin" / "python"
    elif "/" not in given:
        import shutil

        found = shutil.which(given)
        path = Path(found) if found else path
    if fault := _why_not(path):
        raise FileNotFoundError(f"{fault}; the job's `python` must name an interpreter or a virtual environment there")
    return str(path.absolute())


def _why_not(path: Path) -> str:
    """Reason for which this account cannot run an interpreter; empty where it can."""
    if os.access(path, os.X_OK) and not os.path.isdir(path):
        return ""
    try:
        os.stat(path)
    except PermissionError:
        closed = next((p for p in reversed(path.parents) if not os.access(p, os.X_OK)), path.parent)
        return f"no Python at {path} for {account_name(os.getuid())}: {closed} is closed to it (chmod o+x {closed})"
    except OSError:
        if path.is_symlink():
            target = os.readlink(path)
            return (
                f"no Python at {path}: it links to {target}, which is not on this host: make the environment anew here"
            )
        return f"no Python at {path}"
    if os.path.isdir(path):
        return f"no Python at {path}: it is a directory"
    return f"no Python at {path} for {account_name(os.getuid())}: it may not execute the file (chmod a+rx {path})"


_OF_OTHERS = (
    "SSH_", "CLUSTERD_",
    "SLURM_", "SBATCH_", "SRUN_", "PBS_", "LSB_", "SGE_", "FLUX_",  # an allocation of another scheduler
    "PMI_", "PMI2_", "PMIX_", "OMPI_", "ORTE_", "PRTE_", "MPI_LOCAL", "I_MPI_HYDRA", "HYDRA_", "MV2_COMM_",
    "TORCHELASTIC_", "PET_", "ACCELERATE_",
    "CONDA_", "VIRTUAL_ENV", "PYTHONHOME", "FSSPEC_", "TMUX", "VSCODE_",
)  # fmt: skip
"""Beginnings of variables by which programs take themselves for a part of what the agent was started from."""


OF_SHELLS = frozenset(("_", "SHLVL", "PWD", "OLDPWD", "TERM", "PS1", "PS2", "PS4", "PROMPT_COMMAND", "STY", "WINDOW"))
"""Variables of one shell, and of the terminal that it runs in."""

_OF_LAUNCHERS = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
     "ROLE_WORLD_SIZE", "NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
)  # fmt: skip


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of `environ` that jobs inherit: none of the shell, clusterd, or a surrounding job or environment."""
    left_out = OF_SHELLS | _OF_LAUNCHERS
    return {k: v for k, v in environ.items() if k not in left_out and not k.startswith(_OF_OTHERS)}
