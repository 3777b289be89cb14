"""Arrays: jobs that were submitted together, of which only so many may run at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from clusterd.core.state import Job, State
from clusterd.types import JobId
from clusterd.units import is_match


class ArrayLimits:
    """Tasks that each array may still start in one pass."""

    def __init__(self, state: State) -> None:
        active = (state.jobs[job].spec.array for job in state.active)
        self._taken = Counter(array.id for array in active if array is not None and array.most)

    def waits_for(self, job: Job, now_s: float) -> str | None:
        """Message of a queued task that waits for others of its array; None: it may start, and takes a place."""
        array = job.spec.array
        if array is None or not array.most or job.not_before_s > now_s:
            return None
        if self._taken[array.id] >= array.most:
            return f"waits for its array: at most {array.most} of the tasks of {array.name} run at once"
        self._taken[array.id] += 1
        return None


def tasks_of(jobs: Iterable[Job], text: str, user: str) -> list[Job]:
    """Tasks of the array of this id, or of the user's newest array of this name, by index; empty: there is none.

    Of a task that ran again, the newest. ``12_[3,10-12]`` are those of these numbers.
    """
    listed, text = text, re.sub(r"_(\*|\[[\d,-]+\])$", "", text)
    tasks = [
        job
        for job in jobs
        if (a := job.spec.array) is not None and (text == a.id or (text == a.name and job.spec.user == user))
    ]
    known = {job.spec.array.id for job in tasks if job.spec.array is not None}
    if not known:
        return []
    chosen = max(known, key=lambda array: (array == text, len(array), array))
    own = {a.index: job for job in tasks if (a := job.spec.array) is not None and a.id == chosen}
    return [own[index] for index in sorted(own) if listed == text or is_match(f"{text}_{index}", listed)]


def find_task(state: State, text: str) -> JobId | None:
    """The task that ``12_3`` means: that of index 3 of the array whose first task is job 12; None: there is none."""
    match = re.fullmatch(r"(\d+)_(\d+)", text, re.ASCII)
    if match is None:
        return None
    array, index = JobId(match[1]), int(match[2])
    tasks = ((job.id, job.spec.array) for job in reversed(state.jobs.values()) if job.spec.array is not None)
    return next((job for job, place in tasks if (place.id, place.index) == (array, index)), None)
