"""Policies as their authors' simulators run them, to reproduce published figures.

Our own comparisons use the baselines of `clusterd.core.policies`, which follow the papers. Here are the parameters of
the published code and, where a published figure depends on them, its faults.
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
    """A new instance of the policy of this name."""
    return (POLICIES.get(name) or PUBLISHED[name])()
