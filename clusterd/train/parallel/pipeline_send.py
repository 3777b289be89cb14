"""What pipeline stages send each other, laid out as process groups take it: row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def send_row_by_row(module: nn.Module) -> None:
    """Has a stage give what the next one gets, and the gradient for the one before, in contiguous memory.

    A transposed activation cannot be sent ("input tensor has to be contiguous"), nor received.
    """
    forward = module.forward

    def computed(*inputs: Any, **options: Any) -> Any:
        outputs = forward(*(_row_by_row(value) for value in inputs), **options)
        return tuple(map(_row_by_row, outputs)) if isinstance(outputs, tuple) else _row_by_row(outputs)

    module.forward = computed


def _row_by_row(value: Any) -> Any:
    return _RowByRow.apply(value) if isinstance(value, torch.Tensor) else value


class _RowByRow(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor) if tensor.is_contiguous() else tensor.contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()
