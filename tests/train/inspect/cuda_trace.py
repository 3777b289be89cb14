"""Program of `test_cuda_traces`: bytes that a model saves under CUDA's autocast, and those of its description.

Fake tensors on a CUDA device need no GPU, but autograd asks for a guard of its device, which the library that is the
first argument registers. Attention is taken to run in the kernels that a GPU has for it: fake tensors, without a
driver to ask, would compute all scores.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from clusterd.train.inspect.describe import describe
from clusterd.train.inspect.trace import LOSS, Trace
from clusterd.train.process.job import Job

EXAMPLES = Path(__file__).parents[3] / "examples"


def script(folder: str) -> Any:
    """The training script of an example, as a module."""
    sys.path.insert(0, str(EXAMPLES / folder))
    spec = importlib.util.spec_from_file_location(f"train_{folder}", EXAMPLES / folder / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job_of(example: str, precision: str) -> Job:
    """The job of an example."""
    module = script(example)
    options: dict[str, Any] = {
        "optimizer": lambda p: torch.optim.AdamW(p),
        "global_batch": 16,
        "steps": 10,
        "precision": precision,
    }
    if example == "convnet":
        options |= {"model": lambda: module.ConvNet(32, 4), "loss": F.cross_entropy, "data": module.Squares(32)}
        return Job(layers=("stem", "blocks", "head"), **options)
    options |= {"loss": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), "data": module.Windows(64)}
    return Job(model=lambda: module.GPT(), layers=module.GPT.LAYERS, tp_plan=module.GPT.TP_PLAN, **options)


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, is_causal: bool = False, **options: Any
) -> Any:
    """`scaled_dot_product_attention` as GPUs compute it: flash attention in half precision, else the efficient one."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    if query.dtype is torch.bfloat16:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, is_causal)[0]


def on_cuda(job: Job, layers: list[str]) -> dict[str, dict[str, int]]:
    """Bytes that one sample saves on a CUDA device, by layer: activations, and copies of parameters."""
    F.scaled_dot_product_attention = attention
    torch.set_autocast_enabled("cuda", job.precision == "bf16")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    inputs, target = torch.utils.data.default_collate([job.data[0]])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = job.model()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    moved = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                    module._parameters[name] = nn.Parameter(moved)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
        inputs, target = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (inputs, target))
        trace = Trace(model)
        for index, path in enumerate(layers):
            layer = model.get_submodule(path)
            layer.register_forward_pre_hook(trace.enter(index))
            layer.register_forward_hook(trace.leave(index))
        with trace.counter, trace.casts, torch.autograd.graph.saved_tensors_hooks(trace.save, lambda tensor: tensor):
            outputs = model(inputs)
            assert outputs.device.type == "cuda"
            trace.place = LOSS
            loss = job.loss(outputs, target)
            assert (loss.dtype, loss.shape) == (torch.float32, ())
    saved, casts = trace.saved_bytes, trace.cast_bytes
    found = {
        path: {"activation": saved.get(i, 0), "cast": casts.get(i, 0), "output": trace.output_bytes[i]}
        for i, path in enumerate(layers)
    }
    return {**found, "loss": {"activation": trace.saved_bytes.get(LOSS, 0), "cast": 0, "output": 0}}


if __name__ == "__main__":
    library, example, precision = sys.argv[1:]
    job = job_of(example, precision)
    shape = describe(job, tp_degrees=[])
    ctypes.CDLL(library)
    described = {
        layer.name: {
            "activation": layer.activation_bytes + layer.activation_tp_bytes,
            "cast": layer.cast_bytes,
            "output": layer.output_bytes,
        }
        for layer in shape.layers
        if layer.name
    }
    cuda = on_cuda(job, list(described))
    described["loss"] = {"activation": shape.loss_bytes, "cast": 0, "output": 0}
    print(json.dumps({"cuda": cuda, "described": described}))
