"""Handlers of what is learned about speed, and of the short runs that it is learned from."""

from __future__ import annotations

from dataclasses import replace

from clusterd.core import events as e
from clusterd.core.lifecycle import migrations, trials
from clusterd.core.lifecycle.migration_events import OnMigrations
from clusterd.core.state import Attempt, Job, Trial
from clusterd.core.view import Move
from clusterd.types import JobId

TRIAL_S = 120.0
"""A trial that has not been measured by then is given up."""

RESTART_S_MOST = 600.0
"""So long, beside that, may it take where the job has to start again for it."""


class OnTrials(OnMigrations):
    """From the wish to try a plan to the day when nothing is left to try."""

    def _on_speed_learned(self, event: e.SpeedLearned) -> None:
        self.state.outlooks[event.model] = event.outlook
        self._pass_due = True

    def _on_end_foreseen(self, event: e.EndForeseen) -> None:
        job = self.state.jobs.get(event.job)
        if job is not None:
            job.predictable, job.foreseen_steps = event.predictable, event.steps
            self._pass_due = True

    def _on_trial_proposed(self, event: e.TrialProposed) -> None:
        job = self.state.jobs.get(event.job)
        if job is None or job.attempt is None:
            return
        if event.plan is None:
            job.tried, job.trial, job.being_tried = job.tried or job.being_tried, None, False
        elif job.pinned is None:  # it may have been pinned while this was thought of
            job.trial, job.being_tried = Trial(event.plan, event.steps, event.why), True
            self._set_timer(f"trial:{job.id}", event.at_s + TRIAL_S, f"{event.plan} is tried with {job.spec.name}")
        self._pass_due = True

    def _on_trial_measured(self, event: e.TrialMeasured) -> None:
        job = self.state.jobs.get(event.job)
        if job is None:
            return
        trial = job.trial if job.trial is not None and job.trial.plan == event.plan else None
        measured = trial or Trial(event.plan, event.steps, "as it ran")
        measured.step_time_s, measured.predicted_s = event.step_time_s, event.predicted_s
        job.trials.append(measured)
        if trial is not None:
            job.trial = None

    def _try_plans(self) -> None:
        """Move jobs to the plans that are to be tried on them, and back to where they belong afterwards."""
        for job_id in self.state.active:
            job = self.state.jobs[job_id]
            attempt = trials.ready(job) if job.trial is not None or job.tried or self._keeps(job) else None
            if attempt is None:
                continue
            if job.trial is not None:
                self._try(job, attempt, job.trial)
            elif not job.being_tried:
                self._go_back(job, attempt)

    def _try(self, job: Job, attempt: Attempt, trial: Trial) -> None:
        if trial.from_step is not None:
            return
        if attempt.plan == trial.plan:
            trial.from_step = job.step
            return
        asked = trial.migration
        if asked is not None and len(job.migrations) >= asked and job.migrations[asked - 1].failure:
            self._fail_trial(job, trial, job.migrations[asked - 1].failure)
            return
        answer = trials.move_for(job, attempt, trial.plan, self.state.hosts, f"trial of {trial.plan}: {trial.why}")
        if isinstance(answer, str):
            self._fail_trial(job, trial, answer)
            return
        used = {place.device for place in answer.ranks}
        full = migrations.crowded(self.state.hosts, job, attempt, trial.plan, used)
        if full is not None and used != {*attempt.devices, *attempt.kept}:
            # Through host memory nothing would hold the devices that it leaves idle.
            self._fail_trial(job, trial, full, is_refused=False)
            return
        trial.migration = len(job.migrations) + 1
        self._move(replace(answer, may_restart=True))
        if attempt.onward is not None:
            job.trial, job.being_tried = trial, True  # it ends with the next attempt, not with this one
            until_s = self._now_s + RESTART_S_MOST + TRIAL_S
            self._set_timer(f"trial:{job.id}", until_s, f"{job.spec.name} starts again with {trial.plan}")
        if attempt.migration is not None:
            trials.keep(attempt, answer)

    def _go_back(self, job: Job, attempt: Attempt) -> None:
        job.tried = False
        plan = trials.way_back(job, attempt, self.state) if job.pinned is None else None
        if plan is not None:
            answer = trials.move_for(job, attempt, plan, self.state.hosts, f"{plan}: the fastest known for its devices")
            if isinstance(answer, Move):
                self._move(replace(answer, may_restart=True))
                if attempt.migration is not None or attempt.onward is not None:
                    return
        trials.let_go(self.state, attempt)

    def _keeps(self, job: Job) -> bool:
        return job.attempt is not None and bool(job.attempt.kept)

    def _fail_trial(self, job: Job, trial: Trial, why: str, is_refused: bool = True) -> None:
        trial.failure, trial.is_refused = why, is_refused
        job.trials.append(trial)
        job.trial = None

    def _trial_is_late(self, job_id: JobId) -> None:
        job = self.state.jobs.get(job_id)
        if job is not None and job.trial is not None:
            self._fail_trial(job, job.trial, f"not measured within {TRIAL_S:.0f} s", is_refused=False)
        elif job is not None:
            # Nobody said what to try next: the job must not wait for that for ever.
            job.tried, job.being_tried = job.tried or job.being_tried, False

    def _yields_to_trial(self, move: Move) -> bool:
        """Whether a policy's move has to wait: a job is measured for seconds, and then may be moved."""
        job = self.state.jobs[move.job]
        if not job.being_tried:
            return False
        attempt = job.attempt
        if attempt is None:
            return False
        hosts = [self.state.hosts[h] for h in attempt.hosts if h in self.state.hosts]
        is_wanted = any(host.drained is not None for host in hosts)
        makes_room = len(move.ranks) < len({*attempt.devices, *attempt.kept})
        if attempt.migration is not None or not (is_wanted or makes_room):
            return True
        self._give_up_trial(job, move.reason)
        return False
