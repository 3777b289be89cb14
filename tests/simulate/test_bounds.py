"""Lower bounds: computed by hand where possible, and never beaten by our policies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from clusterd.cli.simulate import simulate as command
from clusterd.plans.plan import Plan
from clusterd.simulate import run
from clusterd.simulate.bounds import bounds
from clusterd.simulate.cluster import parse_cluster
from clusterd.simulate.metrics import figures
from clusterd.simulate.setting import Setting
from clusterd.simulate.truth import ModelTruth, Truth
from clusterd.simulate.workload import Arrival, Workload

LINEAR = {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}


def truth_of(**models: Mapping[int, float]) -> Truth:
    """Step times by number of devices, on one host."""
    return Truth(
        {
            name: ModelTruth(name, 16, {(Plan(dp=n), "g", (n,)): time for n, time in times.items()})
            for name, times in models.items()
        }
    )


def workload_of(*jobs: tuple[float, str, int]) -> Workload:
    """Of (arrival, model, steps)."""
    return Workload(
        tuple(
            Arrival(name=f"j{i}", at_s=at_s, model=model, steps=steps, devices=1)
            for i, (at_s, model, steps) in enumerate(sorted(jobs))
        )
    )


def test_a_job_alone_takes_as_long_as_at_its_fastest() -> None:
    found = bounds(parse_cluster("1x8:g"), workload_of((5.0, "net", 1000)), truth_of(net=LINEAR))
    assert found.average_completion_s == pytest.approx(1000.0, rel=0.01)
    assert found.makespan_s == pytest.approx(1000.0)


def test_jobs_that_scale_without_loss_are_best_one_after_the_other() -> None:
    """Two of 1,000 s on all devices: done after 1,000 and 2,000 s."""
    found = bounds(parse_cluster("1x8:g"), workload_of((0.0, "net", 1000), (0.0, "net", 1000)), truth_of(net=LINEAR))
    assert found.average_completion_s == pytest.approx(1500.0, rel=0.02)
    assert found.average_completion_s <= 1500.0
    assert found.makespan_s == pytest.approx(2000.0)


def test_jobs_that_do_not_scale_run_side_by_side() -> None:
    jobs = workload_of(*[(0.0, "net", 100)] * 8)
    found = bounds(parse_cluster("1x8:g"), jobs, truth_of(net={1: 8.0, 8: 8.0}))
    assert found.average_completion_s == pytest.approx(800.0, rel=0.01)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.floats(0.0, 2000.0), st.sampled_from(["wide", "narrow"]), st.integers(10, 400)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["default", "srtf", "optimus"]),
)
def test_no_policy_beats_it(jobs: list[tuple[float, str, int]], policy: str) -> None:
    truth = truth_of(wide=LINEAR, narrow={1: 3.0, 2: 2.0, 4: 1.7})
    cluster, given_ = parse_cluster("1x8:g"), workload_of(*jobs)
    performance_tables = run.believe(truth, True, 0, list(truth.models))
    found = figures(run.simulate(Setting(cluster, given_, truth, performance_tables, move_s=0.0), policy))
    least = bounds(cluster, given_, truth)
    assert found["average_completion_s"] >= least.average_completion_s * (1.0 - 1e-6)
    assert found["makespan_s"] >= least.makespan_s * (1.0 - 1e-6)


def test_types_are_counted_apart() -> None:
    """Eight slow devices beside eight fast ones do not make sixteen fast ones."""
    times = {(Plan(dp=8), kind, (8,)): time for kind, time in (("fast", 1.0), ("slow", 4.0))}
    truth = Truth({"net": ModelTruth("net", 16, times)})
    cluster = parse_cluster("1x8:fast+1x8:slow")
    found = bounds(cluster, workload_of((0.0, "net", 1000), (0.0, "net", 1000)), truth)
    # The second goes on the fast ones when the first is done; a fifth of all work is done on the slow ones meanwhile.
    assert 1200.0 <= found.average_completion_s <= 1500.0


def test_the_command_says_what_could_not_be_beaten(tmp_path: Path) -> None:
    header = "model,parameters,layers,hidden,seq_len,global_batch,family,dp,tp,pp,zero_stage,offload,act_ckpt,"
    (tmp_path / "truth.csv").write_text(
        f"{header}gpus_per_node,step_time_s\n"
        + "\n".join(f"net,1000000,4,64,64,16,ga,{n},1,1,0,0,0,{n},{t}" for n, t in LINEAR.items())
    )
    (tmp_path / "jobs.csv").write_text(
        "name,submission_time,duration,application,num_gpus,num_cpus,exec_plan,steps,is_sla\na,0,0,net,8,64,ga,1000,0\n"
    )
    given_ = ["--cluster", "1x8:g", "--workload", f"{tmp_path}/jobs.csv", "--truth", f"{tmp_path}/truth.csv"]
    message = CliRunner().invoke(command, [*given_, "--bound", "--json"])
    assert message.exit_code == 0, message.output
    assert json.loads(message.output)["bounds"]["average_completion_s"] == pytest.approx(1000.0, rel=0.01)
    message = CliRunner().invoke(command, [*given_, "--bound", "--horizon", "50"])
    assert "--bound" in str(message.exception)
