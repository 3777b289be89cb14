"""A test session that leaves something behind fails, and says what it is."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import until
from tests.leftovers import Session


def test_what_is_left_is_named_until_it_is_gone(tmp_path: Path) -> None:
    session = Session()
    session.begin()
    try:
        before = set(session.left(tmp_path))  # such as what fixtures of this process keep for later tests
        directory = Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp"))
        shared = Path(tempfile.mkdtemp(prefix="clusterd-", dir="/dev/shm"))
        (shared / "owner").write_text(f"{tmp_path}/local/0/home")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # The mark passes on to children of children, also of those that are gone.
            child = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
            done = subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, check=True)
            found = "\n".join(session.left(tmp_path))
            for expected in (
                f"process {done.stdout.strip()}: sleep 600",
                f"shared memory {shared}",
                f"directory {directory}",
                f"port {listener.getsockname()[1]}, open since {os.environ['PYTEST_CURRENT_TEST']}",
            ):
                assert expected in found
        subprocess.run(["kill", "-9", done.stdout.strip()], check=True)
        shutil.rmtree(directory)
        shutil.rmtree(shared)
        until(lambda: set(session.left(tmp_path)) <= before)
    finally:
        session.end()
