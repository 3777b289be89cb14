"""Files of users: anything is read or refused in one line, and nothing is written outside its place."""

from __future__ import annotations

import io
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clusterd.agent.host.attempt_records import Refused
from clusterd.agent.host.rank_environment import make_writable
from clusterd.agent.host.workdirs import unpack
from clusterd.errors import ClusterError
from clusterd.submission.batch_script import read_batch_script
from clusterd.submission.job_file import parse_job, read_job_file
from tests.fuzz import examples, one_of

FAST = examples(60)

NAMES = st.text(max_size=8) | st.sampled_from(
    ["a", "a/b", "../out", "/tmp/out", "a/../../out", ".", "", "ä", "a\n", "b", "x" * 200]
)
FORMATS = st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, b"Z"])


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """A compressed tar of odd members, perhaps with some bytes changed or cut off; uncompressed it is long to print."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=draw(FORMATS)) as tar:
        for name, kind in draw(st.lists(st.tuples(NAMES, KINDS), max_size=5)):
            member = tarfile.TarInfo(name.encode("utf-8", "replace").decode())
            member.type, member.linkname = kind, draw(st.sampled_from(["../out", "/etc/passwd", "a", "", "b/c"]))
            member.mode = draw(st.integers(0, 0o7777))
            content = draw(st.binary(max_size=20)) if kind == tarfile.REGTYPE else b""
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    data = bytearray(raw.getvalue())
    for position, value in draw(st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)), max_size=4)):
        data[position] = value
    return zlib.compress(data[: draw(st.sampled_from([len(data), len(data) // 2, 700]))])


@FAST
@given(data=archives() | st.binary(max_size=2000).map(zlib.compress))
def test_a_workdir_is_unpacked_inside_its_folder_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "target"
        target.mkdir()
        refused: Refused | None = None
        try:
            unpack(io.BytesIO(zlib.decompress(data)), target)
        except Refused as error:
            refused = error
        finally:
            make_writable(target)
        assert refused is None or refused.kind == "unpack"
        assert [path.name for path in Path(name).iterdir()] == ["target"]
        assert not any(path.is_block_device() or path.is_char_device() for path in target.rglob("*"))


def in_one_line(read: Callable[[], object]) -> None:
    """Read; a refusal is one line for the user."""
    refusal = ""
    try:
        read()
    except ClusterError as error:
        refusal = str(error)
    assert "\n" not in refusal.strip()


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["4G", "1h", "-1", "1-3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = one_of(
    "name kind command workdir python env datasets secrets resources priority guaranteed preemptible tenant after "
    "time_limit grace retries retry_on snapshot_every checkpoint target_loss array sweep trials gpus devices "
    "nodes memory cpus plan constraint hosts stall"
)


@FAST
@given(
    values=st.dictionaries(KEYS | st.text(max_size=5), VALUES, max_size=6),
    inner=st.dictionaries(KEYS, VALUES, max_size=4),
)
def test_a_job_file_is_read_or_refused(values: dict[str, Any], inner: dict[str, Any]) -> None:
    sound = {"name": "job", "command": ["true"], "workdir": "/"}
    for given_values in (values, {**sound, **values}, {**sound, "resources": inner}):
        in_one_line(lambda values=given_values: parse_job(dict(values), Path("/job.toml"), "job.toml"))


LINES = st.lists(
    st.tuples(
        st.sampled_from(["#SBATCH ", "#CLUSTERD ", "#SBATCH\t", "#sbatch ", "", "# "]),
        one_of(
            "--nodes=2 --ntasks-per-node=1 --gres=gpu:a100:4 --gres=gpu --mem=64G --mem=x --time=1-12:30 --time=:: "
            "--array=1-3%2 --array=9999999-1 --array=1,,2 -N -c --cpus-per-task --dependency=afterok:1 "
            "--dependency=after --export=ALL --constraint=a&b --requeue -J 'a --gpus=a:b:c --nodelist=a[1-3"
        )
        | st.text(max_size=12),
    ).map("".join),
    max_size=6,
)


@FAST
@given(lines=LINES, body=st.text(max_size=20))
@example(lines=["#SBATCH --time=" + "9" * 400], body="true")
def test_a_batch_script_is_read_or_refused(lines: list[str], body: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "job.sh"
        file.write_text("\n".join(["#!/bin/bash", *lines, body]), encoding="utf-8", errors="replace")
        in_one_line(lambda: read_batch_script(file))


@FAST
@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_are_no_job_file_or_one(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "job.toml"
        file.write_bytes(data)
        with pytest.raises(ClusterError):
            read_job_file(file)
