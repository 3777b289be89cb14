"""``inside DIRECTORY CORES ARGV...``: becomes ARGV there, on those cores, with the terminal on stdin as its own."""

from __future__ import annotations

import os

from clusterd.agent.forkserver import child


def main(arguments: list[str]) -> int:
    """Does not return where it can start what was asked for."""
    directory, cores, *argv = arguments
    # Under nohup, as a daemon may have been started, everything below would ignore that its line is cut.
    child.reset_signals()
    if os.isatty(0):
        # The first terminal that the leader of a session opens becomes that session's.
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    if child.settle(directory, [int(core) for core in cores.split(",") if core]):
        child.execute(argv, {**os.environ, "PWD": directory})
    return child.EXIT_CANNOT_START
