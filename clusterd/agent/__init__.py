"""The part of clusterd that runs on hosts: the agent, its fork servers, and inspection of the machine.

Standard library and msgpack only, Python 3.10 and newer: hosts may have nothing else installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The directory that holds the packages `clusterd` and `plans`: the pushed code, or a source tree."""

# The bundled pure-Python msgpack comes last: the environment's compiled msgpack wins, both here and in a training
# script that imports it in a process forked from here.
_carried = str(CODE_ROOT / "vendor")
if Path(_carried).is_dir() and _carried not in sys.path:
    sys.path.append(_carried)
