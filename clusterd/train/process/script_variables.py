"""Global variables of the script's own modules: nobody carries them, so that a difference is told by their names."""

from __future__ import annotations

import math
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from clusterd.train.process import held

VARIABLES_MAX, NAMED_MAX = 500, 3
"""Variables that are compared, and those that a message names."""

TEXT_MAX = 60

NUMBERS_MAX = 1 << 22
"""Limit for the numbers of a tensor or array, and for those of a container together."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def script_variables() -> dict[str, str]:
    """Values of plain variables, tensors and arrays, and lists and maps of these, as short texts, by name."""
    named = (
        (variable if name == "__main__" else f"{name}.{variable}", value)
        for name, module in sorted(sys.modules.items())
        if _is_of_script(name, module)
        for variable, value in list(vars(module).items())
        if not variable.startswith("__")
    )
    texts = ((name, _text(value)) for name, value in named)
    return dict(islice(((name, text) for name, text in texts if text is not None), VARIABLES_MAX))


def differences(there: Iterable[Mapping[str, str]], here: Mapping[str, str]) -> str:
    """Variables that are the same on all ranks there and have another value here, in words; empty: there are none."""
    first, *others = there
    alike = {name: text for name, text in first.items() if all(other.get(name) == text for other in others)}
    found = [
        f"{name} ({text} there, {here[name]} here)" for name, text in alike.items() if here.get(name, text) != text
    ]
    more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(found[:NAMED_MAX]) + more


def _is_of_script(name: str, module: Any) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or name.partition(".")[0] == "clusterd":
        return False
    return not file.startswith(_LIBRARIES) and "/site-packages/" not in file and "/dist-packages/" not in file


def _text(value: Any) -> str | None:
    """A value in few words, others than those of any other value; None: it is of another kind."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        norm = _norm([value])
        return None if norm is None else f"of norm {norm:.9g}"
    if held.is_plain(value):
        text = repr(value)
        return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}... {zlib.crc32(text.encode()):08x}"
    if isinstance(value, (list, tuple, dict)) and len(value) <= held.VALUES_MAX:
        parts = list(value.values() if isinstance(value, dict) else value)
        norm = _norm(parts) if all(isinstance(part, (torch.Tensor, np.ndarray)) for part in parts) else None
        return None if norm is None else f"{len(parts)} tensors of norm {norm:.9g}"
    return None


def _norm(parts: list[Any]) -> float | None:
    """Norm over tensors and arrays; None: they are large, or no numbers."""
    tensors = [part.detach() if isinstance(part, torch.Tensor) else part for part in parts]
    if sum(math.prod(tensor.shape) for tensor in tensors) > NUMBERS_MAX:
        return None
    try:
        arrays = [torch.as_tensor(tensor).to("cpu", torch.float64) for tensor in tensors]
    except (TypeError, ValueError, RuntimeError):
        return None
    return math.hypot(*(float(array.norm()) for array in arrays))
