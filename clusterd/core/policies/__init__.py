"""Policies by name: the default pipeline, and what it is measured against."""

from __future__ import annotations

from collections.abc import Callable

from clusterd.core.policies.aiturbo import AITurbo
from clusterd.core.policies.default import Default
from clusterd.core.policies.equal import Equal
from clusterd.core.policies.gavel import Gavel
from clusterd.core.policies.optimus import Optimus
from clusterd.core.policies.rubick import Rubick
from clusterd.core.policies.sampling import Sampling
from clusterd.core.policies.sia import Sia
from clusterd.core.policies.simple import Fifo, Srtf
from clusterd.core.policies.tiresias import Tiresias
from clusterd.core.view import Policy

_BASELINES: dict[str, Callable[[bool], Policy]] = {
    "fifo": Fifo,
    "srtf": Srtf,
    "tiresias": Tiresias,
    "optimus": Optimus,
    "gavel": Gavel,
    "sia": Sia,
    "aiturbo": AITurbo,
    "rubick": Rubick,
    "sampling": Sampling,
    "equal": Equal,
}

POLICIES: dict[str, Callable[[], Policy]] = {"default": Default}
"""By name; a baseline's name with ``+plans`` gives it the best plan for whatever it allocates."""


def _with(make: Callable[[bool], Policy], plans: bool) -> Callable[[], Policy]:
    return lambda: make(plans)


for _name, _make in _BASELINES.items():
    POLICIES[_name] = _with(_make, False)
    if _name != "rubick":  # it chooses plans itself
        POLICIES[f"{_name}+plans"] = _with(_make, True)
