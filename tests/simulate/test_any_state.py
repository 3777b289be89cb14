"""Roll-outs from whatever state faults and people bring about: none raises, and no invariant is broken on the way."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from clusterd.core.invariants import violations
from clusterd.core.policies import POLICIES
from clusterd.daemon.forecasts.forecaster import live_part
from clusterd.daemon.journal import codec
from clusterd.simulate.live import LiveSimulation
from clusterd.simulate.remaining import Chance, courses_of
from tests.core.chaos import Chaos

DAY_S = 86400.0


class RollOuts(Chaos):
    """The scheduler among users, operators and faults, and then one course of what follows."""

    def teardown(self) -> None:
        """Play the state forward for a day at most, as the daemon's process does."""
        if not hasattr(self, "world"):
            return
        self.world.handle()
        state = codec.state(codec.encode(live_part(self.world.scheduler.state)))
        now_s, random_ = self.world.now_s, Chance("1")
        draws = courses_of(state, now_s)
        broken: list[str] = []
        simulation = LiveSimulation(
            POLICIES[self.policy](),
            now_s + DAY_S,
            gather_share=0.002,
            round_share=1 / 30,
            on_batch=lambda scheduler, events, decisions: broken.extend(violations(scheduler.state)),
        )
        simulation.go_on(state, [draw(random_) for draw in draws.values()], now_s, draws)
        assert broken == []


RollOuts.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRollOuts = RollOuts.TestCase
