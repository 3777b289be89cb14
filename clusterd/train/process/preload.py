"""Imports that make a rank's start slow, for a fork server to do once before it forks ranks.

Importing this module has no other effect: no thread, no CUDA context, no process group, so that the importing process
can be forked safely.
"""

from __future__ import annotations

import importlib
import warnings

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

with warnings.catch_warnings():
    # Under PYTHONWARNINGS=error a deprecation inside of torch would end the import, which is none of the script's.
    warnings.simplefilter("ignore")
    for _name in MODULES:
        importlib.import_module(_name)
