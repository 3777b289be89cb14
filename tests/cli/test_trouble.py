"""``clusterd help KEY``: messages lead to entries, and entries show the messages that they are about."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from clusterd.cli import jobs
from clusterd.cli.help import entries, with_key
from clusterd.cli.main import cli
from clusterd.cli.plans import _show_plans
from tests.conftest import REPOSITORY, RunningCluster

COMPOSED = {r"asks for \d+ GPUs?, the cluster has 0"}
"""Messages that no one string of the code holds: a running cluster prints them below."""


def _worded() -> Iterator[str]:
    """Messages of the operating system, and strings of the code with 0 for each value; docstrings are left out."""
    yield from map(os.strerror, errno.errorcode)
    for file in (REPOSITORY / "clusterd").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                yield node.value


def test_each_pattern_has_a_message_in_the_code() -> None:
    """A message that is reworded must not lose its entry unnoticed."""
    worded = list(_worded())
    patterns = {pattern for entry in entries() if entry.messages for pattern in entry.messages.split("|")}
    assert {one for one in patterns if not any(re.search(one, text) for text in worded)} == COMPOSED


def test_messages_in_the_entries_lead_to_them() -> None:
    for entry in entries():
        printed = re.findall(r"^```\n(.*?)^```$", entry.text, re.MULTILINE | re.DOTALL)
        for line in "".join(printed).splitlines():
            if entry.messages and re.search(entry.messages, line):
                assert with_key(line).endswith(f"(clusterd help {entry.key})")
        assert not printed or not entry.messages or re.search(entry.messages, "".join(printed)), entry.key


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("net can never start: it asks for 2 GPUs, the cluster has 0; queue it all the same", "no-gpu"),
        ("net can never start: it asks for 8 GPUs, the cluster has 4", "never-starts"),
        ("a:gpu0 is left out for 4m58s: the GPU failed: clusterd host undrain a offers it again now", "no-gpu"),
        ("ann may not submit for tenant vision: an operator adds the name", "permission-denied"),
        ("bad (4) is failed: its model could not be built on local0 (exit code 1): Error", "model-not-built"),
        ("net (4) is failed: exit code 95 on a: out of device memory", "out-of-memory"),
        ("there is no job 'nope'", ""),
    ],
)
def test_a_message_ends_with_the_key_of_its_entry(message: str, key: str) -> None:
    assert with_key(message) == (f"{message} (clusterd help {key})" if key else message)


def test_entries_are_printed_without_markdown() -> None:
    shown = CliRunner().invoke(cli, ["help"]).output
    assert [line.split()[0] for line in shown.splitlines()] == [entry.key for entry in entries()]
    for entry in entries():
        text = CliRunner().invoke(cli, ["help", entry.key]).output
        assert text.startswith(f"{entry.key}: {entry.title}\n")
        assert not re.search(r"```|<!--|\]\(|`", text), text


def test_the_name_of_a_command_shows_its_help_and_an_unknown_key_is_refused() -> None:
    assert "Example: clusterd submit" in CliRunner().invoke(cli, ["help", "submit"]).output
    with pytest.raises(Exception, match="did you mean queued"):
        CliRunner().invoke(cli, ["help", "queud"], catch_exceptions=False)


def test_why_and_refusals_name_the_entry(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.start(hosts=1, devices=1)
    refused = cluster.run("run", "--gpus", "1", "--", "true", check=False)
    assert refused.returncode == 2 and refused.stderr.rstrip().endswith("(clusterd help no-gpu)")
    cluster.run("run", "-d", "--name", "first", "--devices", "1", "--", "sleep", "600")
    cluster.run("run", "-d", "--name", "second", "--devices", "1", "--", "true")
    assert cluster.run("why", "second").stdout.splitlines()[0].endswith("(clusterd help queued)")
    fault = "local0:gpu0 is left out for 5m00s: the GPU failed; clusterd host undrain local0 offers it again now"
    answer = cluster.call("why", job="second") | {"unusable": [fault]}
    monkeypatch.setattr(jobs, "Client", lambda: nullcontext(SimpleNamespace(call=lambda *_, **__: answer)))
    assert f"{fault} (clusterd help no-gpu)" in CliRunner().invoke(cli, ["why", "second"]).output


def test_a_measured_time_outside_its_interval_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: after the speed of a machine had changed the row contradicted itself."""
    row = {
        "fits": True, "current": True, "plan": "dp=1", "shape": "1", "step_time_s": 0.1, "lower_s": 0.09,
        "upper_s": 0.11, "measured_s": 0.1, "device_bytes": 1,
    }  # fmt: skip
    _show_plans([row], everything=False)
    assert "the speed has changed" not in capsys.readouterr().err
    _show_plans([{**row, "measured_s": 0.3}], everything=False)
    assert "measured is the newest step time alone" in capsys.readouterr().err
