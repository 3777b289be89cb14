"""Second stage: who is asked first."""

from __future__ import annotations

from clusterd.core.state import Job
from clusterd.core.view import View


def order(view: View) -> list[Job]:
    """Queued jobs by priority, higher first, then by time of submission; a requeued job keeps its place."""
    return sorted(view.queued, key=lambda job: (-job.priority, not job.spec.guaranteed, job.submitted_s, job.id))
