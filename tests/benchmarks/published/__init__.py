"""Policies as their authors' simulators run them, to reproduce published figures.

Our own comparisons use the baselines of `clusterd.core.policies`, which follow the papers. Here are the parameters of
the published code and, where a published figure depends on them, its faults.
"""

from __future__ import annotations

from collections.abc import Callable

from clusterd.core.view import Policy
from tests.benchmarks.published.gavel import GavelFifo
from tests.benchmarks.published.pollux import PolluxOptimus, PolluxTiresias

PUBLISHED: dict[str, Callable[[], Policy]] = {
    "gavel-fifo": GavelFifo,
    "gavel-fifo-mended": lambda: GavelFifo(faults=False),
    "pollux-tiresias": PolluxTiresias,
    "pollux-optimus": PolluxOptimus,
}
