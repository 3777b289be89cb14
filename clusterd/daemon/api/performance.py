"""Verbs about performance: profiles, ranked plans, estimates of unsubmitted jobs, measurements."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
from msgspec import UNSET

from clusterd import rows
from clusterd.core.ledger import of_ranks, shape_of
from clusterd.core.lifecycle import trials
from clusterd.core.queueing import admission
from clusterd.core.state import Job
from clusterd.daemon.access import Peer
from clusterd.daemon.api.server import FileText
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.profiling.performance_models import PerformanceModels
from clusterd.errors import ClusterError, UsageError
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.profiling import report
from clusterd.profiling.curves import Curve
from clusterd.profiling.knowledge import Knowledge
from clusterd.profiling.model import Row
from clusterd.profiling.report import RESOURCES, device_curve, on_types, plan_rows, resource_curve
from clusterd.profiling.store import Store
from clusterd.profiling.table import TableError
from clusterd.types import JobSpec
from clusterd.units import counted

COEFFICIENT = ("name", "value", "learned", "meaning")
IMPORT_CHARACTERS_MAX = 64 << 20

Describe = Callable[[JobSpec, str], Awaitable[dict[str, Any]]]
"""Inspects the model of an unsubmitted job on some host; the second argument is a name for the try."""


class PerformanceVerbs:
    """Answers from the performance models."""

    def __init__(
        self,
        engine: Engine,
        models: PerformanceModels,
        imported: Callable[[], None],
        store: Path,
        admit: Callable[[Peer, dict[str, Any]], JobSpec],
        describe: Describe,
    ) -> None:
        """`imported`: called after measurements were imported."""
        self._engine, self._models, self._imported = engine, models, imported
        self._state = engine.state
        self._store, self._admit, self._describe = store, admit, describe
        self._tries = itertools.count(1)
        self._partial_imports: dict[int, str] = {}  # by connection

    async def plans(self, peer: Peer, job: str, devices: int | None = None) -> rows.Plans:
        """Plans of a job on a number of devices, fastest first, and why the others are ruled out."""
        (known, *_), job_row = await self._of(job, peer.user)
        attempt = job_row.attempt or (job_row.attempts[-1] if job_row.attempts else None)
        current = attempt.plan if attempt is not None else None
        count = devices or (current.ranks if current else max(job_row.spec.resources.devices, 1))
        shape = None
        if current is not None and current.ranks == count and attempt is not None:
            shape = shape_of(of_ranks(self._state.hosts, attempt))
        ranked = await anyio.to_thread.run_sync(partial(_ranked, known, count, shape, current))
        return rows.Plans(
            job=job_row.id, name=job_row.spec.name, devices=count, device_type=known.devices.name, rows=ranked,
            known=_known_in_words(known),
        )  # fmt: skip

    async def profile(self, peer: Peer, job: str, html: bool = False, over: str = "devices") -> rows.Profile:
        """Profile of a job: measurements, fitted model, and its curve over a resource."""
        if over not in (*RESOURCES, "types"):
            raise UsageError(f"over is {over!r}; it must be types, or one of {', '.join(RESOURCES)}")
        on_each, row = await self._of(job, peer.user)
        phases = await self._models.phases(row.inspection.model, on_each[0].devices.name)
        return await anyio.to_thread.run_sync(partial(self._profile, on_each, row, html, over, phases))

    def _profile(
        self,
        on_each: Sequence[Knowledge],
        job: Job,
        html: bool,
        over: str,
        phases: Mapping[Row, tuple[tuple[str, float], ...]],
    ) -> rows.Profile:
        known = on_each[0]
        attempt = job.attempt or (job.attempts[-1] if job.attempts else None)
        count = attempt.plan.ranks if attempt is not None and attempt.plan else max(job.spec.resources.devices, 1)
        by_type = over == "types"
        curve = Curve("", on_types(on_each, count)) if by_type else resource_curve(known, over, count)
        newest = {o.row: o.step_time_s for o in known.online.observations}
        lines = report.lines(known.online.fit, list(newest), list(newest.values()), phases)
        title = f"{job.spec.name} (model {job.inspection.model}) on {known.devices.name}"
        fit, page = known.online.fit, None if by_type else curve
        return rows.Profile(
            job=job.id,
            name=job.spec.name,
            model=job.inspection.model,
            device_type=known.devices.name,
            known=_known_in_words(known),
            noise=fit.noise,
            drifts=tuple(known.online.reasons),
            trials=tuple(
                rows.row_of(rows.Trial, trial, plan=str(trial.plan), devices=trial.plan.ranks)
                for trial in job.trials.finished
            ),
            lines=[
                {"plan": line.plan, "shape": line.allocation, "predicted_s": line.predicted_s, "lower_s": line.lower_s,
                 "upper_s": line.upper_s, "measured_s": line.measured_s, "phases": dict(line.phases),
                 "spent": line.spent}
                for line in lines
            ],
            coefficients=[dict(zip(COEFFICIENT, row, strict=True)) for row in report.coefficient_rows(fit)],
            over=over,
            curve=tuple(
                rows.CurvePoint(
                    devices=int(point.amount) if over == "devices" else count,
                    amount=point.amount, plan=str(point.plan), shape=point.allocation.spread,
                    samples_per_s=point.throughput, device_type=point.allocation.hosts[0].device_type,
                    gain=0.0 if by_type else curve.gain(point.amount),
                    lower=point.throughput * point.step_time_s / point.upper_s,
                    upper=point.throughput * point.step_time_s / point.lower_s,
                )
                for point in curve.points
            ),
            html=report.to_html(title, fit, lines, page) if html else UNSET,
        )  # fmt: skip

    async def estimate(self, peer: Peer, spec: dict[str, Any]) -> dict[str, Any]:
        """Estimate plans, times and memory of an unsubmitted job: its model is built without storage, nothing runs."""
        wanted = self._admit(peer, spec)
        shape_map = await self._describe(wanted, f"estimate-{next(self._tries)}")
        shape = ModelShape.from_dict(shape_map)
        found = await self._models.on_each(shape.signature, shape)
        if not found:
            raise ClusterError("no host with devices is connected: nothing to estimate for (clusterd host ls)")
        known = found[0]
        count = max(wanted.resources.devices, 1)
        ranked = await anyio.to_thread.run_sync(partial(_ranked, known, count, None, wanted.resources.plan))
        curve = await anyio.to_thread.run_sync(device_curve, known)
        best = next((row for row in ranked if row.fits), None)
        return {
            "name": wanted.name,
            "model": shape.signature,
            "parameters": sum(each.size_bytes // max(each.dtype_bytes, 1) for each in shape.parameters),
            "steps": shape.steps,
            "devices": count,
            "device_type": known.devices.name,
            "known": _known_in_words(known),
            "rows": ranked,
            "duration_s": best.step_time_s * shape.steps if best and best.step_time_s and shape.steps else None,
            "curve": [
                rows.CurvePoint(
                    devices=int(point.amount),
                    plan=str(point.plan),
                    shape=point.allocation.spread,
                    samples_per_s=point.throughput,
                )
                for point in curve.points
            ],
        }

    async def measurements_export(self, peer: Peer) -> dict[str, Any]:
        """Export all measurements as CSV; the client writes the file, under its user's rights."""

        def read() -> tuple[str, int]:
            with Store(self._store) as store:
                return store.to_csv()

        text, count = await anyio.to_thread.run_sync(read)
        return {"csv": text, "count": count}

    async def measurements_import(self, peer: Peer, csv: FileText, name: str, more: bool = False) -> dict[str, Any]:
        """Import exported measurements, skipping known ones.

        Args:
            name: of their file, for messages.
            more: the next request of this connection continues the file; nothing is imported yet.
        """
        text = self._partial_imports.pop(peer.connection, "") + csv
        if len(text) > IMPORT_CHARACTERS_MAX:
            raise UsageError(f"{name} is longer than {IMPORT_CHARACTERS_MAX} characters: divide it")
        if more:
            self._partial_imports[peer.connection] = text
            return {"count": 0}

        def add() -> int:
            with Store(self._store) as store:
                return store.add_csv(text, name)

        try:
            count = await anyio.to_thread.run_sync(add)
        except TableError as error:
            raise UsageError(str(error)) from None
        self._imported()
        return {"count": count}

    def drop_partial(self, connection: int) -> None:
        """Drop what a connection that ended has sent of a file."""
        self._partial_imports.pop(connection, None)

    async def _of(self, text: str, user: str) -> tuple[list[Knowledge], Job]:
        """Knowledge about a job's model by device type: the type it runs on first, else the most measured."""
        by_model = [j for j in self._state.jobs.values() if text and j.inspection.model == text]
        job = by_model[-1] if by_model else admission.find_job(self._state, text, user)
        if not job.inspection.model or job.inspection.shape is None:
            raise ClusterError(
                f"nothing is known of the speed of {job.spec.name}: "
                + ("its model is being learned" if job.spec.kind == "elastic" else f"it is a {job.spec.kind.value} job")
            )
        found = await self._models.on_each(job.inspection.model, ModelShape.from_dict(job.inspection.shape))
        if not found:
            raise ClusterError("no host with devices is connected (clusterd host ls)")
        if job.attempt is not None:
            names = {d.name for d in trials.held(job.attempt, self._state.hosts)}
            found.sort(key=lambda k: k.devices.name not in names)
        return found, job


def _ranked(
    known: Knowledge, count: int, shape: tuple[int, ...] | None, current: Plan | None
) -> tuple[rows.RankedPlan, ...]:
    return tuple(rows.RankedPlan(**row) for row in plan_rows(known, count, shape, current))


def _known_in_words(known: Knowledge) -> str:
    plans = len({o.row.plan for o in known.online.observations})
    if not plans:
        return "nothing is measured yet: times are what the hardware suggests, within the stated bounds"
    return f"{counted(plans, 'plan')} measured on {known.devices.name}"
