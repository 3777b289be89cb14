"""Training scripts as users write them, run under several plans and compared with one process."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
for _folder in ("tests/train", "examples/gpt", "examples/hf"):  # modules that ranks of tests import by name
    if str(_ROOT / _folder) not in sys.path:
        sys.path.append(str(_ROOT / _folder))
