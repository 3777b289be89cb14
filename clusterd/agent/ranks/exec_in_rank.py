"""``inside DIRECTORY CORES ARGV...``: execute ARGV there, on those cores, with stdin as controlling terminal."""

from __future__ import annotations

import os

from clusterd.agent.forkserver import child


def main(arguments: list[str]) -> int:
    """Execute the command; return only if it cannot start."""
    directory, cores, *argv = arguments
    # A daemon started under nohup passes an ignored SIGHUP on; the command must react to a hang-up.
    child.reset_signals()
    if os.isatty(0):
        # The first terminal that a session leader opens becomes its controlling terminal.
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    if child.settle(directory, [int(core) for core in cores.split(",") if core]):
        child.execute(argv, {**os.environ, "PWD": directory})
    return child.EXIT_CANNOT_START
