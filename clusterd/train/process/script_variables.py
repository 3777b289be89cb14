"""Global variables of the script's own modules: nobody carries them, so that a difference is told by their names."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from clusterd.train.process import held

VARIABLES_MAX, NAMED_MAX = 500, 3
"""Variables that are compared, and those that a message names."""

TEXT_MAX = 60

NUMBERS_MAX = 1 << 22
"""Limit for the numbers in all tensors and arrays together: they are read between two steps."""


def script_variables() -> dict[str, str]:
    """Values of plain variables, tensors and arrays, and lists and maps of these, as short texts, by name."""
    found: dict[str, str] = {}
    left = NUMBERS_MAX
    for name in sorted(sys.modules):
        if not held.is_of_script(name, module := sys.modules.get(name)):
            continue
        for variable, value in list(vars(module).items()):
            if variable.startswith("__") or len(found) >= VARIABLES_MAX:
                continue
            tensors = _tensors(value)
            count = sum(math.prod(tensor.shape) for tensor in tensors)
            if count > left or (text := _text(value, tensors)) is None:
                continue
            left -= count
            found[variable if name == "__main__" else f"{name}.{variable}"] = text
    return found


def differences(there: Iterable[Mapping[str, str]], here: Mapping[str, str]) -> str:
    """Variables that are the same on all ranks there and have another value here, in words; empty: there are none."""
    first, *others = there
    alike = {name: text for name, text in first.items() if all(other.get(name) == text for other in others)}
    found = [
        f"{name} ({text} there, {here[name]} here)" for name, text in alike.items() if here.get(name, text) != text
    ]
    more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(found[:NAMED_MAX]) + more


def _tensors(value: Any) -> list[Any]:
    """The tensors and arrays that a value is, or consists of."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    if not 0 < len(parts) <= held.VALUES_MAX or not all(isinstance(part, (torch.Tensor, np.ndarray)) for part in parts):
        return []
    return list(parts)


def _text(value: Any, tensors: list[Any]) -> str | None:
    """A value in few words, others than those of any other value; None: it is of another kind."""
    if tensors:
        norm = _norm(tensors)
        return norm and (f"{len(tensors)} tensors {norm}" if isinstance(value, (list, tuple, dict)) else norm)
    if not held.is_plain(value):
        return None
    text = repr(value)
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}... {zlib.crc32(text.encode()):08x}"


def _norm(tensors: list[Any]) -> str | None:
    """Norm over tensors and arrays in words; None: they are no numbers."""
    try:
        numbers = (torch.as_tensor(tensor).detach().to("cpu", torch.float64) for tensor in tensors)
        return f"of norm {math.hypot(*(float(each.norm()) for each in numbers)):.9g}"
    except (TypeError, ValueError, RuntimeError):
        return None
