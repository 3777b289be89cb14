"""What can be wrong with what a simulation is given."""

from __future__ import annotations

from clusterd.errors import UsageError


class InputError(UsageError):
    """A cluster, workload or truth that cannot be used: what, where, what to do."""
