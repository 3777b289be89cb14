"""What runs on a host: the agent, its fork servers, and what they know about the machine.

Standard library and msgpack only, Python 3.10 and newer: these files are pushed to hosts that have nothing else.
"""

from __future__ import annotations

import sys
from pathlib import Path

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The directory that holds the packages `clusterd` and `plans`: the pushed code, or a source tree."""

# The pure-Python msgpack that travels with the pushed code comes last: an environment's own, compiled one wins,
# for us and for the training script that imports it in a process forked from here.
_carried = str(CODE_ROOT / "vendor")
if Path(_carried).is_dir() and _carried not in sys.path:
    sys.path.append(_carried)
