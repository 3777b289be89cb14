"""What `clusterd` and `python -m clusterd` run: nothing is imported before an interrupt can be caught."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line. Interrupted while it is being imported, it ends as it does later: without a traceback."""
    try:
        from clusterd.cli.main import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
