"""Entry point of the processes on a host.

``attach`` bridges to the agent and starts it if none runs; ``serve`` is the agent; ``spawner`` is a fork server;
``inside`` executes a command that a person runs beside a rank; ``step`` is `srun` in a batch script.
"""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    verb, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if verb == "attach":
        from clusterd.agent.server import attach

        return attach.main(rest)
    if verb == "serve":
        from clusterd.agent.server import server

        return server.main()
    if verb == "spawner":
        from clusterd.agent.forkserver.server import main as fork_server

        return fork_server(rest)
    if verb == "inside":
        from clusterd.agent.ranks import exec_in_rank

        return exec_in_rank.main(rest)
    if verb == "step":
        from clusterd.agent.ranks import step

        return step.main(rest)
    print("usage: python3 -m clusterd.agent attach|serve|spawner|inside|step", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
