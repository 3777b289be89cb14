"""A moment of a module, to which a forward pass can go back: what its parts count, and what Python and NumPy draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_OFTEN = (bool, int, float, str, type(None), torch.Tensor)


class Moment:
    """Of now: plain attributes of a module and of those within it, tensors among them, and states of generators."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # A copy of a map takes less than to look at what is in it, and this is done in every pass.
        self._attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, it is that moment once more; afterwards, whatever was done within, it is as it was before."""
        now = Moment(self._module)
        self._return()
        try:
            yield
        finally:
            now._return()

    def _return(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for attributes, then in self._attributes:
            _change(attributes, then)


def _change(attributes: dict[str, Any], then: dict[str, Any]) -> None:
    for name, value in then.items():
        now = attributes.get(name)
        if now is not value and isinstance(value, _OFTEN) and isinstance(now, _OFTEN):
            attributes[name] = value
    for name in [n for n, value in attributes.items() if n not in then and isinstance(value, _OFTEN)]:
        del attributes[name]
