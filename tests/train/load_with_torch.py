"""Load a checkpoint with plain torch, without clusterd, and print its content.

``python load_with_torch.py DIRECTORY WIDTH DEPTH`` with the model's folder on PYTHONPATH; prints JSON.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed.checkpoint as dcp
from model import GPT
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

directory, width, depth = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = GPT(width=width, depth=depth, heads=4, context=16, vocabulary=64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optim": optimizer_state, "step": 0}
dcp.load(state, checkpoint_id=directory, no_dist=True)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
assert not [name for name in sys.modules if name.startswith(("clusterd", "plans"))]
print(
    json.dumps(
        {
            "step": state["step"],
            "lr": optimizer.param_groups[0]["lr"],
            "counter": {float(s["step"]) for s in optimizer.state.values()}.pop(),
            "parameters": {name: p.detach().double().sum().item() for name, p in model.named_parameters()},
            "exp_avg_sq": {
                name: optimizer.state[p]["exp_avg_sq"].double().sum().item() for name, p in model.named_parameters()
            },
        }
    )
)
