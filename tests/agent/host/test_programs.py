"""Interpreters that jobs name, and why one cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterd.agent import CODE_ROOT
from clusterd.agent.host import programs


def test_an_environment_whose_interpreter_is_gone_says_where_it_led(tmp_path: Path) -> None:
    """As after an upgrade of the system's Python, or a copy from another machine."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/opt/gone/python3.9")
    with pytest.raises(FileNotFoundError, match=r"it links to /opt/gone/python3\.9, which is not on this host"):
        programs.interpreter(str(tmp_path))


def test_a_directory_without_an_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no Python at {tmp_path}/bin/python; the job's `python` must name"):
        programs.interpreter(str(tmp_path))


_TRY = """\
import os, sys
sys.path.insert(0, sys.argv[1])
from clusterd.agent.host import programs
os.setuid(65534)
try:
    programs.interpreter(sys.argv[2])
except FileNotFoundError as error:
    print(error)
"""


def refused_to_nobody(python: Path) -> str:
    """Message for an account that has no rights of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _TRY, str(CODE_ROOT), str(python)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another account")
def test_what_an_account_may_not_run_says_what_to_open(tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents):
        if not directory.stat().st_mode & 0o1:
            directory.chmod(0o755)
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o700)
    for given in (python, tmp_path / "env"):
        message = refused_to_nobody(given)
        assert f"no Python at {python} for nobody: it may not execute the file (chmod a+rx {python})" in message
    (tmp_path / "env").chmod(0o700)
    assert f"{tmp_path}/env is closed to it (chmod o+x {tmp_path}/env)" in refused_to_nobody(python)
