"""Check of the torch version: importing this module fails if torch is too old.

Before 2.8, ranks of tensor and pipeline parallel plans hang over gloo, and FSDP2 has no gradient averages on CPU
devices, or wrong ones.
"""

from __future__ import annotations

import torch

OLDEST = (2, 8)

if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
    raise ImportError(f"torch {torch.__version__} is too old, 2.8 or newer is needed", name="torch")
