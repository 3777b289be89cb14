"""Model shapes for plan tests."""

from __future__ import annotations

from typing import Any

from clusterd.plans.model_shape import LayerShape, ModelShape, ParameterShape


def gpt(depth: int = 4, width: int = 64, **changes: Any) -> ModelShape:
    """A small GPT as `clusterd.train.inspect.describe` would describe it, with heads for 2 and 4 shards."""
    names = ["embed", *(f"blocks.{i}" for i in range(depth)), "head"]
    parameters = [ParameterShape("embed.token.weight", (256, width), 4, 0)]
    for i in range(depth):
        at = f"blocks.{i}"
        parameters += [
            ParameterShape(f"{at}.norm.weight", (width,), 4, i + 1),
            ParameterShape(f"{at}.attn.qkv.weight", (3 * width, width), 4, i + 1, True, 0),
            ParameterShape(f"{at}.attn.proj.weight", (width, width), 4, i + 1, True, 1),
            ParameterShape(f"{at}.up.weight", (4 * width, width), 4, i + 1, True, 0),
            ParameterShape(f"{at}.down.weight", (width, 4 * width), 4, i + 1, True, 1),
        ]
    parameters.append(ParameterShape("head.out.weight", (256, width), 4, depth + 1))
    out = 64 * width * 4
    layers = [LayerShape(n, n.startswith("blocks"), 4 * out, 18 * out, out, 2 * out, 10**6) for n in names]
    given: dict[str, Any] = {
        "parameters": tuple(parameters),
        "layers": tuple(layers),
        "global_batch": 16,
        "samples": 1000,
        "pipeline": True,
        "tp_plan": True,
        "tp_degrees": (2, 4),
        "tp_refused": ((3, "blocks.0.attn.proj.weight has 64 along dimension 1"),),
        "loss_bytes": 65536,
    }
    return ModelShape(**{**given, **changes})
