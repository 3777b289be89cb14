"""Performance models while measurements are imported."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from clusterd.core.host import Host
from clusterd.core.state import Inspection, InspectionState, Job, State
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.profiling.performance_models import PerformanceModels, _enough_cores
from clusterd.plans.memory import OVERHEAD, WORKSPACES_BYTES, MemoryEstimate
from clusterd.plans.plan import Plan
from clusterd.profiling.coefficients import INDEX
from clusterd.profiling.fleet import DeviceType
from clusterd.profiling.knowledge import Knowledge, Ranked, workload_of
from clusterd.profiling.model import Row
from clusterd.profiling.placement import Allocation
from clusterd.profiling.store import Key, Measurement, Store
from clusterd.types import Device, DeviceId, HostFacts, HostId, JobId, JobKind, JobSpec
from tests.plans.shapes import gpt

DEVICES = DeviceType("a100", "cuda", (4,), 80 << 30, cores_per_device=12)


def test_measurements_imported_while_the_store_is_read_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read began before: its answer is old, and was kept until the daemon's end."""
    store = tmp_path / "measurements.db"
    engine = SimpleNamespace(journal=SimpleNamespace(fact=lambda name, default: default), state=State())
    learned = PerformanceModels(cast(Engine, engine), store)
    read = learned._load

    def slowly(*wanted: Any) -> Any:
        found = read(*wanted)
        if not found.online.observations:
            row = Row(workload_of(gpt()), Plan(), Allocation.of((1,), device_type="a100"))
            with Store(store) as stored:
                stored.add(Measurement(Key("net", "a100", "", ""), row, 1.0))
            learned.forget()
        return found

    monkeypatch.setattr(learned, "_load", slowly)

    async def ask() -> int:
        return len((await learned._on("net", gpt(), DEVICES)).online.observations)

    assert anyio.run(ask) == 1


def test_a_measured_overhead_outlives_the_daemon_and_changes_which_plans_fit(tmp_path: Path) -> None:
    facts: dict[str, str] = {}

    async def keep_fact(name: str, value: str) -> None:
        facts[name] = value

    def models() -> PerformanceModels:
        journal = SimpleNamespace(fact=lambda name, default: facts.get(name, default), keep_fact=keep_fact)
        engine = SimpleNamespace(journal=journal, state=State())
        return PerformanceModels(cast(Engine, engine), tmp_path / "measurements.db")

    async def overheads() -> list[int]:
        learned = models()
        known = await learned._on("net", gpt(), DEVICES)
        found = [known.memory(Plan(dp=2)).overhead_bytes]
        await learned.measured_overhead("a100", Plan(dp=2), 3 << 30)
        await learned.measured_overhead("a100", Plan(dp=2), 2 << 30)
        found.append(known.memory(Plan(dp=2)).overhead_bytes)
        return [*found, (await models()._on("net", gpt(), DEVICES)).memory(Plan(dp=2)).overhead_bytes]

    before, after, restarted = anyio.run(overheads)
    assert before == OVERHEAD.of(Plan(dp=2)) + WORKSPACES_BYTES
    assert after == restarted == pytest.approx((3 << 30) + WORKSPACES_BYTES, rel=0.01)


def test_a_promise_is_kept_with_a_fair_share_of_the_cores_at_most() -> None:
    """Steps of the ladder are some per cent apart: none may be as fast as the share of which the promise was made."""
    for times, enough in (
        (((1, 3.0), (4, 1.005)), 4),
        (((1, 3.0), (8, 1.02)), 12),
        (((1, 3.0), (8, 1.02), (16, 0.9)), 12),
        ((), 0),
    ):
        assert _enough_cores(DEVICES, known(times)) == enough


def known(core_times: tuple[tuple[int, float], ...]) -> Ranked:
    """A plan whose step takes a second with a fair share."""
    nothing = MemoryEstimate(0, 0, 0, 0, 0, 0, 0, 0, 0)
    return Ranked(Plan(), (1,), 1.0, 0.9, 1.1, 0.1, nothing, core_times)


@pytest.mark.parametrize(("kind", "shared"), [("cuda", True), ("cpu", False)])
def test_links_learned_from_one_model_serve_the_next(tmp_path: Path, kind: str, shared: bool) -> None:
    store = tmp_path / "measurements.db"
    devices = DeviceType("x", kind, (4, 4), 80 << 30, cores_per_device=12)
    engine = SimpleNamespace(journal=SimpleNamespace(fact=lambda name, default: default), state=State())
    large = replace(workload_of(gpt()), parameters=10**9, flops_per_sample=1e12)
    with Store(store) as stored:
        for plan, counts, seconds in ((Plan(dp=4), (4,), 1.0), (Plan(dp=8), (4, 4), 2.0), (Plan(dp=2), (1, 1), 4.0)):
            row = Row(large, plan, Allocation.of(counts, device_type="x"))
            stored.add(Measurement(Key("first", "x", "", ""), row, seconds))
    learned = PerformanceModels(cast(Engine, engine), store)

    async def ask() -> tuple[Knowledge, Knowledge]:
        return await learned._on("first", gpt(), devices), await learned._on("second", gpt(), devices)

    first, second = anyio.run(ask)
    link = INDEX["network_rate"]
    assert bool(second.online.prior.width[link] < 0.9 * first.online.prior.width[link]) is shared
    assert (second.online.options.cards != first.online.options.cards) is shared


def test_links_that_hosts_report_are_priors_until_a_probe_measures_them(tmp_path: Path) -> None:
    devices = tuple(
        Device(
            id=DeviceId(f"a:gpu{n}"), host=HostId("a"), kind="cuda", uuid=f"{n}", name="x", memory_bytes=80 << 30
        )
        for n in range(4)
    )  # fmt: skip
    facts = HostFacts(
        boot_id="b", cpu_cores=64, memory_bytes=1 << 40, address="10.0.0.1", devices=devices, link_mbit=25_000,
        rdma_mbit=400_000, gpu_link_bytes_per_s=450e9,
    )  # fmt: skip
    state = State()
    state.hosts[HostId("a")] = Host(HostId("a"), facts=facts)
    probes = json.dumps({"x": {"local_rate": 200e9}})
    engine = SimpleNamespace(state=state)

    async def prior(figures: str) -> list[float]:
        engine.journal = SimpleNamespace(fact=lambda name, default: figures if name == "probes" else default)
        models = PerformanceModels(cast(Engine, engine), tmp_path / "measurements.db")
        known = await models._on("m", gpt(), DeviceType("x", "cuda", (4,), 80 << 30, cores_per_device=12))
        return [math.exp(known.online.prior.mean[INDEX[name]]) for name in ("local_rate", "network_rate")]

    assert anyio.run(prior, "{}") == pytest.approx([360e9, 40e9])
    assert anyio.run(prior, probes) == pytest.approx([200e9, 40e9])


def test_a_proof_outlives_the_daemon_and_holds_for_the_same_code_only(tmp_path: Path) -> None:
    facts: dict[str, str] = {}

    async def keep_fact(name: str, value: str) -> None:
        facts[name] = value

    def models() -> PerformanceModels:
        journal = SimpleNamespace(fact=lambda name, default: facts.get(name, default), keep_fact=keep_fact)
        engine = SimpleNamespace(journal=journal, state=State())
        return PerformanceModels(cast(Engine, engine), tmp_path / "measurements.db")

    sent = JobSpec(name="a", command=("python", "train.py"), snapshot="11")
    anyio.run(models().proved, JobId("1"), sent, Plan(dp=4).family)
    anyio.run(models().proved, JobId("1"), sent, Plan(dp=2, zero=3).family)
    assert set(models().proven(JobId("2"), replace(sent, name="b"))) == {Plan(dp=2).family, Plan(dp=8, zero=3).family}
    for other in (replace(sent, snapshot="12"), replace(sent, env={"LR": "1"}), replace(sent, python="/opt/python")):
        assert models().proven(JobId("1"), other) == ()
    in_place = replace(sent, snapshot=None)  # its files may change
    anyio.run(models().proved, JobId("1"), in_place, "dp")
    assert (models().proven(JobId("1"), in_place), models().proven(JobId("2"), in_place)) == (("dp",), ())


@pytest.mark.parametrize(
    ("measured_on", "new", "has_data_sheets"),
    [("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", True), ("a card", "another card", False)],
)
def test_a_type_that_nothing_ran_on_is_predicted_from_the_data_sheets(
    tmp_path: Path, measured_on: str, new: str, has_data_sheets: bool
) -> None:
    """An H100 does one to three times the work of an A100; of unknown cards little is said, and that widely."""
    state, posted = State(), []
    for number, name in enumerate((new, measured_on)):  # also if the new type is the first
        host = HostId(f"h{number}")
        device = Device(id=DeviceId(f"{host}:gpu0"), host=host, kind="cuda", uuid="u", name=name, memory_bytes=80 << 30)
        facts = HostFacts(boot_id="b", cpu_cores=8, memory_bytes=1 << 40, address="", devices=(device,))
        state.hosts[host] = Host(host, facts=facts)
    spec = JobSpec(name="j", kind=JobKind.ELASTIC, command=("train",))
    inspection = Inspection(InspectionState.DONE, shape=gpt().to_dict(), model="net")
    state.jobs[JobId("1")] = Job(
        id=JobId("1"), spec=spec, priority=0, submitted_s=0.0, queued_s=0.0, inspection=inspection
    )
    row = Row(workload_of(gpt()), Plan(), Allocation.of((1,), device_type=measured_on))
    with Store(tmp_path / "m.db") as stored:
        stored.add(Measurement(Key("net", measured_on, "", ""), row, 0.1))

    async def report(event: Any) -> None:
        posted.append(event)

    journal = SimpleNamespace(fact=lambda name, default: default)
    engine = SimpleNamespace(journal=journal, state=state, report=report)
    anyio.run(PerformanceModels(cast(Engine, engine), tmp_path / "m.db").publish, "net", "for this test")
    known = {one.device_type: one for one in posted[-1].table.estimates if one.plan == Plan()}
    assert known[measured_on].step_time_s == pytest.approx(0.1, rel=0.1)
    assert (known[new].upper_s / known[new].lower_s < 3.5) is has_data_sheets
    assert not has_data_sheets or 0.1 / 3 < known[new].step_time_s < 0.1
