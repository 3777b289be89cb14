"""``python -m clusterd.daemon``: the process that ``clusterd start`` runs in the background."""

import sys

from clusterd.daemon.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
