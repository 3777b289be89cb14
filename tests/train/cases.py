"""Slow test cases that are much like others: `make test` leaves them to `make test-slow`."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Mark one set of values for `parametrize` as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
