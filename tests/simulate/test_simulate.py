"""Traces under a virtual clock: results match arithmetic, and policies keep their properties."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterd.cli.simulate import simulate as command
from clusterd.core.invariants import violations
from clusterd.core.policies import POLICIES
from clusterd.errors import UsageError
from clusterd.simulate import run, workload
from clusterd.simulate.cluster import parse_cluster
from clusterd.simulate.errors import InputError
from clusterd.simulate.metrics import figures
from clusterd.simulate.runs import Disturbance
from clusterd.simulate.setting import Setting
from clusterd.simulate.trace import read, read_jobs
from clusterd.simulate.truth import Truth, read_truth

DATA = Path(os.environ.get("CLUSTERD_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
HEADER = (
    "model,parameters,layers,hidden,seq_len,global_batch,family,dp,tp,pp,zero_stage,offload,act_ckpt,"
    "gpus_per_node,step_time_s\n"
)
TIMES = {1: 8.0, 2: 4.2, 4: 2.2, 8: 1.2}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A model that scales well, and four jobs of it on one host of eight."""
    truth = tmp_path / "truth.csv"
    rows = [
        f"net,1000000,4,64,64,16,{family},{n},1,1,{zero},0,0,{n},{time * slow}"
        for n, time in TIMES.items()
        for family, zero, slow in (("ga", 0, 1.0), ("zero-dp", 2, 1.3))
    ]
    truth.write_text(HEADER + "\n".join(rows) + "\n")
    jobs = tmp_path / "jobs.csv"
    jobs.write_text(
        "name,submission_time,duration,application,num_gpus,num_cpus,exec_plan,steps,is_sla\n"
        "a,0,0,net,8,64,zero-dp,1000,0\nb,10,0,net,4,32,ga,100,1\nc,20,0,net,2,16,ga,50,0\nd,30,0,other,1,8,ga,50,0\n"
    )
    return truth, jobs


def setting(files: tuple[Path, Path], **changes: object) -> Setting:
    cluster = parse_cluster("1x8:g")
    truth, jobs = read(files[1], files[0], cluster)
    performance_tables = run.believe(truth, True, 0, [a.model for a in jobs.arrivals])
    return replace(Setting(cluster, jobs, truth, performance_tables), **changes)


def test_a_job_alone_takes_as_long_as_its_steps(files: tuple[Path, Path]) -> None:
    """First come first served on a free host: the truth's step time, and nothing else."""
    result = run.simulate(setting(files), "fifo")
    first = result.runs[0]
    assert first.end_s == pytest.approx(1000 * TIMES[8] * 1.3)
    second = result.runs[1]
    assert second.end_s == pytest.approx(first.end_s + 100 * TIMES[4]), "b waits for a's devices"
    assert result.runs[2].end_s == pytest.approx(first.end_s + 50 * TIMES[2]), "c fits beside b"


def test_jobs_of_unknown_models_are_left_out_and_counted(files: tuple[Path, Path]) -> None:
    """The truth holds one model of two."""
    jobs = setting(files).workload
    assert jobs.left_out == {"other": 1}
    assert len(jobs.arrivals) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_finishes_every_job_and_breaks_no_invariant(files: tuple[Path, Path], policy: str) -> None:
    """Whatever the order, all steps are trained, and no device is given twice."""
    given = setting(files)
    wrong: list[str] = []
    result = run.simulate(given, policy, lambda scheduler, events, decisions: wrong.extend(violations(scheduler.state)))
    found = figures(result)
    assert wrong == []
    assert (found["finished"], found["jobs"]) == (3, 3)
    work_s = sum(r.arrival.steps * min(n * t for n, t in TIMES.items()) for r in result.runs)
    assert result.device_s >= work_s * (1 - 1e-9), "nobody is faster than the truth"


def test_jobs_that_arrive_at_one_time_have_no_load(files: tuple[Path, Path]) -> None:
    given = setting(files)
    at_once = replace(given.workload, arrivals=tuple(replace(a, at_s=5.0) for a in given.workload.arrivals))
    with pytest.raises(InputError, match="arrive at one time"):
        workload.at_load(at_once, given.truth, given.cluster, 1.0)


@pytest.mark.parametrize("field", ["submission_time", "steps"])
def test_a_trace_with_no_end_is_told_in_one_line(files: tuple[Path, Path], field: str) -> None:
    header, first, *rest = files[1].read_text().splitlines()
    cells = dict(zip(header.split(","), first.split(","), strict=True)) | {field: "inf"}
    files[1].write_text("\n".join([header, ",".join(cells.values()), *rest]) + "\n")
    with pytest.raises(InputError, match="line 2: "):
        setting(files)


def test_a_move_costs_what_it_is_said_to_cost(files: tuple[Path, Path]) -> None:
    """The default's jobs are moved; with dearer moves the same trace takes longer, never shorter than without."""
    free = run.simulate(setting(files, move_s=0.0), "default")
    dear = run.simulate(setting(files, move_s=500.0), "default")
    assert sum(r.moves for r in free.runs) > 0
    assert figures(dear)["average_completion_s"] >= figures(free)["average_completion_s"]


def test_runs_are_reproducible(files: tuple[Path, Path]) -> None:
    """The same input gives the same figures, processor time apart."""
    once, again = (figures(run.simulate(setting(files), "default")) for _ in range(2))
    for report in (once, again):
        for key in ("pass_s", "pass_s_max"):
            report.pop(key)
    assert once == again


def test_a_host_that_fails_costs_the_steps_since_the_last_snapshot(files: tuple[Path, Path]) -> None:
    """Down after 1,000 s, back 600 s later: the job goes on from its snapshot, not from nothing."""
    given = setting(files, disturbances=(Disturbance(1000.0, 0, "down"), Disturbance(1600.0, 0, "up")))
    undisturbed = run.simulate(setting(files), "fifo").runs[0]
    result = run.simulate(given, "fifo")
    first = result.runs[0]
    assert undisturbed.end_s is not None
    assert first.end_s is not None
    lost_s = first.end_s - undisturbed.end_s
    assert 600.0 <= lost_s <= 600.0 + 600.0 + 78.0 + 200.0
    assert figures(result)["finished"] == 3


def test_rounds_start_jobs_late_and_end_them_on_time(files: tuple[Path, Path]) -> None:
    """Every 600 s: a job ends when its steps are made, and who waits for its devices starts with the next round."""
    result = run.simulate(setting(files, round_s=600.0), "fifo")
    first, second, third = result.runs
    assert first.first_start_s == 0.0
    assert first.end_s == pytest.approx(1000 * TIMES[8] * 1.3)
    assert second.first_start_s == third.first_start_s == 1800.0, "1,560 s are over at the third round"
    assert second.end_s == pytest.approx(1800.0 + 100 * TIMES[4])
    assert second.waited_s == pytest.approx(1800.0 - second.arrival.at_s)
    assert figures(result)["makespan_s"] == pytest.approx(max(r.end_s for r in result.runs if r.end_s))


def test_a_step_that_a_round_cuts_is_made_in_the_next(files: tuple[Path, Path]) -> None:
    """Rounds of 10 s hold four steps of 2.2 s: 100 steps take 24 rounds and 8.8 s."""
    given = setting(files)
    alone = workload.Workload(tuple(a for a in given.workload.arrivals if a.name == "b"))
    whole = replace(given, workload=alone, round_s=10.0, whole_steps=True)
    (only,) = run.simulate(whole, "fifo").runs
    assert only.first_start_s == 10.0
    assert only.end_s is not None
    assert only.end_s - only.first_start_s == pytest.approx(24 * 10.0 + 4 * TIMES[4])


def test_load_is_what_is_asked_for(files: tuple[Path, Path]) -> None:
    """Arrivals are squeezed until the jobs ask for as much as the cluster offers."""
    given = setting(files)
    squeezed = workload.at_load(given.workload, given.truth, given.cluster, 1.5)
    assert workload.load_of(squeezed, given.truth, given.cluster) == pytest.approx(1.5)


def test_a_truth_that_the_cluster_cannot_hold_is_offered_to_nobody(files: tuple[Path, Path]) -> None:
    """Hosts of four devices: the plan on eight of one host is not among what can be chosen."""
    truth = read_truth(files[0], "g").on({"g": [4, 4]})
    assert {shape for _, _, shape in truth.models["net"].step_times_s} == {(1,), (2,), (4,)}


def test_a_wrong_line_is_told_with_its_number(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Steps of nothing."""
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(files[1].read_text().replace("b,10,0,net,4,32,ga,100,1", "b,10,0,net,4,32,ga,0,1"))
    truth = Truth(read_truth(files[0], "g").models, "truth")
    with pytest.raises(InputError, match="line 3"):
        read_jobs(wrong, truth)


def test_jobs_unfinished_at_the_horizon_count_to_it(files: tuple[Path, Path]) -> None:
    """Eight devices for as long as it is looked at, and jobs that wait all that time."""
    cut = run.simulate(setting(files, horizon_s=500.0), "fifo")
    report = figures(cut)
    assert cut.ended_s == 500.0
    assert report["makespan_s"] == 500.0
    assert report["utilisation"] == pytest.approx(1.0)
    assert report["average_completion_s"] == pytest.approx((500.0 + 490.0 + 480.0) / 3)
    assert report["finished"] == report["stuck"] == 0


@pytest.mark.parametrize("policy", ["fifo", "tiresias", "default"])
def test_a_job_that_fits_nowhere_is_named_and_the_run_ends(files: tuple[Path, Path], policy: str) -> None:
    """Policies that look at the queue by the clock would look for ever."""
    text = files[1].read_text()
    files[1].write_text(text + "e,40,0,net,4,4000,ga,50,0\n")
    result = run.simulate(setting(files), policy)
    assert result.stuck["e"].startswith("none of the ways" if policy == "default" else "waits for")
    assert figures(result)["finished"] == len(result.runs) - len(result.stuck)


def test_a_job_that_is_given_another_size_keeps_its_cores_beside_each_device(files: tuple[Path, Path]) -> None:
    files[1].write_text(files[1].read_text() + "e,40,0,net,16,128,ga,50,0\n")
    arrival = setting(files).workload.arrivals[-1]
    assert (arrival.devices, arrival.cpus) == (8, 64)


def test_a_job_waits_for_a_host_that_is_away(files: tuple[Path, Path]) -> None:
    """Regression: the job was given up, since no plan of the trace fits the remaining hosts."""
    away = replace(setting(files), disturbances=tuple(run.drains(parse_cluster("1x8:g"), ["0@0-1000"])))
    result = run.simulate(away, "default")
    assert figures(result)["finished"] == len(result.runs)


@pytest.mark.parametrize(
    "options",
    [
        ("--repair", "nan"),
        ("--faults", "-1"),
        ("--horizon", "-5"),
        ("--checkpoint", "0"),
        ("--processes", "0"),
        ("--start-cost", "-1"),
        ("--drain", "0@nan-nan"),
        ("--drain", "0@100-50"),
    ],
)
def test_options_that_mean_nothing_are_refused(files: tuple[Path, Path], options: tuple[str, str]) -> None:
    given = ["--cluster", "1x8:g", "--workload", str(files[1]), "--truth", str(files[0]), "--oracle", *options]
    answer = CliRunner().invoke(command, given)
    assert isinstance(answer.exception, UsageError)
    assert str(answer.exception).startswith(options[0])


def test_jobs_that_come_at_one_time_are_told_in_json_that_parses(files: tuple[Path, Path]) -> None:
    """Names of models are not parsed as markup either."""
    lines = files[1].read_text().splitlines()
    files[1].write_text("\n".join([*lines[:2], lines[4].replace(",30,", ",0,").replace("other", "[/x]")]) + "\n")
    given = ["--cluster", "1x8:g", "--workload", str(files[1]), "--truth", str(files[0]), "--oracle"]
    report = CliRunner().invoke(command, [*given, "--json"], catch_exceptions=False)
    assert json.loads(report.output, parse_constant=pytest.fail)["load"] is None
    assert "1 [/x]" in CliRunner().invoke(command, given, catch_exceptions=False).output


def test_the_command_prints_the_figures_that_were_promised(files: tuple[Path, Path], tmp_path: Path) -> None:
    """One JSON object; a recording that begins with a snapshot."""
    record = tmp_path / "r.jsonl"
    answer = CliRunner().invoke(
        command,
        [
            "--cluster",
            "1x8:g",
            "--workload",
            str(files[1]),
            "--truth",
            str(files[0]),
            "--policy",
            "default",
            "--policy",
            "tiresias",
            "--oracle",
            "--processes",
            "1",
            "--json",
            "--record",
            str(record),
        ],
        catch_exceptions=False,
    )
    report = json.loads(answer.output)
    names = (
        "average_completion_s median_completion_s p99_completion_s makespan_s queueing_s utilisation guaranteed_met "
        "rho_p95 rho_over_1_1 jain moves_per_job pass_s finished jobs"
    )
    for policy in ("default", "tiresias"):
        assert set(names.split()) <= set(report["policies"][policy])
    assert report["left_out"] == {"other": 1}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert lines[0]["number"] == 0 and {"status", "jobs", "hosts"} <= set(lines[0]["snapshot"])
    assert [line["number"] for line in lines] == list(range(len(lines)))
    assert any(row["state"] == "finished" for line in lines[1:] for row in line["jobs"])


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "a800").is_dir(), reason="the a800 data set is not there (CLUSTERD_DATA)")
def test_on_the_published_trace_ours_is_ahead_of_those_that_restart() -> None:
    """Load 1, seven trial runs per model, 78 s per move for everybody."""
    cluster = parse_cluster("8x8:a800")
    truth, jobs = read(DATA / "a800" / "workload_mt.csv", DATA / "a800" / "step_times.csv", cluster)
    jobs = workload.at_load(jobs, truth, cluster, 1.0)
    given = Setting(cluster, jobs, truth, run.believe(truth, False, 0, [a.model for a in jobs.arrivals]))
    found = {name: figures(run.simulate(given, name)) for name in ("default", "tiresias", "gavel", "rubick")}
    ours = found.pop("default")
    assert ours["finished"] == ours["jobs"] == 245
    assert ours["guaranteed_met"] is not None
    for name, theirs in found.items():
        assert theirs["average_completion_s"] > 1.05 * ours["average_completion_s"], name


def test_other_traces_of_a_kind_differ_by_their_seed(files: tuple[Path, Path]) -> None:
    """Drawn with replacement, in as many jobs."""
    jobs = setting(files).workload
    one, other = (workload.resampled(jobs, random.Random(seed)) for seed in (1, 2))
    assert len(one.arrivals) == len(jobs.arrivals)
    assert one.arrivals != other.arrivals


def two_types(folder: Path, jobs: str) -> Setting:
    """Four fast devices, and four on another host that take twice as long."""
    truth, trace = folder / "truth.csv", folder / "jobs.csv"
    rows = [
        f"net,1000000,4,64,64,48,ga,{n},1,1,0,0,0,{hosts},{slow * time},{kind}"
        for kind, slow in (("fast", 1.0), ("slow", 2.0))
        for n, hosts, time in ((1, "1", 8.0), (2, "2", 4.2), (4, "4", 2.2), (8, "4+4", 1.2))
    ]
    truth.write_text(HEADER.strip() + ",device_type\n" + "\n".join(rows) + "\n")
    header = "name,submission_time,duration,application,num_gpus,num_cpus,exec_plan,steps,is_sla\n"
    trace.write_text(header + jobs)
    cluster = parse_cluster("1x4:fast+1x4:slow")
    world, some = read(trace, truth, cluster)
    return Setting(cluster, some, world, run.believe(world, True, 0, ["net"]))


def test_a_long_job_alone_uses_both_types_of_a_cluster_and_ends_earlier(tmp_path: Path) -> None:
    """The batch is split two to one."""
    given = two_types(tmp_path, "a,0,0,net,4,32,ga,1000,0\n")
    assert {shape for _, _, shape in given.truth.models["net"].step_times_s} == {(1,), (2,), (4,)}
    both, fast = (run.simulate(given, name).runs[0] for name in ("default", "fifo"))
    assert fast.end_s == pytest.approx(1000 * 2.2)
    # Eight replicas of 6 samples are 8 and 4 by speed, so a step takes 8/6 of what eight fast devices need.
    assert both.end_s == pytest.approx(1000 * 1.2 * 8 / 6)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("policy", ["default", "sampling", "sampling+plans", "gavel", "optimus", "rubick"])
def test_on_two_types_every_job_finishes_and_no_invariant_is_broken(tmp_path: Path, policy: str) -> None:
    """Jobs of all sizes one after the other, mixed and not."""
    lines = [f"j{n},{40 * n},0,net,{1 << n % 4},8,ga,{50 + 130 * n % 700},0" for n in range(12)]
    given = two_types(tmp_path, "\n".join(lines).replace("net,8", "net,4") + "\n")
    wrong: list[str] = []
    found = figures(
        run.simulate(given, policy, lambda scheduler, events, decisions: wrong.extend(violations(scheduler.state)))
    )
    assert wrong == []
    assert (found["finished"], found["jobs"]) == (12, 12)
