"""Equal share, and sampling-based placement alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from clusterd.core.menu import Choice, Menu
from clusterd.core.outlook import Estimate
from clusterd.core.policies.fill import Capacity
from clusterd.core.policies.optimus import Rounds, now_on
from clusterd.core.service import likely_steps_left
from clusterd.core.state import Job
from clusterd.core.view import View

CATEGORIES = 40
"""Categories sampled in a round (N of the third-party code that cites the paper)."""


BETTER = 0.05
"""By so much the best category must be better than what is, for jobs to be moved."""


class Equal(Rounds):
    """Every job the same number of devices, as near as it can run; the user's plan with more or fewer replicas."""

    name = "equal"
    published = Choice.REPLICAS
    interval_s: float | None = 60.0

    def divide(self, view: View, jobs: list[Job], capacity: Capacity) -> list[tuple[Job, Sequence[Estimate]]]:
        """In order of arrival, the largest size within the share of those that are left."""
        found: list[tuple[Job, Sequence[Estimate]]] = []
        ordered = self.order(view, jobs)
        for number, job in enumerate(ordered):
            menu = self.menu(job, view)
            assert menu is not None
            share = max(capacity.total // (len(ordered) - number), 1)
            options = largest_within(menu, share, capacity) or capacity.fits(menu.by_speed[menu.counts[0]])
            if options:
                capacity.take(options[0])
                found.append((job, options))
        return found


class Sampling(Rounds):
    """Sampling-based multi-job placement alone (TPDS 35(6), 2024): who is to have how many, by sampled categories.

    A category says how many devices each job has. Categories are drawn around what each job's work would give it, the
    best by the mean of remaining times is kept (beta = 1), wide jobs get the best devices. When there are more jobs
    than devices can serve, the first to arrive come first. The user's plan is kept, with more or fewer replicas.
    """

    name = "sampling"
    published = Choice.REPLICAS
    interval_s: float | None = 60.0

    def divide(self, view: View, jobs: list[Job], capacity: Capacity) -> list[tuple[Job, Sequence[Estimate]]]:
        """The best of the sampled categories."""
        random_ = random.Random(int(view.now_s))
        ordered = self.order(view, jobs)
        roots = [self._root_of_work(job, view) for job in ordered]
        best: tuple[float, list[tuple[Job, Sequence[Estimate]]], dict[str, int]] | None = None
        before = dict(capacity.left)
        for sample in range(CATEGORIES):
            capacity.left = dict(before)
            spread = 0.0 if sample == 0 else 0.6
            score, found = self._category(view, ordered, roots, capacity, random_, spread)
            if best is None or score < best[0]:
                best = (score, found, dict(capacity.left))
        capacity.left = dict(before)
        stay = self._as_it_is(view, ordered, capacity)
        if stay is not None and best is not None and stay[0] <= (1.0 + BETTER) * best[0]:
            best = (*stay, dict(capacity.left))
        assert best is not None
        capacity.left = best[2]
        return best[1]

    def _as_it_is(
        self, view: View, jobs: list[Job], capacity: Capacity
    ) -> tuple[float, list[tuple[Job, Sequence[Estimate]]]] | None:
        """What runs goes on as it does; None: somebody waits, or something is known to run nowhere as it does."""
        score = 0.0
        found: list[tuple[Job, Sequence[Estimate]]] = []
        for job in jobs:
            menu = self.menu(job, view)
            assert menu is not None
            now = now_on(job, view, menu)
            if now is None:
                return None
            capacity.take(now)
            found.append((job, [now]))
            score += likely_steps_left(job) * now.step_time_s
        return score, found

    def _category(
        self,
        view: View,
        jobs: list[Job],
        roots: Sequence[float],
        capacity: Capacity,
        random_: random.Random,
        spread: float,
    ) -> tuple[float, list[tuple[Job, Sequence[Estimate]]]]:
        weights = [root * random_.lognormvariate(0.0, spread) for root in roots]
        scale = capacity.total / sum(weights) if weights else 0.0
        score = 0.0
        found: list[tuple[Job, Sequence[Estimate]]] = []
        for job, weight in zip(jobs, weights, strict=True):
            menu = self.menu(job, view)
            assert menu is not None
            options = largest_within(menu, max(int(weight * scale), 1), capacity)
            options = options or capacity.fits(menu.by_speed[menu.counts[0]])
            if options:
                capacity.take(options[0])
                found.append((job, options))
                score += likely_steps_left(job) * options[0].step_time_s
            else:
                score += likely_steps_left(job) * menu.by_speed[menu.counts[0]][0].step_time_s * 2.0
        return score, found

    def _root_of_work(self, job: Job, view: View) -> float:
        """Devices in proportion to it divide a cluster best between jobs that scale alike."""
        menu = self.menu(job, view)
        assert menu is not None
        work_s = likely_steps_left(job) * min(n * x.step_time_s for n, x in menu.fastest.items())
        return float(max(work_s, 1e-3) ** 0.5)


def largest_within(menu: Menu, share: int, capacity: Capacity) -> list[Estimate]:
    """The fastest of the sizes up to this that there is capacity for, if it is faster than smaller ones."""
    best: list[Estimate] = []
    for count in menu.counts:
        options = capacity.fits(menu.by_speed[count]) if count <= share else []
        if options and (not best or options[0].step_time_s < best[0].step_time_s):
            best = options
    return best
