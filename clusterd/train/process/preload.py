"""What a fork server imports before it forks ranks: everything that makes a rank's start slow.

Importing this module imports all of it, and does nothing else: no thread, no CUDA context, no process group, so that
a fork of the importing process is sound.
"""

from __future__ import annotations

import importlib

MODULES = (
    "torch",
    "clusterd.train.process.torch_version",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.optim",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "clusterd.train.rank_main",
)

for _name in MODULES:
    importlib.import_module(_name)
