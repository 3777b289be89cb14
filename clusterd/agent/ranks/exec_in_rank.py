"""``inside DIRECTORY CORES CGROUP ARGV...``: execute ARGV as a process of an attempt, with stdin as its terminal."""

from __future__ import annotations

import os
from pathlib import Path

from clusterd.agent.forkserver import child
from clusterd.agent.host import cgroups, processes
from clusterd.agent.log import log_line


def main(arguments: list[str]) -> int:
    """Execute the command; return only if it cannot start."""
    directory, cores, group, *argv = arguments
    processes.set_mark(os.environ.get(processes.TAG, ""))
    if group and not cgroups.add(Path(group), os.getpid()):
        log_line(f"clusterd: cannot enter {group}")
    # A daemon started under nohup passes an ignored SIGHUP on; the command must react to a hang-up.
    child.reset_signals()
    if os.isatty(0):
        # The first terminal that a session leader opens becomes its controlling terminal.
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    if child.settle(directory, [int(core) for core in cores.split(",") if core]):
        child.execute(argv, {**os.environ, "PWD": directory})
    return child.EXIT_CANNOT_START
