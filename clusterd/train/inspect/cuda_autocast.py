"""Emulation of CUDA's autocast on a machine without a GPU, where torch's autocast follows the list of CPUs.

CUDA computes norms, powers, sums, softmax and losses in float32 that a CPU computes in bfloat16. Their float32 inputs
and results are saved for the backward pass, so that a trace under the CPU's list counts half their bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions and methods that "CUDA Ops that can autocast to float32" of torch's documentation names.
_IN_FLOAT32 = {
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cosh",
    "cosine_embedding_loss", "cdist", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv",
    "exp", "expm1", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log_softmax", "log1p", "log2", "logsumexp", "margin_ranking_loss", "mse_loss",
    "multilabel_margin_loss", "multi_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss",
    "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
    "softmin", "softplus", "sum", "tan", "triplet_margin_loss",
}  # fmt: skip


class CudaAutocast(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
    """Context, inside autocast for CPUs, in which the operations of CUDA's list compute in float32."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if getattr(function, "__name__", "") in _IN_FLOAT32:
            # Autocast is off inside: it would cast the inputs of parts of the function back.
            with torch.autocast("cpu", enabled=False):
                return function(*map(_widened, arguments), **{k: _widened(v) for k, v in options.items()})
        return function(*arguments, **options)


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value
