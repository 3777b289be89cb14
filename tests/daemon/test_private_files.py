"""Files of daemon and agents are private; jobs run with their user's umask."""

from __future__ import annotations

import stat

from tests.conftest import RunningCluster


def test_files_are_private_and_jobs_keep_their_mask(cluster: RunningCluster) -> None:
    """Under a mask of 022, as most users have it."""
    cluster.run("start", "--local", "1", umask=0o022)
    cluster.wait_until_up(1)
    assert cluster.run("run", "--no-snapshot", "--", "sh", "-c", "umask").stdout.strip() == "0022"
    directory = cluster.directory
    opened = [
        path
        for path in directory.rglob("*")
        if not path.is_symlink() and path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    # The code of agents is no secret, and `start.err` is empty.
    assert [path for path in opened if ".cache" not in path.parts and path.name != "start.err"] == []
