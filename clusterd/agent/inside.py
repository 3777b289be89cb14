"""``inside DIRECTORY CORES ARGV...``: becomes ARGV there, on those cores, with the terminal on stdin as its own."""

from __future__ import annotations

import os
import signal
import sys

from clusterd.agent.child import EXIT_CANNOT_START, EXIT_NOT_FOUND


def main(arguments: list[str]) -> int:
    """Does not return where it can start what was asked for."""
    directory, cores, *argv = arguments
    # Under nohup, as a daemon may have been started, everything below would ignore that its line is cut.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    if os.isatty(0):
        # The first terminal that the leader of a session opens becomes that session's.
        os.close(os.open(os.ttyname(0), os.O_RDWR))
    try:
        os.chdir(directory)
        os.environ["PWD"] = directory
        if cores:
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
        os.execvp(argv[0], argv)
    except FileNotFoundError as error:
        print(f"clusterd: {error.filename or argv[0]}: not found", file=sys.stderr)
        return EXIT_NOT_FOUND
    except OSError as error:
        print(f"clusterd: {argv[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_CANNOT_START
