"""Values that a loss or a metric returns, as sums and weights whose quotients are exact under every plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from clusterd.train.process.exits import Refused

Weighted = dict[str, tuple[Any, Any]]
"""Sum and weight by name: tensors without dimensions, or numbers."""


def weighted(value: Any, samples: int, name: str) -> Weighted:
    """Convert a result: a mean over `samples`, a pair (sum, weight), a dict of such values, or one beside a dict.

    Args:
        name: of a result that is no dict.
    Raises:
        Refused: it is something else.
    """
    if _has_metrics(value):
        value = {**value[1], name: value[0]}
    if isinstance(value, Mapping):
        return {str(key): _pair(part, samples, str(key)) for key, part in value.items()}
    return {name: _pair(value, samples, name)}


def _pair(value: Any, samples: int, name: str) -> tuple[Any, Any]:
    if is_pair(value):
        total, weight = value
        return _scalar(total, name), _scalar(weight, name)
    mean = _scalar(value, name)
    return mean * samples, samples


def _scalar(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(())
    if isinstance(value, (bool, int, float)):
        return value
    is_what = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise Refused(f"{name} is {is_what}; it must be one number, the mean over the samples given, or (sum, weight)")


def split_loss(value: Any) -> tuple[Any, dict[str, Any]]:
    """Loss, a mean or a pair (sum, weight), and the further values of a result of the script's loss function.

    Raises:
        Refused: a dict has no ``loss``.
    """
    if _has_metrics(value):
        return value[0], {str(name): part for name, part in value[1].items()}
    if not isinstance(value, Mapping):
        return value, {}
    if "loss" not in value:
        raise Refused(f"loss returned a dict of {', '.join(map(str, value))}; it needs an entry 'loss' to train on")
    return value["loss"], {str(name): part for name, part in value.items() if name != "loss"}


def is_pair(value: Any) -> bool:
    """True for (sum, weight)."""
    return isinstance(value, (tuple, list)) and len(value) == 2


def _has_metrics(value: Any) -> bool:
    """True for (loss, further values by name)."""
    return is_pair(value) and isinstance(value[1], Mapping)


def mean_of(value: Any) -> Any:
    """Mean over the batch that a loss function's result stands for."""
    loss, _ = split_loss(value)
    return loss[0] / loss[1] if is_pair(loss) else loss


class WeightedMeans:
    """Sums and weights by name, added up without waiting for the device."""

    def __init__(self) -> None:
        self._totals: dict[str, list[Any]] = {}

    def add(self, values: Weighted) -> None:
        """Add the values of one batch."""
        for name, pair in values.items():
            totals = self._totals.setdefault(name, [0.0, 0.0])
            for i, part in enumerate(pair):
                totals[i] = totals[i] + (part.detach().double() if isinstance(part, torch.Tensor) else float(part))

    def merge(self, other: WeightedMeans) -> None:
        """Add all that another one has added up."""
        self.add({name: (total, weight) for name, (total, weight) in other._totals.items()})

    def __len__(self) -> int:
        return len(self._totals)

    @property
    def names(self) -> list[str]:
        """Names seen so far."""
        return list(self._totals)

    def tensors(self, names: Iterable[str], device: torch.device) -> list[torch.Tensor]:
        """Sums, then weights, of these names; zero where nothing was added."""
        pairs = [self._totals.get(name, (0.0, 0.0)) for name in names]
        return [torch.as_tensor(pair[i], dtype=torch.float64, device=device) for i in (0, 1) for pair in pairs]

    def sums(self) -> dict[str, tuple[float, float]]:
        """Sum and weight by name, on the host."""
        return {name: (float(total), float(weight)) for name, (total, weight) in self._totals.items()}


def means(contributions: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Means over all contributions, which are added in their order; NaN where nothing has weight."""
    totals: dict[str, list[float]] = {}
    for contribution in contributions:
        for name, (total, weight) in contribution.items():
            entry = totals.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += weight
    return {name: total / weight if weight else float("nan") for name, (total, weight) in totals.items()}
