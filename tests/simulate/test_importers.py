"""Published tables and traces: content of the real files, and one clear line about wrong ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clusterd.plans.plan import replicas
from clusterd.simulate import workload
from clusterd.simulate.cluster import Cluster, parse_cluster
from clusterd.simulate.errors import InputError
from clusterd.simulate.truth import Truth, by_count, oracle
from clusterd.simulate.workload import Workload
from tests.benchmarks import traces
from tests.benchmarks.traces import arena, gavel, pollux
from tests.benchmarks.traces.pollux import Application, shapes

DATA = Path(os.environ.get("CLUSTERD_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
there = pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not there (CLUSTERD_DATA)")

ARENA = parse_cluster("80x4:a100+20x16:v100+160x2:a40+160x2:a10")
GAVEL = parse_cluster("2x4:v100+4x4:p100+6x4:k80")
POLLUX = parse_cluster("16x4:t4")


def read(workload: Path, truth: Path, cluster: Cluster) -> tuple[Truth, Workload]:
    """Step times and jobs of files that are in one of the formats."""
    found = traces.read(workload, truth, cluster)
    assert found is not None
    return found


@there
def test_arena_gives_the_best_plan_by_type_and_count() -> None:
    """Entries of 0 and less are not offered; each of the 125 jobs can run."""
    table = DATA / "arena" / "prof_database_optimal.json"
    world, jobs = read(DATA / "arena" / "simulate_trace_pai.csv", table, ARENA)
    best = json.loads(table.read_text())["optimal"]
    model = world.models["bert_2.6B_512"]
    assert best["bert_2.6B_512"]["2_a100_2_n_2_d"] < 0
    assert model.step_time_s(replicas(4, 512), "a100", (2, 2)) is None
    assert model.step_time_s(replicas(8, 512), "a100", (4, 4)) == best["bert_2.6B_512"]["2_a100_2_n_4_d"]
    assert model.parameters == 2_600_000_000
    assert len(jobs.arrivals) == 125 and not jobs.left_out
    assert all(time > 0 for m in world.models.values() for time in m.step_times_s.values())


@there
def test_gavel_runs_each_job_at_its_scale_only() -> None:
    """Replicas bring their own batches: another number of them would be other work."""
    path = DATA / "gavel" / "simulation_throughputs.json"
    world, jobs = read(DATA / "gavel" / "max_min_fairness.tsv", path, GAVEL)
    rate = json.loads(path.read_text())["p100"]["('ResNet-18 (batch size 128)', 4)"]["null"]
    model = world.models["ResNet-18 (batch size 128) x4"]
    assert {sum(shape) for _, _, shape in model.step_times_s} == {4}
    assert model.step_time_s(replicas(4, 512), "p100", (2, 1, 1)) == pytest.approx(1.0 / rate)
    assert len(jobs.arrivals) == 96 and not jobs.left_out
    assert jobs.arrivals[0].steps == 925982


@there
def test_pollux_reads_step_times_between_measured_batches() -> None:
    """On a measured placement, at a measured batch: the measured time, with what is accumulated before it."""
    app = Application(DATA / "pollux" / "t4" / "cifar10")
    (found,) = app.times([((1,), 64)])
    assert found == (0.05983335971832275, 0.0005080448031425476)
    step, sync = found
    local, more = app.split(128, 2)
    assert (local, more) == (64, 0)
    local, more = app.split(8192, 2)
    assert local * 2 * (more + 1) <= app.batch_max, "no more than was ever trained with"
    assert app.split(256, 1) == (128, 1), "one device accumulates, or its gradient says nothing of noise"
    assert step > sync


@there
def test_pollux_counts_updates_by_the_recorded_gradients() -> None:
    """With the smallest batch an update is one unit of progress; with a larger one fewer are needed, at most in
    proportion."""
    app = Application(DATA / "pollux" / "t4" / "cifar10")
    least = app.updates(app.batch_min)
    reached = min(one.progress[app.epochs - 1] for one in app.validation.values())
    assert least == pytest.approx(reached)
    assert least / 16 < app.updates(16 * app.batch_min) < least


@there
def test_pollux_reads_the_workload_and_every_shape() -> None:
    """All 160 jobs; rotations of a placement are one."""
    world, jobs = read(DATA / "pollux" / "workloads" / "workload-6.csv", DATA / "pollux" / "t4", POLLUX)
    assert len(jobs.arrivals) == 160 and not jobs.left_out and not jobs.replaced
    assert list(world.models["ncf_32768"].step_times_s) == [(replicas(1, 32768), "t4", (1,))]
    assert sum(jobs.asked_s(world).values()) > 0


def test_shapes_are_all_ways_to_spread() -> None:
    """Three hosts of two, up to four devices."""
    assert set(shapes(3, 2, 4)) == {(1,), (2,), (1, 1), (2, 1), (1, 1, 1), (2, 2), (2, 1, 1)}


@there
def test_policies_may_be_told_step_times_by_count_alone() -> None:
    """Estimates for four devices do not depend on their hosts; true times do."""
    world, _ = read(DATA / "pollux" / "workloads" / "workload-6.csv", DATA / "pollux" / "t4", POLLUX)
    model = world.models["deepspeech2_320"]
    answer = oracle(by_count(model))
    believed = {x.step_time_s for x in answer.estimates if x.devices == 8}
    assert believed == {model.step_time_s(replicas(8, 320), "t4", (4, 4))}
    assert len({t for (_, _, shape), t in model.step_times_s.items() if sum(shape) == 8}) > 1


def test_fewer_steps_are_the_same_jobs(tmp_path: Path) -> None:
    """Arena divides iterations by five; nobody is left without a step."""
    path = _arena_table(tmp_path)
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{','.join(arena.COLUMNS)}\na,0,11,bert__1.3B,128,2,a100\nb,5,1,bert__1.3B,128,2,a100\n")
    jobs = arena.read(trace, arena.read_truth(path))
    assert [a.steps for a in workload.with_steps(jobs, 0.2).arrivals] == [2, 1]


def _arena_table(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"optimal": {"bert_1.3B_128": {"1_a100_1_n_2_d": 5.5, "2_a100_2_n_2_d": -1.0}}}))
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "no object"),
        ('{"best": {}}', "nothing under 'optimal'"),
        ('{"optimal": {"bert": {}}}', "NAME_SIZE_BATCH"),
        ('{"optimal": {"bert_1.3B_128": {"2_a100": 1.0}}}', "2_a100"),
        ('{"optimal": {"bert_1.3B_128": {"1_a100_1_n_2_d": "fast"}}}', "'fast'"),
    ],
)
def test_a_wrong_arena_table_is_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    """File and entry, and what belongs there."""
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as answer:
        arena.read_truth(path)
    assert str(path) in str(answer.value) and "\n" not in str(answer.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,0,0,bert__1.3B,128,2,a100", "line 2"),
        ("a,0,many,bert__1.3B,128,2,a100", "line 2"),
        ("a,0,5,bert__1.3B,128,2", "line 2"),
        ("a,0,5,gpt__7B,128,2,a100", "gpt_7B_128"),
    ],
)
def test_a_wrong_arena_trace_is_told_in_one_line(tmp_path: Path, line: str, message: str) -> None:
    """The line, or the models that the table does not hold."""
    truth = arena.read_truth(_arena_table(tmp_path))
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{','.join(arena.COLUMNS)}\n{line}\n")
    with pytest.raises(InputError, match=message):
        arena.read(trace, truth)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"v100": {}, "p100": {}}', "no throughputs on k80"),
        ('{"v100": {"ResNet": {"null": 1.0}}, "p100": {}, "k80": {}}', "'ResNet'"),
        ('{"v100": {"(\'ResNet\', 1)": {}}, "p100": {}, "k80": {}}', "no number"),
    ],
)
def test_wrong_throughputs_are_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    """Type and entry, and what belongs there."""
    path = tmp_path / "throughputs.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        gavel.read_truth(path, GAVEL.sizes)


def test_a_wrong_line_of_gavels_trace_is_told_with_its_number(tmp_path: Path) -> None:
    """Nine fields of ten; steps that are no number."""
    path = tmp_path / "throughputs.json"
    path.write_text('{"v100": {"(\'ResNet\', 1)": {"null": 2.0}}, "p100": {}, "k80": {}}')
    truth = gavel.read_truth(path, GAVEL.sizes)
    trace = tmp_path / "trace.tsv"
    good = ["ResNet", "python", ".", "-n", "1", "10", "1", "1", "-1", "0"]
    trace.write_text("\n".join("\t".join(x) for x in (good, good[:-1])) + "\n")
    with pytest.raises(InputError, match="line 2"):
        gavel.read(trace, truth)
    trace.write_text("\t".join([*good[:5], "ten", *good[6:]]) + "\n")
    with pytest.raises(InputError, match="line 1"):
        gavel.read(trace, truth)


def test_wrong_pollux_files_are_told_in_one_line(tmp_path: Path) -> None:
    """No folder; hosts of another type; no record of progress; a time that is no number."""
    jobs = tmp_path / "jobs.csv"
    jobs.write_text(f"{','.join(pollux.COLUMNS)}\na,0,net,2,16\n")
    folder = tmp_path / "t4"
    with pytest.raises(InputError, match="no folder"):
        pollux.read(jobs, folder, POLLUX)
    with pytest.raises(InputError, match="--cluster HOSTSxDEVICES:t4"):
        pollux.read(jobs, folder, GAVEL)
    (folder / "net").mkdir(parents=True)
    with pytest.raises(InputError, match=r"no validation-BATCH\.csv"):
        pollux.read(jobs, folder, POLLUX)
    (folder / "net" / "validation-16.csv").write_text("progress,grad_sqr,grad_var\n10,soon,1\n")
    with pytest.raises(InputError, match=r"line 2.*'soon'"):
        pollux.read(jobs, folder, POLLUX)
    (folder / "net" / "validation-16.csv").write_text("progress,grad_sqr,grad_var\n10,1,1\n")
    (folder / "net" / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n1,8,-1,0\n")
    with pytest.raises(InputError, match=r"placements\.csv, line 2"):
        pollux.read(jobs, folder, POLLUX)
    (folder / "net" / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n1,8,1,0\n")
    (folder / "net" / "scalability.csv").write_text("num_nodes,num_replicas,local_bsz,step_time,sync_time\n6,6,8,1,0\n")
    with pytest.raises(InputError, match="too few measurements"):
        pollux.read(jobs, folder, POLLUX)
