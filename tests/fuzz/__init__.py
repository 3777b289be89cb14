"""Arbitrary input to every parser that somebody else's program can reach."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def examples(usual: int) -> settings:
    """Settings of a test; ``CLUSTERD_EXAMPLES=5000`` looks longer than the suite has time for."""
    count = int(os.environ.get("CLUSTERD_EXAMPLES", usual))
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


def one_of(words: str) -> st.SearchStrategy[str]:
    """One of these words."""
    return st.sampled_from(words.split())
