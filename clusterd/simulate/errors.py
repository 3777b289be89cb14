"""Errors in the input of a simulation."""

from __future__ import annotations

from clusterd.errors import UsageError


class InputError(UsageError):
    """A cluster, workload or truth that cannot be used: what, where, what to do."""
