"""Policies as peers' published simulators run them, for parity with their published figures and nothing else.

What ours is compared with are the baselines of `clusterd.core.policies`, which do what the papers say. Here stand the
parameters and, where it makes the published figure, the faults of the published code.
"""

from __future__ import annotations

from collections.abc import Callable

from clusterd.core.policies import POLICIES
from clusterd.core.view import Policy
from clusterd.simulate.published.gavel import GavelFifo
from clusterd.simulate.published.pollux import PolluxOptimus, PolluxTiresias

PUBLISHED: dict[str, Callable[[], Policy]] = {
    "gavel-fifo": GavelFifo,
    "gavel-fifo-mended": lambda: GavelFifo(faults=False),
    "pollux-tiresias": PolluxTiresias,
    "pollux-optimus": PolluxOptimus,
}


def policy_named(name: str) -> Policy:
    """A fresh one."""
    return (POLICIES.get(name) or PUBLISHED[name])()
