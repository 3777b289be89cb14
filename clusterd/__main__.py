"""Entry point of `clusterd` and `python -m clusterd`; imports nothing before it can catch an interrupt."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; an interrupt during its import exits without a traceback too."""
    try:
        from clusterd.cli.main import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
