"""Cases of a test that are much like its others: `make test` leaves them to `make test-slow`."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One of these values in a list for `parametrize`."""
    return pytest.param(*values, marks=pytest.mark.slow)
