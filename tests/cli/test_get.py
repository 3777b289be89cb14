"""`clusterd get` fetches files that a job wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clusterd.errors import TryLater
from tests.conftest import RunningCluster, cut_power, until

WRITES = """
echo more >> touched.txt; head -c 3000000 /dev/urandom > out.bin; cksum < out.bin
mkdir -p results/last; echo a > results/a.txt; echo b > results/last/b.txt; ln -s /etc/hostname results/link
chmod u+x results/a.txt
"""


def writes(cluster: RunningCluster, tmp_path: Path) -> str:
    """Job that has written some files and is over."""
    work = tmp_path / "work"
    work.mkdir()
    for name in ("kept.txt", "touched.txt"):
        (work / name).write_text("was there\n")
    command = ("run", "--detach", "--name", "writes", "--", "sh", "-c", WRITES)
    job = cluster.run(*command, cwd=work).stdout.strip()
    cluster.run("wait", job)
    return job


@pytest.fixture(name="written")
def written_(shared_cluster: RunningCluster, tmp_path: Path) -> str:
    return writes(shared_cluster, tmp_path)


def test_files_of_a_job_are_listed_and_copied(shared_cluster: RunningCluster, written: str, tmp_path: Path) -> None:
    listed = json.loads(shared_cluster.run("get", written, "-o", "json").stdout)
    assert [f["path"] for f in listed] == ["out.bin", "results/a.txt", "results/last/b.txt", "touched.txt"]
    assert "results/last/b.txt" in shared_cluster.run("get", "writes").stdout

    here = tmp_path / "here"
    answer = shared_cluster.run("get", written, "out.bin", "results", "--to", str(here)).stderr
    assert "(2.9 MiB) from " in answer
    copied = sorted(str(p.relative_to(here)) for p in here.rglob("*") if p.is_file())
    assert copied == ["out.bin", "results/a.txt", "results/last/b.txt"]
    assert (here / "out.bin").stat().st_size == 3_000_000
    assert [path for path in copied if os.access(here / path, os.X_OK)] == ["results/a.txt"], "what may be executed"
    checked = shared_cluster.run("run", "--", "cksum", "out.bin", cwd=here).stdout.split()
    assert checked[:2] == shared_cluster.run("logs", written).stdout.split()[:2]


def test_nothing_is_written_over_unless_that_is_said(
    shared_cluster: RunningCluster, written: str, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    (here / "results").mkdir(parents=True)
    (here / "results/a.txt").write_text("mine")
    refused = shared_cluster.run("get", written, "results/*", "--to", str(here), check=False)
    assert refused.returncode == 1
    assert "results/a.txt already exists: --force overwrites it" in refused.stderr
    assert [p.name for p in here.rglob("*") if p.is_file()] == ["a.txt"], "none of them was copied"
    assert (here / "results/a.txt").read_text() == "mine"
    shared_cluster.run("get", written, "results/*", "--to", str(here), "--force")
    assert (here / "results/a.txt").read_text() == "a\n"


def test_a_missing_file_is_reported(shared_cluster: RunningCluster, written: str, tmp_path: Path) -> None:
    for wanted in ("kept.txt", "none.pt", "../../agent.log", "results/link"):
        refused = shared_cluster.run("get", written, wanted, "--to", str(tmp_path), check=False)
        assert refused.returncode == 1
        assert f"has written no {wanted}" in refused.stderr
    (tmp_path / "file").touch()
    for wanted, code, why in (("", 2, "the file name is empty"), ("out.bin", 1, "cannot write")):
        refused = shared_cluster.run("get", written, wanted, "--to", str(tmp_path / "file" / "below"), check=False)
        assert (refused.returncode, why in refused.stderr) == (code, True), refused.stderr
    shared_cluster.run("forget", written)
    assert "has written no files" in shared_cluster.run("get", written).stderr


def test_files_of_an_unreachable_host_are_unknown(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """Regression: files on an unreachable host were reported as absent."""
    written = writes(local_cluster, tmp_path)
    (host,) = local_cluster.job(written)["hosts"]
    cut_power(local_cluster.directory, int(host.removeprefix("local")))
    until(lambda: {row["name"]: row["state"] for row in local_cluster.call("hosts")}[host] == "unreachable")
    for wanted in ((), ("-o", "json"), ("out.bin",), (".",)):
        refused = local_cluster.run("get", written, *wanted, check=False)
        assert refused.returncode == 75
        assert f"is unknown until {host} can be reached" in refused.stderr


def test_a_copy_that_a_host_leaves_in_the_middle_is_not_made(local_cluster: RunningCluster, tmp_path: Path) -> None:
    """Regression: the message named neither what the host waited for nor what to do."""
    written = writes(local_cluster, tmp_path)
    (file,) = [f for f in local_cluster.call("files", job=written)["files"] if f["path"] == "out.bin"]
    which = {"path": "out.bin", "host": file["host"], "attempt": file["attempt"]}
    with local_cluster.client() as client:
        chunks = client.stream("file", job=written, **which)
        next(chunks)
        local_cluster.run("host", "remove", file["host"])
        with pytest.raises(TryLater, match=r"out.bin is not copied, local\d went away in the middle of it"):
            list(chunks)


@pytest.mark.parametrize("devices", ["0", "1"])
def test_both_nodes_of_a_command_have_their_files(shared_cluster: RunningCluster, tmp_path: Path, devices: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    options = ("--nodes", "2", "--devices-per-node", devices, "--name", "pair")
    script = "echo $NODE_RANK > rank.txt; echo $NODE_RANK > of-$NODE_RANK.txt"
    job = shared_cluster.run("run", "-d", *options, "--", "sh", "-c", script, cwd=work).stdout.strip()
    shared_cluster.run("wait", job)
    listed = json.loads(shared_cluster.run("get", job, "-o", "json").stdout)
    assert [f["path"] for f in listed] == ["of-0.txt", "of-1.txt", "rank.txt", "rank.txt"]
    hosts = sorted({f["host"] for f in listed})
    shared_cluster.run("get", job, "*.txt", "--to", str(tmp_path / "here"))
    copied = sorted(str(p.relative_to(tmp_path / "here")) for p in (tmp_path / "here").rglob("*.txt"))
    assert copied == [f"{hosts[0]}/rank.txt", f"{hosts[1]}/rank.txt", "of-0.txt", "of-1.txt"]
    assert sorted((tmp_path / "here" / host / "rank.txt").read_text() for host in hosts) == ["0\n", "1\n"]


def test_an_input_that_was_replaced_is_written(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """Its size and time are those of the submitted one."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "input.txt").write_text("old\n")
    (work / "other.txt").write_text("old\n")
    script = "touch -r input.txt time; echo new > new; touch -r time new; mv new input.txt"
    job = shared_cluster.run("run", "-d", "--name", "same", "--", "sh", "-c", script, cwd=work).stdout.strip()
    shared_cluster.run("wait", job)
    shared_cluster.run("get", job, "input.txt", "--to", str(tmp_path / "here"))
    assert (tmp_path / "here" / "input.txt").read_text() == "new\n"
    listed = json.loads(shared_cluster.run("get", job, "-o", "json").stdout)
    assert "other.txt" not in [f["path"] for f in listed]


@pytest.mark.slow
def test_all_of_many_files_are_found(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """Regression: of more than 10,000 `get .` copied the first, and those behind them were "not written"."""
    body = "import os; os.mkdir('d'); [open(f'd/{n:05}', 'w').close() for n in range(10003)]; open('z', 'w').close()"
    job = shared_cluster.run("run", "-d", "--name", "many", "--", "python3", "-c", body).stdout.strip()
    shared_cluster.run("wait", job)
    assert "and 4 more, not listed" in shared_cluster.run("get", job).stderr
    shared_cluster.run("get", job, "d/1000*", "z", "--to", str(tmp_path))
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["10000", "10001", "10002", "z"]


def test_a_folder_alone_is_for_all_files_whatever_their_names(shared_cluster: RunningCluster, tmp_path: Path) -> None:
    """Regression: `get JOB --to DIR` listed them and copied nothing; names in Latin-1 or with escapes were not."""
    body = "echo a > a.txt; echo b > \"$(printf 'caf\\351')\"; "
    body += "echo c > \"$(printf 'x\\033[31m')\"; echo d > 'caf\\xe9'"
    job = shared_cluster.run("run", "-d", "--name", "latin", "--", "sh", "-c", body).stdout.strip()
    shared_cluster.run("wait", job)
    listed = shared_cluster.run("get", job).stdout
    assert listed.count("caf\\xe9 ") == 2
    assert "x\\x1b[31m" in listed and "\x1b" not in listed
    shared_cluster.run("get", job, "--to", str(tmp_path / "all"))
    copied = {file: (tmp_path / "all" / os.fsdecode(file)).read_text() for file in os.listdir(bytes(tmp_path / "all"))}
    assert copied == {b"a.txt": "a\n", b"caf\xe9": "b\n", b"x\x1b[31m": "c\n", b"caf\\xe9": "d\n"}
    shared_cluster.run("get", job, "caf*", "--to", str(tmp_path / "two"))
    assert len(list((tmp_path / "two").iterdir())) == 2
    shared_cluster.run("get", job, "a.txt", "--to", str(tmp_path / "one"))
