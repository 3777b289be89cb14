"""Hypothesis strategies of requests, hosts and performance tables, all of them legal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from clusterd.core.performance_table import Estimate, PerformanceTable
from clusterd.plans.memory import estimate
from clusterd.plans.plan import Plan
from clusterd.types import HostFacts, HostId, JobKind, JobSpec, Resources, Tenant
from tests.core.conftest import GIB, facts
from tests.plans.test_reshard import gpt

A, B, C = HostId("a"), HostId("b"), HostId("c")
HOSTS = {A: (2, "fast"), B: (2, "slow"), C: (4, "slow")}
"""GPUs, and their type."""

CORES = 8
PLANS = [Plan(), Plan(dp=2), Plan(tp=2), Plan(dp=2, tp=2), Plan(dp=3), Plan(dp=4, zero=3), Plan(dp=2, pp=2), Plan(dp=6)]
MODEL = gpt()
STEPS = 1000
SHAPE: dict[str, Any] = json.loads(json.dumps({**MODEL.to_dict(), "steps": STEPS}))
"""As it comes over a wire."""

TIGHT_BYTES = int(1.3 * estimate(Plan(), MODEL, kind="cuda").device_bytes)
"""Of a GPU that has no room for old and new ranks side by side."""

TENANTS = {"small": Tenant(quota=4), "heavy": Tenant(share=3.0)}
MODELS = ["m", "other"]


def whole(host: HostId) -> HostFacts:
    """The host with all its devices."""
    count, name = HOSTS[host]
    plain = facts(host, gpus=count, cores=CORES)
    return replace(plain, devices=tuple(replace(device, name=name) for device in plain.devices))


@st.composite
def changed(draw: st.DrawFn, host: HostId) -> HostFacts:
    """The host with devices that vanished, that strangers use, or that have less memory."""
    full = whole(host)
    there = [device for device in full.devices if draw(st.integers(0, 3))]
    foreign = draw(st.sampled_from(["", "", "ann's notebook"]))
    memory_bytes = draw(st.sampled_from([80 * GIB, TIGHT_BYTES, TIGHT_BYTES // 4]))
    devices = [replace(device, memory_bytes=memory_bytes) for device in there]
    devices[:1] = [replace(device, foreign=foreign) for device in devices[:1]]
    return replace(full, devices=tuple(devices), cpu_cores=draw(st.sampled_from([CORES, CORES, 2])))


@st.composite
def specs(draw: st.DrawFn, kind: JobKind | None = None) -> JobSpec:
    """A job that can run once every host is there."""
    kind = kind or draw(st.sampled_from(JobKind))
    devices = draw(st.integers(0 if kind is JobKind.COMMAND else 1, 4))
    plan: Plan | None = None
    plans: tuple[Plan, ...] = ()
    if kind is JobKind.CHECKPOINTABLE:
        plans = draw(st.sampled_from([(Plan(dp=4), Plan(dp=2), Plan()), (Plan(tp=2),), (Plan(dp=3), Plan(dp=2))]))
        devices = plans[0].ranks
    elif kind is JobKind.ELASTIC:
        plan = draw(st.sampled_from([None, None, *(p for p in PLANS if p.ranks == devices)]))
    hosts = draw(st.sampled_from([(), (), (), (C,), (B, C)]))
    share = draw(st.sampled_from([1, 2, 3])) if kind is JobKind.COMMAND and devices == 1 else 1
    return JobSpec(
        name=f"a-{kind.value}",
        kind=kind,
        command=("train", "{tp}", "{pp}", "{zero}"),
        resources=Resources(
            devices=devices,
            plan=plan,
            plans=plans,
            hosts=hosts,
            share=share,
            cpus=draw(st.sampled_from([0, 0, 2, CORES])) if devices < 3 else 0,
            memory_bytes=draw(st.sampled_from([0, 0, 64 * GIB])),
        ),
        datasets=draw(st.sampled_from([{}, {}, {}, {"web": "a:/web"}])),
        priority=draw(st.integers(0, 2)),
        retries=draw(st.integers(0, 1)),
        guaranteed=draw(st.booleans()),
        preemptible=kind is JobKind.COMMAND and share == 1 and draw(st.booleans()),
        account=draw(st.sampled_from(["", "", "ann"])),
        tenant=draw(st.sampled_from(["default", "small", "heavy"])),
        time_limit_s=draw(st.sampled_from([None, None, 500.0])),
        stall_s=draw(st.sampled_from([None, 100.0])) if kind is JobKind.ELASTIC else None,
        target_loss=draw(st.sampled_from([None, 1.0])),
        checkpoint_directory=draw(st.sampled_from([None, "/shared"])),
        checkpoint_every_s=draw(st.sampled_from([None, 60.0])),
    )


@st.composite
def performance_tables(draw: st.DrawFn) -> PerformanceTable:
    """Beliefs about speed, for hosts as they are or once were."""
    slower = draw(st.sampled_from([1.0, 1.5, 0.3]))
    sizes = draw(st.sampled_from([(1, 2, 3, 4, 6, 8), (1, 2), (2, 4), (4,)]))
    known = believed(sizes, {"fast": 1.0, "slow": slower})
    return replace(known, measured=draw(st.sampled_from([0, 2, 7])), is_whole=draw(st.integers(0, 7)) == 0)


def believed(sizes: tuple[int, ...], seconds: Mapping[str, float], scale: float = 0.8) -> PerformanceTable:
    """Each plan of so many ranks on each shape that there could be."""
    shapes = [(1,), (2,), (3,), (4,), (1, 1), (2, 1), (2, 2), (4, 2), (4, 2, 2)]
    rows = [
        Estimate(
            plan=plan,
            device_type=name,
            shape=shape,
            step_time_s=(time := seconds[name] / sum(shape) ** scale * (1.0 + 0.1 * len(shape) + 0.01 * number)),
            lower_s=0.9 * time,
            upper_s=1.1 * time,
            device_bytes=estimate(plan, MODEL, kind="cuda").device_bytes,
        )
        for name in seconds
        for shape in shapes
        for number, plan in enumerate(PLANS)
        if plan.ranks == sum(shape) and plan.ranks in sizes
    ]
    return PerformanceTable(tuple(rows), MODEL.global_batch, measured=7)
