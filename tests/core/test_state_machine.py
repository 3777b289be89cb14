"""Faults in any order: no device held twice, every job ends once faults stop, replay equals live.

``CLUSTERD_EXAMPLES=5000`` looks longer than the suite has time for; ``--hypothesis-seed`` looks elsewhere.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from clusterd.core.policies import POLICIES
from tests.core.chaos import Chaos

EXAMPLES = int(os.environ.get("CLUSTERD_EXAMPLES", "40"))


class Baselines(Chaos):
    """The same under the policies that the default one is measured against."""

    policies = tuple(name for name in POLICIES if name != "default")


for _machine, _examples in ((Chaos, EXAMPLES), (Baselines, max(EXAMPLES // 2, 1))):
    _machine.TestCase.settings = settings(
        max_examples=_examples, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )

TestDefault = Chaos.TestCase
TestBaselines = Baselines.TestCase
